"""Which documents share a band: never as a list of pairs, which would grow with the square of a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data_pipeline.dedup.external import ranges


class Candidates:
    """For documents in keeper order, the kept ones before each that share a band with it.

    A document has to be compared with kept documents only, so each bucket holds just those: a page that was copied a
    million times costs a million comparisons, not their square, and no bucket needs a cap that would lose pairs.
    Memory: 16 bytes for each membership in a bucket of two documents or more, and 8 to make it.
    """

    def __init__(self, paths: Sequence[Path], rank_of: np.ndarray) -> None:
        """paths: runs (external.py) of a key for each band of each row that has a signature; rank_of: int64, the place of each row in
        the keepers' order, -1 for one that takes no part."""
        ranks, self._buckets = _shared_buckets(paths, rank_of)
        self.ranks, offsets = np.unique(ranks, return_index=True)  # the documents that share a band with any other, ascending
        self._offsets = np.append(offsets, len(ranks))
        sizes = np.bincount(self._buckets) if len(self._buckets) else np.zeros(0, dtype=np.int64)
        self._begins = np.cumsum(sizes) - sizes
        self._num_kept = np.zeros(len(sizes), dtype=np.uint32)
        self._kept = np.empty(len(ranks), dtype=ranks.dtype)  # bucket by bucket, its kept documents from where it begins

    def kept_before(self, rank: int) -> np.ndarray:
        """int64, ascending: kept documents that share a band with this one."""
        buckets = self._buckets_of(rank)
        begins, counts = self._begins[buckets], self._num_kept[buckets]
        found = [self._kept[begin : begin + count] for begin, count in zip(begins.tolist(), counts.tolist()) if count]
        return np.unique(np.concatenate(found)).astype(np.int64) if found else np.empty(0, dtype=np.int64)

    def places(self, ranks: np.ndarray | int) -> np.ndarray:
        """Where documents that share a band stand in `ranks`."""
        return np.searchsorted(self.ranks, ranks)

    def keep(self, rank: int) -> None:
        buckets = self._buckets_of(rank)
        self._kept[self._begins[buckets] + self._num_kept[buckets]] = rank
        self._num_kept[buckets] += 1

    def _buckets_of(self, rank: int) -> np.ndarray:
        place = int(np.searchsorted(self.ranks, rank))
        return self._buckets[self._offsets[place] : self._offsets[place + 1]]


def _shared_buckets(paths: Sequence[Path], rank_of: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(ranks, buckets), uint32, sorted by rank: every membership in a bucket of two documents or more."""
    assert len(rank_of) < 1 << 32, "one build compares up to 2^32 documents"
    found: list[np.ndarray] = [np.empty(0, dtype=np.uint64)]  # rank and bucket in one number, so that they sort in place
    num_buckets = 0
    for pairs in ranges(paths):
        ranks = rank_of[pairs["where"]]
        keys = pairs["key"][ranks >= 0]
        ranks = ranks[ranks >= 0]
        order = np.argsort(keys)
        same = keys[order][1:] == keys[order][:-1]
        begins = np.append(True, ~same)[: len(order)]
        shared = np.append(False, same)[: len(order)]
        shared[:-1] |= same
        buckets = num_buckets + np.cumsum(begins[shared]) - 1
        found.append(ranks[order][shared].astype(np.uint64) << np.uint64(32) | buckets.astype(np.uint64))
        num_buckets += int(np.count_nonzero(begins[shared]))
    assert num_buckets < 1 << 32
    members = np.concatenate(found)
    del found
    members.sort()
    return (members >> np.uint64(32)).astype(np.uint32), members.astype(np.uint32)
