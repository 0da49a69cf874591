"""Exact and near duplicates of a corpus whose texts don't fit in memory: its records go by once, candidates are read again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np

from data_pipeline.dedup.candidates import Candidates
from data_pipeline.dedup.cluster import NEAR, star_clusters
from data_pipeline.dedup.columns import Columns, DocRecord, Table, all_columns, scratch_folder
from data_pipeline.dedup.config import DedupConfig, MinHashConfig
from data_pipeline.dedup.exact import first_of_equals
from data_pipeline.dedup.minhash import catch_probability
from data_pipeline.dedup.verify import Verifier

Fetch = Callable[[Sequence[str]], Sequence[str]]
FOUND = np.dtype([("removed", "<i8"), ("kept", "<i8"), ("jaccard", "<f8"), ("near", "?")])  # rows of a Table


@dataclass(frozen=True, slots=True)
class Removal:
    """Why a document goes: `kept_id` stays and has this Jaccard similarity to it. `exact`: another document, which may
    itself be near to `kept_id`, has the same bytes."""

    kept_id: str
    reason: Literal["exact", "near"]
    jaccard: float


@dataclass(slots=True)
class Removals:
    """Every removed document by id, and what was counted on the way."""

    removed: dict[str, Removal] = field(default_factory=dict)
    stats: dict[str, Any] = field(default_factory=dict)

    def __contains__(self, document_id: str) -> bool:
        return document_id in self.removed

    def __len__(self) -> int:
        return len(self.removed)


def find_duplicates(
    records: Iterable[DocRecord],
    config: DedupConfig,
    *,
    fetch: Fetch,
    workers: int = 1,
    scratch: Path | None = None,
) -> Removals:
    """Which documents to remove, by their ids: `find_rows` for records that are known by their ids. `fetch` gives the texts of ids, in
    their order."""
    with opened_table(records, config, workers=workers, scratch=scratch) as (table, executor):
        found, stats = find_rows(table, config, fetch=lambda rows: fetch([table.id_of(row) for row in rows]), executor=executor)
        removed = {
            table.id_of(row): Removal(table.id_of(kept), "near" if near else "exact", jaccard)
            for row, kept, jaccard, near in found.tolist()
        }
    return Removals(removed, stats)


@contextmanager
def opened_table(
    records: Iterable[DocRecord | Columns],
    config: DedupConfig,
    *,
    known: Iterable[Columns] = (),
    workers: int = 1,
    scratch: Path | None = None,
) -> Iterator[tuple[Table, Executor]]:
    """The records (or the columns of some, made before) gone through, `known` first, and threads to go on with, `workers` of them. Texts are held a few batches at a time;
    `scratch` (or the system's folder for temporary files) takes 24 * bands + bands * rows bytes a document meanwhile."""
    with scratch_folder(scratch) as folder, ThreadPoolExecutor(max(1, workers), thread_name_prefix="dedup") as executor:
        columns = all_columns(records, config.minhash, executor, ahead=2 * max(1, workers))
        yield Table(chain(known, columns), config.minhash, folder), executor


def find_rows(
    table: Table, config: DedupConfig, *, fetch: Callable[[Sequence[int]], Sequence[str]], executor: Executor
) -> tuple[np.ndarray, dict[str, Any]]:
    """(a FOUND for each row that goes, what was counted). The result is the same whatever the order of the records and the number of
    workers.

    Keeper order: lowest source priority, then most UTF-8 bytes, then the sha256 of the text (so that it doesn't depend on
    how the corpus is cut into files), then the lowest id. `fetch` gives the texts of rows, in their order; it is called for candidates
    only, some 4 MB at a time. Rows whose priority is below 0 (`known` ones) stay whatever they are like, and others go for them.
    Memory: about 130 bytes a document, the budget of external.py, the bounds of verify.py and cluster.py, and 24 bytes a band that a
    document shares with another. Raises DataError where two records have one id.
    """
    order = table.keeper_order()
    first = first_of_equals(table.keys[order]) if config.exact else np.arange(len(order))
    is_known = table.priorities[order] < 0
    is_first = first == np.arange(len(order))
    unique = np.flatnonzero(is_first | is_known)  # in keeper order, as places in `order`
    num_known = int(np.count_nonzero(is_known))
    stats: dict[str, Any] = {"documents": len(order) - num_known, "exact": len(order) - len(unique)}
    stats |= {"earlier": num_known} if num_known else {}
    near = np.empty(0, dtype=NEAR)
    if config.minhash is not None:
        near, more = _near(table, order[unique], config.minhash, fetch, executor, num_fixed=num_known)
        stats |= more
    later = np.flatnonzero(~is_first & ~is_known)
    found = np.zeros(len(later) + len(near), dtype=FOUND)
    exact, alike = found[: len(later)], found[len(later) :]
    alike["removed"], alike["kept"] = order[unique[near["removed"]]], order[unique[near["kept"]]]
    alike["jaccard"], alike["near"] = near["jaccard"], True
    exact["removed"], exact["kept"], exact["jaccard"] = order[later], order[first[later]], 1.0
    gone = unique[near["removed"]]  # ascending; what is equal to one of them has what it is near to in its place
    at = np.searchsorted(gone, first[later])
    moved = np.append(gone, -1)[at] == first[later]
    exact["kept"][moved], exact["jaccard"][moved] = alike["kept"][at[moved]], near["jaccard"][at[moved]]
    return found, stats


def _near(
    table: Table,
    rows: np.ndarray,
    config: MinHashConfig,
    fetch: Callable[[Sequence[int]], Sequence[str]],
    executor: Executor,
    *,
    num_fixed: int,
) -> tuple[np.ndarray, dict[str, Any]]:
    """(NEARs by place among the rows, which are in keeper order; what was counted)."""
    rank_of = np.full(len(table), -1, dtype=np.int64)
    rank_of[rows] = np.arange(len(rows))
    candidates = Candidates([table.bands_path], rank_of)
    del rank_of
    verifier = Verifier(lambda numbers: fetch(rows[list(numbers)].tolist()), ngram=config.ngram, executor=executor)
    sketches = table.sketches(rows[candidates.ranks])
    near, work = star_clusters(candidates, sketches, table.lengths[rows], verifier, config, num_fixed=num_fixed)
    without = int(np.count_nonzero(~table.has_signature[table.priorities >= 0]))
    stats = {"near": len(near), "without_signature": without, **asdict(work)}
    return near, stats | {"catch_probability_at_threshold": catch_at_threshold(config)}


def catch_at_threshold(config: MinHashConfig) -> float:
    """The chance that a pair exactly at the threshold is looked at."""
    return catch_probability(config.threshold, num_bands=config.num_bands, rows_per_band=config.rows_per_band)
