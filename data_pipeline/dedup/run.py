"""Exact and near duplicates of a corpus whose texts don't fit in memory: its records go by once, candidates are read again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np

from data_pipeline.dedup.candidates import Candidates
from data_pipeline.dedup.cluster import star_clusters
from data_pipeline.dedup.config import DedupConfig, MinHashConfig
from data_pipeline.dedup.exact import content_key, first_of_equals
from data_pipeline.dedup.minhash import band_keys, catch_probability, signatures, sketches
from data_pipeline.dedup.verify import Verifier
from data_pipeline.document import utf8_bytes
from data_pipeline.errors import DataError

BATCH_BYTES = 4 << 20
Fetch = Callable[[Sequence[str]], Sequence[str]]


@dataclass(frozen=True, slots=True)
class DocRecord:
    """A document as dedup sees it. Of two equals the one with the lower `source_priority` stays."""

    id: str
    text: str
    source_priority: int = 0


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


def find_duplicates(records: Iterable[DocRecord], config: DedupConfig, *, fetch: Fetch, workers: int = 1) -> Removals:
    """Which documents to remove. The result is the same whatever the order of the records and the number of workers.

    Keeper order: lowest source priority, then most UTF-8 bytes, then the sha256 of the text (so that it doesn't depend on
    how the corpus is cut into files), then the lowest id. `fetch` gives the texts of ids, in their order; it is called
    for candidates only, in batches of some 32 MB. Memory grows by about 60 bytes a document, with minhash by another
    8 * bands + bands * rows; texts are held a few batches at a time. `workers` counts threads.
    Raises DataError where two records have one id.
    """
    with ThreadPoolExecutor(max(1, workers), thread_name_prefix="dedup") as executor:
        table = _Table(records, config.minhash, executor, ahead=2 * max(1, workers))
        order = table.keeper_order()
        first = first_of_equals(table.keys[order]) if config.exact else np.arange(len(order))
        unique = np.flatnonzero(first == np.arange(len(order)))  # in keeper order, as places in `order`
        near: dict[int, tuple[int, float]] = {}
        stats: dict[str, Any] = {"documents": len(order), "exact": len(order) - len(unique)}
        if config.minhash is not None:
            rows = order[unique]

            def fetch_texts(numbers: Sequence[int]) -> Sequence[str]:
                return fetch([table.id_of(int(rows[number])) for number in numbers])

            verifier = Verifier(fetch_texts, ngram=config.minhash.ngram, executor=executor)
            candidates = Candidates(table.bands[rows], table.has_signature[rows])
            near, work = star_clusters(candidates, table.sketches[rows], table.lengths[rows], verifier, config.minhash)
            stats |= {"near": len(near), "without_signature": int(np.count_nonzero(~table.has_signature)), **asdict(work)}
            stats["catch_probability_at_threshold"] = catch_at_threshold(config.minhash)
    stays = {int(unique[number]): (int(unique[kept]), similarity) for number, (kept, similarity) in near.items()}
    removed: dict[str, Removal] = {}
    for place in np.flatnonzero(first != np.arange(len(order))).tolist():
        kept, similarity = stays.get(int(first[place]), (int(first[place]), 1.0))
        removed[table.id_of(order[place])] = Removal(table.id_of(order[kept]), "exact", similarity)
    for place, (kept, similarity) in stays.items():
        removed[table.id_of(order[place])] = Removal(table.id_of(order[kept]), "near", similarity)
    return Removals(removed, stats)


def catch_at_threshold(config: MinHashConfig) -> float:
    """The chance that a pair exactly at the threshold is looked at."""
    return catch_probability(config.threshold, num_bands=config.num_bands, rows_per_band=config.rows_per_band)


# ------------------------------------------------------------------------------------------------- columns


@dataclass(slots=True)
class _Columns:
    """Some records without their texts, one row each: ids S, priorities and lengths int64, keys uint64[n, 2],
    bands uint64[n, bands], sketches uint8[n, bands * rows], has_signature bool."""

    ids: np.ndarray
    priorities: np.ndarray
    lengths: np.ndarray
    keys: np.ndarray
    bands: np.ndarray
    sketches: np.ndarray
    has_signature: np.ndarray


class _Table(_Columns):
    """All records, in the order in which they came."""

    def __init__(self, records: Iterable[DocRecord], config: MinHashConfig | None, executor: Executor, *, ahead: int) -> None:
        parts = list(_in_turn(executor, (partial(_columns, batch, config) for batch in _batches(records)), ahead=ahead))
        parts = parts or [_columns([], config)]
        for name in _Columns.__slots__:
            setattr(self, name, np.concatenate([getattr(part, name) for part in parts]))

    def id_of(self, row: int) -> str:
        value: bytes = self.ids[row]
        return value.decode("utf-8", "surrogatepass")

    def keeper_order(self) -> np.ndarray:
        """int64[n]: rows from the one most worth keeping on."""
        order = np.lexsort((self.ids, self.keys[:, 1], self.keys[:, 0], -self.lengths, self.priorities))
        in_order = np.sort(self.ids)
        if np.any(same := in_order[1:] == in_order[:-1]):
            raise DataError(f"two documents have the id {in_order[1:][same][0].decode()!r}: removing one would remove both")
        return order


def _columns(batch: Sequence[DocRecord], config: MinHashConfig | None) -> _Columns:
    texts = [record.text for record in batch]
    keys = np.frombuffer(b"".join(map(content_key, texts)), dtype=">u8").astype(np.uint64).reshape(-1, 2)
    if config is None:
        bands, bytes_of, has_signature = (
            np.empty((len(batch), 0), np.uint64),
            np.empty((len(batch), 0), np.uint8),
            np.zeros(len(batch), np.bool_),
        )
    else:
        signature, has_signature = signatures(texts, config)
        bands, bytes_of = band_keys(signature, config), sketches(signature)
    return _Columns(
        ids=np.array([record.id.encode("utf-8", "surrogatepass") for record in batch], dtype=np.bytes_),
        priorities=np.array([record.source_priority for record in batch], dtype=np.int64),
        lengths=np.array([utf8_bytes(text) for text in texts], dtype=np.int64),
        keys=keys,
        bands=bands,
        sketches=bytes_of,
        has_signature=has_signature,
    )


def _batches(records: Iterable[DocRecord]) -> Iterator[list[DocRecord]]:
    batch: list[DocRecord] = []
    held = 0
    for record in records:
        batch.append(record)
        held += len(record.text)
        if held >= BATCH_BYTES or len(batch) >= 4096:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def _in_turn(executor: Executor, jobs: Iterable[Callable[[], _Columns]], *, ahead: int) -> Iterator[_Columns]:
    """Results in the jobs' order, with no more than `ahead` jobs, and the texts they hold, under way."""
    running: deque[Future[_Columns]] = deque()
    for job in jobs:
        running.append(executor.submit(job))
        if len(running) >= ahead:
            yield running.popleft().result()
    while running:
        yield running.popleft().result()
