"""The first stage: input files to parts of normalised documents, with the books of what was read."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.decontaminate.stage import Decontaminate, EvidenceWriter, Search
from data_pipeline.document import Document
from data_pipeline.errors import DataError
from data_pipeline.filters.config import FiltersConfig
from data_pipeline.filters.stage import DroppedWriter, Filters
from data_pipeline.inputs import InputFile, ReadTask
from data_pipeline.normalise import Normalise, NormaliseConfig
from data_pipeline.pair_steps import OnBothSides
from data_pipeline.pii import Pii
from data_pipeline.pool import Report, Workers
from data_pipeline.progress import Progress
from data_pipeline.read import ReadOptions, count_read, read_file
from data_pipeline.read_huggingface import DatasetSplit, read_dataset
from data_pipeline.read_pairs import read_dataset_fields, read_fields, read_lines
from data_pipeline.records import Rejected
from data_pipeline.step import Ledger, Step
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
    filters: FiltersConfig | None = None
    dedup_field: str | None = None
    decontaminate: Search | None = None

    @property
    def done_path(self) -> Path:
        """Written last: what it names exists."""
        return self.folder / f"{self.task.key}.json"

    @property
    def dropped_path(self) -> Path:
        """What the filters dropped, where it is asked for."""
        return dropped_path(self.folder, self.task)

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields of a record that steps look at besides its text."""
        url = () if self.filters is None or self.filters.url is None else (self.filters.url.field,)
        return tuple(dict.fromkeys((*url, *(() if self.dedup_field is None else (self.dedup_field,)))))

    def options(self, notes: Counter[str]) -> ReadOptions:
        """As the source has them; what is repaired goes into `notes`."""
        source = self.task.source
        return ReadOptions(
            source.text_field, source.txt_documents, notes=notes, fields=self.fields, invalid_utf8=source.invalid_utf8, format=source.format
        )


def dropped_path(folder: Path, task: ReadTask) -> Path:
    return folder / f"{task.key}.dropped.jsonl.zst"


def contamination_path(folder: Path, task: ReadTask) -> Path:
    return folder / f"{task.key}.contamination.jsonl"


def ingest(jobs: Sequence[ReadJob], *, workers: Workers, progress: Progress) -> tuple[DocumentStore, Ledger]:
    """Read what isn't read yet. Parts and books are the same whatever the number of workers and however often it was killed.

    Raises DataError where nothing is left to go on with.
    """
    read_missing(jobs, workers=workers, progress=progress)
    ledger = Ledger()
    for job in jobs:
        ledger.merge(Ledger.from_dict(json.loads(job.done_path.read_text())["ledger"]))
    store = DocumentStore(parts_of(jobs))
    if not store.num_documents:
        filtered = any(ledger.total(stage).read.documents for stage in ledger.stages if stage != "read")
        advice = "Loosen the filters." if filtered else "Check text_field and format of the sources."
        raise DataError(f"no documents in the input: {_why_none(ledger)}. {advice}")
    return store, ledger


def read_missing(jobs: Sequence[ReadJob], *, workers: Workers, progress: Progress) -> None:
    waiting = [job for job in jobs if not job.done_path.exists()]
    if waiting:
        if (search := waiting[0].decontaminate) is not None:
            search.index()  # its faults come out before any work is done
        with progress.stage("read", sum(job.task.num_bytes for job in waiting)) as advance:
            workers.run(read_task, waiting, advance=advance)


def parts_of(jobs: Sequence[ReadJob]) -> list[tuple[str, Part]]:
    """(source, part) of what was read, in order."""
    return [(job.task.source.name, Part(job.folder / name)) for job in jobs for name in json.loads(job.done_path.read_text())["parts"]]


