"""Line and substring dedup as stages of the build: the store with every repeat cut out, its documents numbered as before."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_pipeline.blockfile import BlockFile, write_blockfile
from data_pipeline.dedup.config import LinesConfig, SubstringConfig
from data_pipeline.dedup.keepers import keepers_of
from data_pipeline.dedup.repeats import CUT, ScanJob, cut_out, find_cuts, scan
from data_pipeline.document import Document
from data_pipeline.pool import Report, Workers
from data_pipeline.progress import Progress
from data_pipeline.step import Ledger
from data_pipeline.store import DocumentStore, Part, write_part


@dataclass(frozen=True)
class EditJob:
    """A part to write again: `cuts` of it, their ranks replaced by numbers within the part."""

    part: Path
    cuts: np.ndarray
    config: LinesConfig | SubstringConfig
    source: str
    path: Path


def cut_repeats(
    store: DocumentStore,
    kept: np.ndarray,
    config: LinesConfig | SubstringConfig,
    *,
    stage: str,
    priorities: Sequence[str],
    key: str,
    folder: Path,
    workers: Workers,
    progress: Progress,
    ledger: Ledger,
) -> tuple[DocumentStore, np.ndarray]:
    """(the store without repeats, bool[documents]: what is kept), counted under `stage`. `key`: of all that the
    result depends on. Documents of which nothing is left go, for the reason `repeated`."""
    keepers = keepers_of(store, priorities)
    ranks = np.empty(store.num_documents, dtype=np.int64)
    ranks[keepers] = np.arange(store.num_documents)
    ranks[~kept] = -1
    cuts = _cuts(store, ranks, config, stage=stage, path=folder / f"{key}.cuts", workers=workers, progress=progress)
    numbers = keepers[cuts["rank"]]
    order = np.argsort(numbers, kind="stable")
    cuts, numbers = cuts[order], numbers[order]
    jobs = []
    for place, part in enumerate(store.parts):
        first = store.first(place)
        low, high = np.searchsorted(numbers, [first, first + part.num_documents])
        path = folder / f"{key}-{place:05d}.documents"
        if low == high:
            continue
        here = cuts[low:high].copy()
        here["rank"] = numbers[low:high] - first
        jobs.append(EditJob(part.path, here, config, store.source(place), path))
    with progress.stage(f"cut {stage}", sum(Part(job.part).text_bytes for job in jobs)) as advance:
        workers.run(edit, jobs, advance=advance)
    edited = {job.part: job.path for job in jobs}
    parts = [(store.source(place), Part(edited.get(part.path, part.path))) for place, part in enumerate(store.parts)]
    after = DocumentStore(parts)
    left = kept & (after.lengths() > 0)
    _count(store, after, kept, left, np.bincount(numbers, minlength=store.num_documents), ledger, stage)
    return after, left


def _cuts(
    store: DocumentStore,
    ranks: np.ndarray,
    config: LinesConfig | SubstringConfig,
    *,
    stage: str,
    path: Path,
    workers: Workers,
    progress: Progress,
) -> np.ndarray:
    """Find what to cut, or take it from `path` where it was found before."""
    if not path.exists():
        spill = path.with_suffix(".runs")
        jobs = [
            ScanJob(part.path, ranks[store.first(place) : store.first(place) + part.num_documents], config, spill / f"{place:05d}.runs")
            for place, part in enumerate(store.parts)
        ]
        with progress.stage(stage, store.text_bytes) as advance:
            workers.run(scan, jobs, advance=advance)
        cuts = find_cuts([job.path for job in jobs], config)
        with write_blockfile(path, kind="cuts") as out:
            out.add("cuts", cuts)
        shutil.rmtree(spill, ignore_errors=True)
    return np.array(BlockFile(path, kind="cuts").read("cuts"), dtype=CUT)


def edit(job: EditJob, report: Report) -> None:
    """In a worker: write the part without its cuts, unless it is there."""
    part = Part(job.part)
    if job.path.exists():
        report(part.text_bytes)
        return
    numbers = job.cuts["rank"]
    with write_part(job.path) as writer:
        for number in range(part.num_documents):
            low, high = np.searchsorted(numbers, [number, number + 1])
            text = part.text(number)
            if high > low:
                text = cut_out(text, job.cuts[low:high], job.config)
            file, record = part.origin(number)
            writer.add(Document(part.id(number), text, job.source, {"file": file, "record": record}))
            report(int(part.offsets[number + 1] - part.offsets[number]))


def _count(
    before: DocumentStore, after: DocumentStore, kept: np.ndarray, left: np.ndarray, num_cuts: np.ndarray, ledger: Ledger, stage: str
) -> None:
    lengths, new_lengths = before.lengths(), after.lengths()
    for place, part in enumerate(before.parts):
        tally = ledger.tally(stage, before.source(place))
        here = slice(before.first(place), before.first(place) + part.num_documents)
        for was, is_kept, stays, length, cuts in zip(
            lengths[here].tolist(), kept[here].tolist(), left[here].tolist(), new_lengths[here].tolist(), num_cuts[here].tolist()
        ):
            if stays:
                tally.keep(was, length)
                if cuts:
                    tally.note("documents_cut")
                    tally.note("cuts", cuts)
            elif is_kept:
                tally.drop("repeated", was)
