"""Deduplication as a stage of the build: over the document store, with its result kept as a small file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from data_pipeline.blockfile import BlockFile, write_blockfile
from data_pipeline.dedup.columns import Columns, DocRecord
from data_pipeline.dedup.config import DedupConfig, MinHashConfig
from data_pipeline.dedup.exact import first_of_equals
from data_pipeline.dedup.keepers import keepers_of
from data_pipeline.dedup.run import find_rows, opened_table
from data_pipeline.dedup.signatures import read_signatures
from data_pipeline.pool import Report, Workers
from data_pipeline.progress import Progress
from data_pipeline.step import Count, Ledger
from data_pipeline.store import DocumentStore

REASONS = ("exact", "near", "field")
REMOVAL = np.dtype([("removed", "<i8"), ("kept", "<i8"), ("jaccard", "<f8"), ("reason", "u1")])


class Earlier(Protocol):
    """An earlier dataset whose documents stay, as earlier.py has it."""

    num_documents: int

    def index(self, config: MinHashConfig | None, *, folder: Path, workers: Workers, progress: Progress) -> Path: ...

    def columns(self, config: MinHashConfig | None, index: Path) -> Iterator[Columns]: ...

    def text(self, number: int) -> str: ...

    def named(self, number: int) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Duplicates:
    """`removals`: one REMOVAL for each document that goes, by its number; `stats`: what the search counted."""

    removals: np.ndarray
    stats: dict[str, Any]

    def kept(self, num_documents: int) -> np.ndarray:
        """bool[documents]"""
        stays = np.ones(num_documents, dtype=bool)
        stays[self.removals["removed"]] = False
        return stays


def deduplicate(
    store: DocumentStore,
    config: DedupConfig,
    *,
    priorities: Sequence[str],
    path: Path,
    workers: Workers,
    progress: Progress,
    earlier: Sequence[Earlier] = (),
    ready: Mapping[int, Path] | None = None,
) -> Duplicates:
    """Find the duplicates, or take them from `path` where they were found before. `priorities`: source names, best first. Documents of
    `earlier` datasets are better than all. `ready`: files with the signatures of parts, by their numbers."""
    if not path.exists():
        _find(store, config, priorities=priorities, path=path, workers=workers, progress=progress, earlier=earlier, ready=ready or {})
    file = BlockFile(path, kind="duplicates")
    return Duplicates(removals=file.read("removals"), stats=file.meta)


def _find(
    store: DocumentStore,
    config: DedupConfig,
    *,
    priorities: Sequence[str],
    path: Path,
    workers: Workers,
    progress: Progress,
    earlier: Sequence[Earlier],
    ready: Mapping[int, Path],
) -> None:
    same_field = same_fields(store, priorities) if config.field is not None else np.zeros(0, dtype=REMOVAL)
    compared = np.ones(store.num_documents, dtype=bool)
    compared[same_field["removed"]] = False
    indexes = [each.index(config.minhash, folder=path.parent, workers=workers, progress=progress) for each in earlier]
    known = chain.from_iterable(each.columns(config.minhash, index) for each, index in zip(earlier, indexes))
    num_known = sum(each.num_documents for each in earlier)
    numbers = np.flatnonzero(compared)  # of the rows after the known ones

    def fetch(rows: Sequence[int]) -> list[str]:
        of_store = iter(store.texts_of([int(numbers[row - num_known]) for row in rows if row >= num_known]))
        return [next(of_store) if row >= num_known else _text_of_earlier(earlier, row) for row in rows]

    scratch = path.with_suffix(".scratch")
    with progress.stage("deduplicate", store.text_bytes) as advance:
        records = _records(store, priorities, compared, advance, config.minhash, ready)
        with opened_table(records, config, known=known, workers=workers.count, scratch=scratch) as (rows, executor):
            found, stats = find_rows(rows, config, fetch=fetch, executor=executor)
    table = np.zeros(len(found), dtype=REMOVAL)
    table["removed"] = numbers[found["removed"] - num_known]
    kept = found["kept"]
    table["kept"] = np.where(kept < num_known, -1 - kept, np.append(numbers, 0)[np.maximum(kept - num_known, 0)])
    table["jaccard"], table["reason"] = found["jaccard"], found["near"]  # REASONS begin with exact, near
    table = np.concatenate([table, same_field])
    with write_blockfile(path, kind="duplicates") as out:
        out.add("removals", table[np.argsort(table["removed"])])
        out.meta.update(stats | ({"field": len(same_field)} if config.field is not None else {}))


def _of_earlier(earlier: Sequence[Earlier], number: int) -> tuple[Earlier, int]:
    """The dataset of a document, and its number there. Numbers go through all of them; a REMOVAL has -1 - number."""
    for each in earlier:
        if number < each.num_documents:
            return each, number
        number -= each.num_documents
    raise AssertionError("a duplicate of no document")


def _text_of_earlier(earlier: Sequence[Earlier], number: int) -> str:
    dataset, inside = _of_earlier(earlier, number)
    return dataset.text(inside)


def same_fields(store: DocumentStore, priorities: Sequence[str]) -> np.ndarray:
    """A REMOVAL (its jaccard NaN: the texts aren't compared) for each document whose field has the value of a better one's, in the
    keepers' order."""
    if not store.num_documents:
        return np.zeros(0, dtype=REMOVAL)
    fields = np.concatenate([part.field_keys() for part in store.parts])
    keepers = keepers_of(store, priorities, among=np.flatnonzero(fields.any(axis=1)))
    first = first_of_equals(np.ascontiguousarray(fields[keepers]).view(">u8").astype(np.uint64))
    later = np.flatnonzero(first != np.arange(len(first)))
    table = np.zeros(len(later), dtype=REMOVAL)
    table["removed"], table["kept"] = keepers[later], keepers[first[later]]
    table["jaccard"], table["reason"] = np.nan, REASONS.index("field")
    return table


def _records(
    store: DocumentStore,
    priorities: Sequence[str],
    compared: np.ndarray,
    advance: Report,
    config: MinHashConfig | None,
    ready: Mapping[int, Path],
) -> Iterator[DocRecord | Columns]:
    for number, part in enumerate(store.parts):
        priority = priorities.index(store.source(number))
        if config is not None and number in ready:
            chosen = compared[store.first(number) : store.first(number) + part.num_documents]
            yield from read_signatures(ready[number], part, config, priority=priority, chosen=chosen)
            advance(part.text_bytes)
            continue
        for inside in range(part.num_documents):
            if compared[store.first(number) + inside]:
                yield DocRecord(part.id(inside), part.text(inside), priority, part.key(inside))
            advance(int(part.offsets[inside + 1] - part.offsets[inside]))
        part.release()


def count(store: DocumentStore, duplicates: Duplicates, ledger: Ledger) -> None:
    """Write what was kept and dropped into the ledger."""
    lengths = store.lengths()
    column = np.zeros(store.num_documents, dtype=np.int8)  # 0: kept; else 1 + reason, and as many more where an earlier document is why
    column[duplicates.removals["removed"]] = 1 + duplicates.removals["reason"] + len(REASONS) * (duplicates.removals["kept"] < 0)
    for number, part in enumerate(store.parts):
        tally = ledger.tally("dedup", store.source(number))
        here = slice(store.first(number), store.first(number) + part.num_documents)
        for which in np.unique(column[here]).tolist():
            chosen = column[here] == which
            documents, num_bytes = int(np.count_nonzero(chosen)), int(lengths[here][chosen].sum())
            amounts = [tally.read, tally.kept, tally.written]
            if which:
                earlier, reason = divmod(which - 1, len(REASONS))
                name = f"{REASONS[reason]}_duplicate{'_of_earlier' if earlier else ''}"
                amounts = [tally.read, tally.dropped.setdefault(name, Count())]
            for amount in amounts:
                amount.add(num_bytes, documents)


def listed(store: DocumentStore, duplicates: Duplicates, earlier: Sequence[Earlier] = ()) -> Iterator[dict[str, Any]]:
    """Every removed document with the one that stays in its place, for people to read."""
    for removal in duplicates.removals.tolist():
        yield removal_line(store, removal, earlier)


def removal_line(store: DocumentStore, removal: tuple[int, int, float, int], earlier: Sequence[Earlier]) -> dict[str, Any]:
    removed, kept, jaccard, reason = removal
    return {
        "removed": named(store, removed),
        "kept": named(store, kept) if kept >= 0 else _named_earlier(earlier, -1 - kept),
        "reason": REASONS[reason],
        "jaccard": None if np.isnan(jaccard) else round(jaccard, 6),
    }


def _named_earlier(earlier: Sequence[Earlier], number: int) -> dict[str, Any]:
    dataset, inside = _of_earlier(earlier, number)
    return dataset.named(inside)


def named(store: DocumentStore, number: int) -> dict[str, Any]:
    """A document for people: its id, and where it stood."""
    part, inside = store.find(number)
    file, record = store.parts[part].origin(inside)
    return {"id": store.parts[part].id(inside), "source": store.source(part), "file": file, "record": record}
