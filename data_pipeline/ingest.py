"""The first stage: input files to parts of normalised documents, with the books of what was read."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.document import Document
from data_pipeline.errors import DataError
from data_pipeline.inputs import ReadTask
from data_pipeline.normalise import Normalise, NormaliseConfig
from data_pipeline.pool import Report, Workers
from data_pipeline.progress import Progress
from data_pipeline.read import count_read, read_dataset, read_file
from data_pipeline.step import Ledger
from data_pipeline.storage import atomic_write
from data_pipeline.store import DocumentStore, Part, PartWriter, write_part

PART_BYTES = 256 << 20


@dataclass(frozen=True)
class ReadJob:
    """A read task with what a worker needs to do it."""

    task: ReadTask
    normalise: NormaliseConfig
    strict: bool
    folder: Path

    @property
    def done_path(self) -> Path:
        """Written last: what it names exists."""
        return self.folder / f"{self.task.key}.json"


def ingest(
    tasks: Sequence[ReadTask], *, normalise: NormaliseConfig, strict: bool, folder: Path, workers: Workers, progress: Progress
) -> tuple[DocumentStore, Ledger]:
    """Read what isn't read yet. Parts and books are the same whatever the number of workers and however often it was killed.

    Raises DataError where nothing is left to go on with.
    """
    jobs = [ReadJob(task, normalise, strict, folder) for task in tasks]
    waiting = [job for job in jobs if not job.done_path.exists()]
    if waiting:
        with progress.stage("read", sum(job.task.num_bytes for job in waiting)) as advance:
            workers.run(read_task, waiting, advance=advance)
    ledger = Ledger()
    parts: list[tuple[str, Part]] = []
    for job in jobs:
        done = json.loads(job.done_path.read_text())
        ledger.merge(Ledger.from_dict(done["ledger"]))
        parts.extend((job.task.source.name, Part(folder / name)) for name in done["parts"])
    store = DocumentStore(parts)
    if not store.num_documents:
        raise DataError(f"no documents in the input: {_why_none(ledger)}. Check text_field and format of the sources.")
    return store, ledger


def read_task(job: ReadJob, report: Report) -> None:
    """In a worker: write the task's parts, then what says that they are there."""
    ledger = Ledger()
    step = Normalise(job.normalise, ledger)
    ledger.tally("read", job.task.source.name)
    ledger.tally("normalise", job.task.source.name)
    names: list[str] = []
    documents = step.run(_documents(job, ledger, report))
    with ExitStack() as stack:
        writer: PartWriter | None = None
        for document in documents:
            if writer is None or writer.text_bytes >= PART_BYTES:
                stack.close()
                names.append(f"{job.task.key}-{len(names):03d}.documents")
                writer = stack.enter_context(write_part(job.folder / names[-1]))
            writer.add(document)
    ledger.balance(chain=("read", "normalise"))
    with atomic_write(job.done_path) as file:
        file.write(json.dumps({"parts": names, "ledger": ledger.to_dict()}).encode())


def _documents(job: ReadJob, ledger: Ledger, report: Report) -> Iterator[Document]:
    source = job.task.source
    if source.dataset is not None:
        notes: Counter[str] = Counter()
        items = read_dataset(
            source.dataset,
            source=source.name,
            config_name=source.dataset_config,
            split=source.split,
            text_field=source.text_field,
            streaming=source.streaming,
            notes=notes,
        )
        yield from count_read(items, ledger, source=source.name, strict=job.strict, notes=notes)
        report(job.task.num_bytes)
        return
    for file in job.task.files:
        notes = Counter()
        items = read_file(
            file.path,
            source=source.name,
            name=file.name,
            format=source.format,
            text_field=source.text_field,
            txt_documents=source.txt_documents,
            notes=notes,
        )
        left = file.num_bytes
        for document in count_read(items, ledger, source=source.name, strict=job.strict, notes=notes):
            yield document
            step = min(left, len(document.text))  # a guess at how far the file is read; what is left is told at its end
            left -= step
            report(step)
        file.check()
        report(left)


def _why_none(ledger: Ledger) -> str:
    total = ledger.total("read")
    reasons: dict[str, Any] = {reason: count.documents for reason, count in {**total.dropped, **total.errors}.items()}
    return ", ".join(f"{number} {reason.replace('_', ' ')}" for reason, number in sorted(reasons.items())) or "the files are empty"
