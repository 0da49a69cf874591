"""MinHash signatures of a part of the documents, kept in a file: what several machines can do before one looks for duplicates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_pipeline.blockfile import BlockFile, write_blockfile
from data_pipeline.cache_key import cache_key
from data_pipeline.dedup.columns import Columns, DocRecord, batches, columns_from, columns_of, rows_of
from data_pipeline.dedup.config import MinHashConfig
from data_pipeline.pool import Report
from data_pipeline.store import DocumentStore, Part

_READ_DOCUMENTS = 1 << 15


@dataclass(frozen=True)
class SignatureJob:
    part: Path
    text_bytes: int
    config: MinHashConfig
    path: Path


def signature_path(part: Part, config: MinHashConfig, folder: Path) -> Path:
    """Parts are named by all that they depend on, so this is too."""
    return (
        folder
        / f"{part.path.stem}-{cache_key('dedup', 'signatures', config.model_dump(mode='json', exclude={'audit_documents'}))[:16]}.signatures"
    )


def signature_jobs(parts: Sequence[tuple[str, Part]], config: MinHashConfig, folder: Path) -> list[SignatureJob]:
    """Of the parts that have none yet."""
    jobs = [SignatureJob(part.path, part.text_bytes, config, signature_path(part, config, folder)) for _, part in parts]
    return [job for job in jobs if not job.path.exists()]


def signature_files(store: DocumentStore, config: MinHashConfig | None, folder: Path) -> dict[int, Path]:
    """The files that there are, by the number of the part."""
    if config is None:
        return {}
    paths = {number: signature_path(part, config, folder) for number, part in enumerate(store.parts)}
    return {number: path for number, path in paths.items() if path.exists()}


def make_signatures(job: SignatureJob, report: Report) -> None:
    """In a worker."""
    part = Part(job.part)

    def records() -> Iterator[DocRecord]:
        for number in range(part.num_documents):
            yield DocRecord(part.id(number), part.text(number), key=part.key(number))
            report(int(part.offsets[number + 1] - part.offsets[number]))

    with write_blockfile(job.path, kind="signatures") as out:
        out.begin("rows", "<u1")
        for batch in batches(records()):
            out.append(np.frombuffer(rows_of(columns_of(batch, job.config), job.config), dtype=np.uint8))
        out.meta.update(documents=part.num_documents)


def read_signatures(path: Path, part: Part, config: MinHashConfig, *, priority: int, chosen: np.ndarray) -> Iterator[Columns]:
    """A few documents at a time, of those that are `chosen`, bool[documents]."""
    file = BlockFile(path, kind="signatures")
    for first in range(0, part.num_documents, _READ_DOCUMENTS):
        numbers = first + np.flatnonzero(chosen[first : first + _READ_DOCUMENTS])
        ids = [part.id(number).encode() for number in numbers.tolist()]
        stop = min(first + _READ_DOCUMENTS, part.num_documents)
        yield columns_from(file, config, first, stop, ids=ids, priority=priority, chosen=numbers - first)
        file.release()
