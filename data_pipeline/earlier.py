"""An earlier dataset as something to compare with: an index of its documents, made once and kept beside its shards.

`dedup/KEY.index` holds a row for each document: content key, length, MinHash bands and sketch. It is outside the manifest, as packing plans
are, and is named by all that it depends on: the dataset's identity and the settings of MinHash.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.blockfile import BlockFile, write_blockfile
from data_pipeline.cache_key import cache_key
from data_pipeline.dataset import Dataset, TokenSource
from data_pipeline.dedup.columns import Columns, DocRecord, batches, columns_from, columns_of, rows_of
from data_pipeline.dedup.config import MinHashConfig
from data_pipeline.document import content_key
from data_pipeline.fim import Fim, document_text, fim_of_dataset
from data_pipeline.pool import Report, Workers
from data_pipeline.progress import Progress
from data_pipeline.tokenizer.encode import Encoder

PART_DOCUMENTS = 1 << 15


class Earlier:
    """The documents of a dataset, numbered through its training and then its held-out sources. `id_of`: their names among the documents
    of a new one."""

    def __init__(self, path: str, place: int) -> None:
        """`place`: of this one among the earlier datasets of a build."""
        self.path, self.place = path, place
        self.dataset = Dataset.open(path)
        self._sources: list[TokenSource] = [*self.dataset.sources, *self.dataset.validation]
        self._firsts = np.cumsum([0, *(source.num_documents for source in self._sources)])
        self.num_documents = int(self._firsts[-1])

    @property
    def content(self) -> str:
        """For the keys of what depends on its texts: its identity, and that they are read in their own order where fill in the middle
        rearranged their tokens (older indexes have them as they lie)."""
        identity = self.dataset.identity
        if self._is_pairs:
            return f"{identity} by sides"  # older indexes have the keys of their joined texts
        return identity if self.dataset.manifest.config.get("fim") is None else f"{identity} in the order of the text"

    def id_of(self, number: int) -> str:
        return f"{self.place}/{number}"

    def text(self, number: int) -> str:
        source, inside = self._find(number)
        shard, place = source.find(inside)
        return document_text(shard.document(place), self._encoder, self._fim)

    def record(self, number: int) -> DocRecord:
        """For the index."""
        text = self.text(number)
        if not self._is_pairs:
            return DocRecord(str(number), text)
        source, inside = self._find(number)
        shard, place = source.find(inside)
        target_at = len(self._encoder.decode(shard.sides(place)[0][:-1].tolist())) + 1
        return DocRecord(str(number), text, key=content_key(text, target_at))

    def named(self, number: int) -> dict[str, Any]:
        """For duplicates.jsonl."""
        source, inside = self._find(number)
        shard, place = source.find(inside)
        file, record = shard.origin(place)
        return {"dataset": self.path, "id": shard.document_id(place), "source": source.name, "file": file, "record": record}

    def columns(self, config: MinHashConfig | None, index: Path) -> Iterator[Columns]:
        """A few rows at a time, from the index."""
        file = BlockFile(index, kind="dedup index")
        for first in range(0, self.num_documents, PART_DOCUMENTS):
            stop = min(first + PART_DOCUMENTS, self.num_documents)
            ids = [self.id_of(number).encode() for number in range(first, stop)]
            yield columns_from(file, config, first, stop, ids=ids, priority=-1)

    def index(self, config: MinHashConfig | None, *, folder: Path, workers: Workers, progress: Progress) -> Path:
        """The index, made where it is missing: in the dataset, or in `folder` where that is in object storage or can't be written to."""
        name = f"{cache_key('dedup', 'index', self.content, config.model_dump(mode='json', exclude={'audit_documents'}) if config is not None else None)}.index"
        places = [*([] if self.dataset.remote is not None else [self.dataset.path / "dedup" / name]), folder / name]
        if found := next((path for path in places if path.exists()), None):
            return found
        jobs = self._jobs(config)
        with progress.stage(f"index {self.path}", sum(source.text_bytes for source in self._sources)) as advance:
            parts = workers.run(index_part, jobs, advance=advance)
        for path in places:
            try:
                with write_blockfile(path, kind="dedup index") as out:
                    out.begin("rows", "<u1")
                    for part in parts:
                        out.append(np.frombuffer(part, dtype=np.uint8))
                return path
            except OSError:
                if path is places[-1]:
                    raise
        raise AssertionError("the last place either holds the index or raises")

    def _jobs(self, config: MinHashConfig | None) -> list[tuple[str, int, int, MinHashConfig | None]]:
        return [
            (self.path, first, min(first + PART_DOCUMENTS, self.num_documents), config)
            for first in range(0, self.num_documents, PART_DOCUMENTS)
        ]

    def _find(self, number: int) -> tuple[TokenSource, int]:
        place = int(np.searchsorted(self._firsts, number, side="right")) - 1
        return self._sources[place], number - int(self._firsts[place])

    @property
    def _is_pairs(self) -> bool:
        return any(source.pairs for source in self._sources)

    @cached_property
    def _encoder(self) -> Encoder:
        return Encoder.open(self.dataset.tokenizer_path)

    @cached_property
    def _fim(self) -> Fim | None:
        return fim_of_dataset(self.dataset)


def index_part(job: tuple[str, int, int, MinHashConfig | None], report: Report) -> bytes:
    """In a worker: the rows of some documents."""
    path, first, stop, config = job
    earlier = Earlier(path, 0)

    def records() -> Iterator[DocRecord]:
        for number in range(first, stop):
            record = earlier.record(number)
            yield record
            report(len(record.text))

    return b"".join(rows_of(columns_of(batch, config), config) for batch in batches(records()))


def open_earlier(paths: Sequence[str]) -> list[Earlier]:
    """Raises DataError where one is no finished dataset."""
    return [Earlier(path, place) for place, path in enumerate(paths)]
