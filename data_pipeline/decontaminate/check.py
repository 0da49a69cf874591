"""A finished dataset against evaluations, such as those that came out after it was built: reads the shards, changes nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.dataset import Dataset
from data_pipeline.decontaminate.config import DecontaminateConfig
from data_pipeline.decontaminate.evidence import contamination_lines, evidence, write_evidence
from data_pipeline.decontaminate.find import find_overlaps
from data_pipeline.decontaminate.stage import Search, char_spans, words_of
from data_pipeline.document import Document
from data_pipeline.errors import ConfigError
from data_pipeline.fim import document_text, fim_of_dataset
from data_pipeline.normalise import NormaliseConfig
from data_pipeline.pool import Report, Workers, started
from data_pipeline.progress import Progress
from data_pipeline.schema import apply_override, compose, validate
from data_pipeline.tokenizer.encode import Encoder

BATCH_BYTES = 32 << 20


@dataclass(frozen=True)
class _Batch:
    """Consecutive documents of one source, for a worker."""

    dataset: Path
    split: str
    source: str
    first: int
    stop: int
    search: Search


def check_dataset(folder: Path, config: DecontaminateConfig, *, output: Path | None = None, workers: int = 1, quiet: bool = False) -> int:
    """Look for items in every document, held-out ones too; evidence goes to `output`, a line an item and document. Returns the number
    of items found. Items are normalised as the dataset's documents were."""
    progress = Progress(quiet=quiet)
    dataset = Dataset.open(folder)
    spelling = validate(NormaliseConfig, dataset.manifest.config.get("normalise") or {})
    search = Search.of(config, spelling)
    index = search.index()
    batches = list(_batches(dataset, search))
    total = sum(source.text_bytes for source in [*dataset.sources, *dataset.validation])
    with started(workers) as pool, progress.stage("decontaminate", total) as advance:
        found = [line for lines in _run(pool, batches, advance) for line in lines]
    if output is not None:
        write_evidence(output, found)
    for line in contamination_lines(index, found):
        progress.say(line)
    return len({(line["evaluation"], line["item"]) for line in found})


def config_for(evaluations: Sequence[str], settings: Sequence[str] = ()) -> DecontaminateConfig:
    """The settings of one data config with a section decontaminate; or of [NAME=]FILES, where a file's name is its evaluation's."""
    tree: dict[str, Any]
    if len(evaluations) == 1 and evaluations[0].endswith((".yaml", ".yml")):
        whole, faults = compose(evaluations[0])
        if faults:
            raise ConfigError(faults)
        tree = dict(whole.get("decontaminate") or {})
    else:
        tree = {"evaluations": []}
        for given in evaluations:
            name, equals, files = given.partition("=")
            name = name if equals else re.sub(r"[^A-Za-z0-9_-]+", "-", Path(given).name.partition(".")[0]).strip("-") or "evaluation"
            tree["evaluations"].append({"name": name, "files": files or given})
    for setting in settings:
        apply_override(tree, setting)
    return validate(DecontaminateConfig, tree, prefix="decontaminate")


def _run(workers: Workers, batches: Sequence[_Batch], advance: Report) -> list[list[dict[str, Any]]]:
    return workers.run(_check, batches, advance=advance)


def _batches(dataset: Dataset, search: Search) -> Iterator[_Batch]:
    for source in [*dataset.sources, *dataset.validation]:
        each = max(1, source.num_documents * BATCH_BYTES // max(source.text_bytes, 1))
        for first in range(0, source.num_documents, each):
            stop = min(first + each, source.num_documents)
            yield _Batch(dataset.path, source.split, source.name, first, stop, search)


def _check(batch: _Batch, report: Report) -> list[dict[str, Any]]:
    """In a worker: evidence of the batch."""
    dataset = Dataset.open(batch.dataset)
    index = batch.search.index()
    encoder, fim = Encoder.open(dataset.tokenizer_path), fim_of_dataset(dataset)
    source = next(source for source in dataset.split(batch.split) if source.name == batch.source)
    found: list[dict[str, Any]] = []
    for number in range(batch.first, batch.stop):
        shard, inside = source.find(number)
        text = document_text(shard.document(inside), encoder, fim)
        words = words_of(text)
        if overlaps := find_overlaps(words, index, batch.search.config):
            file, record = shard.origin(inside)
            document = Document(shard.document_id(inside), text, source.name, {"file": file, "record": record})
            found += evidence(document, overlaps, char_spans(text, words, overlaps), index)
        report(len(text))
    return found
