"""Exact and near duplicates of a corpus whose texts don't fit in memory: its records go by once, candidates are read again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np

from data_pipeline.dedup.candidates import Candidates
from data_pipeline.dedup.cluster import star_clusters
from data_pipeline.dedup.columns import Columns, DocRecord, Table, all_columns, scratch_folder
from data_pipeline.dedup.config import DedupConfig, MinHashConfig
from data_pipeline.dedup.exact import first_of_equals
from data_pipeline.dedup.minhash import catch_probability
from data_pipeline.dedup.verify import Verifier

Fetch = Callable[[Sequence[str]], Sequence[str]]


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
    known: Iterable[Columns] = (),
    scratch: Path | None = None,
) -> Removals:
    """Which documents to remove. The result is the same whatever the order of the records and the number of workers.

    Keeper order: lowest source priority, then most UTF-8 bytes, then the sha256 of the text (so that it doesn't depend on
    how the corpus is cut into files), then the lowest id. `fetch` gives the texts of ids, in their order; it is called
    for candidates only, in batches of some 32 MB. `known`: documents that stay whatever they are like, and that others go
    for; their priorities are below 0. Memory: about 65 bytes a document, the budget of external.py, and 16 bytes a band that
    a document shares with another; `scratch` (or the system's folder for temporary files) takes 24 * bands + bands * rows
    bytes a document meanwhile. Texts are held a few batches at a time. `workers` counts threads.
    Raises DataError where two records have one id.
    """
    ahead = 2 * max(1, workers)
    with scratch_folder(scratch) as folder, ThreadPoolExecutor(max(1, workers), thread_name_prefix="dedup") as executor:
        table = Table(chain(known, all_columns(records, config.minhash, executor, ahead=ahead)), config.minhash, folder)
        order = table.keeper_order()
        first = first_of_equals(table.keys[order]) if config.exact else np.arange(len(order))
        is_known = table.priorities[order] < 0
        unique = np.flatnonzero((first == np.arange(len(order))) | is_known)  # in keeper order, as places in `order`
        near: dict[int, tuple[int, float]] = {}
        num_known = int(np.count_nonzero(is_known))
        stats: dict[str, Any] = {"documents": len(order) - num_known, "exact": len(order) - len(unique)}
        stats |= {"earlier": num_known} if num_known else {}
        if config.minhash is not None:
            near, more = _near(table, order[unique], config.minhash, fetch, executor, num_fixed=num_known)
            stats |= more
    stays = {int(unique[number]): (int(unique[kept]), similarity) for number, (kept, similarity) in near.items()}
    removed: dict[str, Removal] = {}
    for place in np.flatnonzero((first != np.arange(len(order))) & ~is_known).tolist():
        kept, similarity = stays.get(int(first[place]), (int(first[place]), 1.0))
        removed[table.id_of(order[place])] = Removal(table.id_of(order[kept]), "exact", similarity)
    for place, (kept, similarity) in stays.items():
        removed[table.id_of(order[place])] = Removal(table.id_of(order[kept]), "near", similarity)
    return Removals(removed, stats)


def _near(
    table: Table, rows: np.ndarray, config: MinHashConfig, fetch: Fetch, executor: Executor, *, num_fixed: int
) -> tuple[dict[int, tuple[int, float]], dict[str, Any]]:
    """removed -> (kept, Jaccard) by place among the rows, which are in keeper order; and what was counted."""

    def fetch_texts(numbers: Sequence[int]) -> Sequence[str]:
        return fetch([table.id_of(int(rows[number])) for number in numbers])

    rank_of = np.full(len(table), -1, dtype=np.int64)
    rank_of[rows] = np.arange(len(rows))
    candidates = Candidates([table.bands_path], rank_of)
    verifier = Verifier(fetch_texts, ngram=config.ngram, executor=executor)
    sketches = table.sketches(rows[candidates.ranks])
    near, work = star_clusters(candidates, sketches, table.lengths[rows], verifier, config, num_fixed=num_fixed)
    without = int(np.count_nonzero(~table.has_signature[table.priorities >= 0]))
    stats = {"near": len(near), "without_signature": without, **asdict(work)}
    return near, stats | {"catch_probability_at_threshold": catch_at_threshold(config)}


def catch_at_threshold(config: MinHashConfig) -> float:
    """The chance that a pair exactly at the threshold is looked at."""
    return catch_probability(config.threshold, num_bands=config.num_bands, rows_per_band=config.rows_per_band)