def read_task(job: ReadJob, report: Report) -> None:
    """In a worker: write the task's parts, then what says that they are there."""
    ledger = Ledger()
    names: list[str] = []
    with ExitStack() as dropped, ExitStack() as stack:
        steps = _steps(job, ledger, dropped)
        for name in ("read", *(step.name for step in steps)):
            ledger.tally(name, job.task.source.name)
        documents = _documents(job, ledger, report)
        for step in steps:
            documents = step.run(documents)
        writer: PartWriter | None = None
        for document in documents:
            if writer is None or writer.text_bytes >= PART_BYTES:
                stack.close()
                names.append(f"{job.task.key}-{len(names):03d}.documents")
                writer = stack.enter_context(write_part(job.folder / names[-1], field=job.dedup_field, pairs=job.task.source.is_pairs))
            writer.add(document)
    ledger.balance(chain=("read", *(step.name for step in steps)))
    with atomic_write(job.done_path) as file:
        file.write(json.dumps({"parts": names, "ledger": ledger.to_dict()}).encode())


def _steps(job: ReadJob, ledger: Ledger, stack: ExitStack) -> list[Step]:
    """Every step that looks at one document at a time, in order."""
    steps: list[Step] = [Normalise(job.normalise, ledger)]
    writer = None
    if (filters := job.filters) is not None:
        writer = stack.enter_context(DroppedWriter(job.dropped_path)) if filters.write_dropped else None
        steps.append(Filters(filters, ledger, dropped=writer))
    if job.decontaminate is not None:  # before anything is masked, since masks would hide what is looked for
        evidence = stack.enter_context(EvidenceWriter(contamination_path(job.folder, job.task)))
        steps.append(Decontaminate(job.decontaminate.config, job.decontaminate.index(), ledger, evidence=evidence, dropped=writer))
    if filters is not None and filters.pii is not None:
        steps.append(Pii(filters.pii, ledger))
    return [OnBothSides(step) for step in steps] if job.task.source.is_pairs else steps


def _documents(job: ReadJob, ledger: Ledger, report: Report) -> Iterator[Document]:
    source = job.task.source
    if source.dataset is not None:
        notes: Counter[str] = Counter()
        items = _items_of_dataset(job, notes)
        yield from count_read(items, ledger, source=source.name, strict=job.strict, notes=notes)
        report(job.task.num_bytes)
        return
    targets = job.task.targets or (None,) * len(job.task.files)
    for file, target in zip(job.task.files, targets):
        notes = Counter()
        items = _items_of_file(job, file, target, notes)
        left = file.num_bytes + (target.num_bytes if target is not None else 0)
        for document in count_read(items, ledger, source=source.name, strict=job.strict, notes=notes):
            yield document
            step = min(left, len(document.text))  # a guess at how far the file is read; what is left is told at its end
            left -= step
            report(step)
        for each in (file, target):
            if each is not None:
                each.check()
        report(left)


def _items_of_file(job: ReadJob, file: InputFile, target: InputFile | None, notes: Counter[str]) -> Iterator[Document | Rejected]:
    source, options = job.task.source, job.options(notes)
    if target is not None:
        return read_lines(file.path, target.path, options, source=source.name, name=file.name, target_name=target.name)
    if source.source_field is not None and source.target_field is not None:
        return read_fields(file.path, (source.source_field, source.target_field), options, source=source.name, name=file.name)
    return read_file(file.path, options, source=source.name, name=file.name)


def _items_of_dataset(job: ReadJob, notes: Counter[str]) -> Iterator[Document | Rejected]:
    source, options = job.task.source, job.options(notes)
    assert source.dataset is not None
    dataset = DatasetSplit(source.dataset, source.dataset_config, source.split, source.streaming, source.revision)
    if source.source_field is not None and source.target_field is not None:
        return read_dataset_fields(dataset, (source.source_field, source.target_field), options, source=source.name)
    return read_dataset(dataset, options, source=source.name)


def _why_none(ledger: Ledger) -> str:
    totals = [ledger.total(stage) for stage in ledger.stages]
    reasons: dict[str, Any] = {reason: count.documents for total in totals for reason, count in {**total.dropped, **total.errors}.items()}
    return ", ".join(f"{number} {reason.replace('_', ' ')}" for reason, number in sorted(reasons.items())) or "the files are empty"
