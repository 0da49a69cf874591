"""From a place in an input file to what became of it: the document in the dataset, or the stage and the reason for which it went."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any

from data_pipeline.dataset import Dataset
from data_pipeline.errors import DataError


def trace_input(datasets: Sequence[Dataset], file: str, record: int) -> list[dict[str, Any]]:
    """What was made of this record (a line of a jsonl file, a row of a parquet file, the first line of a paragraph, 1 for a file that is
    one document). `file`: its name as reports have it, or any path that ends in it. One entry for each source that has such a file.

    Raises DataError where none of the datasets knows of it.
    """
    wanted = _same_name(file)
    found = [
        each
        for dataset in datasets
        for look in (_stored(dataset, wanted, record), _dropped(dataset.path, wanted, record), _duplicates(dataset.path, wanted, record))
        for each in look
    ]
    if not found:
        raise DataError(
            f"{', '.join(dataset.location for dataset in datasets)}: nothing is known of {file}:{record}. No document begins there, or it was dropped before it had a text or by a filter: "
            "report.html counts the reasons and has the first places; with filters.write_dropped: true a build keeps all that its filters drop."
        )
    return found


def _same_name(file: str) -> Callable[[str], bool]:
    """Whether a name in the index is the end of this path, or of either file of a pair."""
    parts = PurePath(file).parts

    def wanted(name: str) -> bool:
        for one in (name, *name.split(" + ")):
            ours = PurePath(one).parts
            if parts[-len(ours) :] == ours:
                return True
        return False

    return wanted


def _stored(dataset: Dataset, wanted: Callable[[str], bool], record: int) -> Iterator[dict[str, Any]]:
    for source in [*dataset.sources, *dataset.validation]:
        for shard in source.shards:
            for number in shard.numbers_at(wanted, record):
                name, at = shard.origin(number)
                tokens = int(shard.offsets[number + 1] - shard.offsets[number])
                where = {"source": source.name, "split": source.split, "file": name, "record": at}
                yield {"outcome": "stored", "document": shard.document_id(number), **where, "tokens": tokens, "shard": shard.path.name}


def _duplicates(folder: Path, wanted: Callable[[str], bool], record: int) -> Iterator[dict[str, Any]]:
    path = folder / "duplicates.jsonl"
    if not path.is_file():
        return
    with open(path, encoding="utf-8") as file:
        for line in file:
            entry = json.loads(line)
            removed = entry["removed"]
            if removed["record"] == record and wanted(removed["file"]):
                why = {"reason": entry["reason"], "jaccard": entry["jaccard"], "kept": entry["kept"]}
                yield {"outcome": "duplicate", "document": removed["id"], **removed, **why}


def _dropped(folder: Path, wanted: Callable[[str], bool], record: int) -> Iterator[dict[str, Any]]:
    """Of what the filters wrote down."""
    for path in sorted((folder / "dropped").glob("*.jsonl.zst")):
        import zstandard

        with open(path, "rb") as raw, zstandard.ZstdDecompressor().stream_reader(raw) as stream:
            for line in io.TextIOWrapper(stream, encoding="utf-8"):
                entry = json.loads(line)
                if entry["record"] == record and wanted(entry["file"]):
                    where = {name: entry[name] for name in ("source", "file", "record", "stage", "reason")}
                    yield {"outcome": "dropped", "document": entry["id"], **where, "text": entry["text"][:300]}
