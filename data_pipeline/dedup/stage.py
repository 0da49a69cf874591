"""Deduplication as a stage of the build: over the document store, with its result kept as a small file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.blockfile import BlockFile, write_blockfile
from data_pipeline.dedup.columns import DocRecord
from data_pipeline.dedup.config import DedupConfig
from data_pipeline.dedup.earlier import Earlier, find_earlier
from data_pipeline.dedup.exact import first_of_equals
from data_pipeline.dedup.keepers import keepers_of
from data_pipeline.dedup.run import find_duplicates
from data_pipeline.pool import Report, Workers
from data_pipeline.progress import Progress
from data_pipeline.step import Ledger
from data_pipeline.store import DocumentStore

REASONS = ("exact", "near", "field")
REMOVAL = np.dtype([("removed", "<i8"), ("kept", "<i8"), ("jaccard", "<f8"), ("reason", "u1")])


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
) -> Duplicates:
    """Find the duplicates, or take them from `path` where they were found before. `priorities`: source names, best first. Documents of
    `earlier` datasets are better than all."""
    if not path.exists():
        _find(store, config, priorities=priorities, path=path, workers=workers, progress=progress, earlier=earlier)
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
) -> None:
    same_field = same_fields(store, priorities) if config.field is not None else np.zeros(0, dtype=REMOVAL)
    gone = set(same_field["removed"].tolist())
    indexes = [each.index(config.minhash, folder=path.parent, workers=workers, progress=progress) for each in earlier]
    known = chain.from_iterable(each.columns(config.minhash, index) for each, index in zip(earlier, indexes))

    def fetch(ids: Sequence[str]) -> list[str]:
        return [found[0].text(found[1]) if (found := find_earlier(earlier, id)) else store.text(store.number_of(id)) for id in ids]

    with progress.stage("deduplicate", store.text_bytes) as advance:
        records = _records(store, priorities, advance, without=gone)
        scratch = path.with_suffix(".scratch")
        found = find_duplicates(records, config, fetch=fetch, workers=workers.count, known=known, scratch=scratch)
    table = np.zeros(len(found.removed), dtype=REMOVAL)
    for place, (id, removal) in enumerate(found.removed.items()):
        at = find_earlier(earlier, removal.kept_id)
        kept = store.number_of(removal.kept_id) if at is None else -1 - _first_of(earlier, at[0]) - at[1]
        table[place] = (store.number_of(id), kept, removal.jaccard, REASONS.index(removal.reason))
    table = np.concatenate([table, same_field])
    with write_blockfile(path, kind="duplicates") as out:
        out.add("removals", table[np.argsort(table["removed"])])
        out.meta.update(found.stats | ({"field": len(same_field)} if config.field is not None else {}))


def _first_of(earlier: Sequence[Earlier], one: Earlier) -> int:
    """Documents of the earlier datasets before this one; with them each has a number, written -1 - number in a REMOVAL."""
    return sum(each.num_documents for each in earlier[: one.place])


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


def _records(store: DocumentStore, priorities: Sequence[str], advance: Report, *, without: set[int]) -> Iterator[DocRecord]:
    for number, part in enumerate(store.parts):
        priority = priorities.index(store.source(number))
        for inside in range(part.num_documents):
            if store.first(number) + inside not in without:
                yield DocRecord(part.id(inside), part.text(inside), priority)
            advance(int(part.offsets[inside + 1] - part.offsets[inside]))


def count(store: DocumentStore, duplicates: Duplicates, ledger: Ledger) -> None:
    """Write what was kept and dropped into the ledger."""
    lengths = store.lengths()
    reason = np.full(store.num_documents, -1, dtype=np.int8)
    reason[duplicates.removals["removed"]] = duplicates.removals["reason"]
    of_earlier = set(duplicates.removals["removed"][duplicates.removals["kept"] < 0].tolist())
    for number, part in enumerate(store.parts):
        tally = ledger.tally("dedup", store.source(number))
        here = slice(store.first(number), store.first(number) + part.num_documents)
        for place, (length, why) in enumerate(zip(lengths[here].tolist(), reason[here].tolist()), start=here.start):
            if why < 0:
                tally.keep(length)
            else:
                tally.drop(f"{REASONS[why]}_duplicate{'_of_earlier' if place in of_earlier else ''}", length)


def listed(store: DocumentStore, duplicates: Duplicates, earlier: Sequence[Earlier] = ()) -> Iterator[dict[str, Any]]:
    """Every removed document with the one that stays in its place, for people to read."""
    for removed, kept, jaccard, reason in duplicates.removals.tolist():
        yield {
            "removed": _named(store, removed),
            "kept": _named(store, kept) if kept >= 0 else _named_earlier(earlier, -1 - kept),
            "reason": REASONS[reason],
            "jaccard": None if np.isnan(jaccard) else round(jaccard, 6),
        }


def _named_earlier(earlier: Sequence[Earlier], number: int) -> dict[str, Any]:
    for each in earlier:
        if number < each.num_documents:
            return each.named(number)
        number -= each.num_documents
    raise AssertionError("a duplicate of no document")


def _named(store: DocumentStore, number: int) -> dict[str, Any]:
    part, inside = store.find(number)
    file, record = store.parts[part].origin(inside)
    return {"id": store.parts[part].id(inside), "source": store.source(part), "file": file, "record": record}
