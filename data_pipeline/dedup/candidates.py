"""Which documents share a band: never as a list of pairs, which would grow with the square of a bucket."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data_pipeline.dedup.external import ranges


class Candidates:
    """For documents in keeper order, the kept ones before each that share a band with it.

    A document has to be compared with kept documents only, so each bucket holds just those: a page that was copied a
    million times costs a million comparisons, not their square, and no bucket needs a cap that would lose pairs.
    """

    def __init__(self, paths: Sequence[Path], rank_of: np.ndarray) -> None:
        """paths: runs (external.py) of a key for each band of each row that has a signature; rank_of: int64, the place of each row in
        the keepers' order, -1 for one that takes no part."""
        ranks, buckets = _shared_buckets(paths, rank_of)
        self.ranks = np.unique(ranks)  # the documents that share a band with any other, ascending
        self._buckets = buckets
        self._offsets = np.append(np.searchsorted(ranks, self.ranks), len(ranks))
        self._place = {int(rank): place for place, rank in enumerate(self.ranks)}
        self._kept: defaultdict[int, array[int]] = defaultdict(lambda: array("q"))

    def kept_before(self, rank: int) -> np.ndarray:
        """int64, ascending: kept documents that share a band with this one."""
        found = [np.frombuffer(self._kept[bucket], dtype=np.int64) for bucket in self._buckets_of(rank) if bucket in self._kept]
        return np.unique(np.concatenate(found)) if found else np.empty(0, dtype=np.int64)

    def places(self, ranks: np.ndarray | int) -> np.ndarray:
        """Where documents that share a band stand in `ranks`."""
        return np.searchsorted(self.ranks, ranks)

    def keep(self, rank: int) -> None:
        for bucket in self._buckets_of(rank):
            self._kept[bucket].append(rank)

    def _buckets_of(self, rank: int) -> list[int]:
        place = self._place[rank]
        buckets: list[int] = self._buckets[self._offsets[place] : self._offsets[place + 1]].tolist()
        return buckets


def _shared_buckets(paths: Sequence[Path], rank_of: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(ranks, buckets), int64, sorted by rank: every membership in a bucket of two documents or more."""
    members: list[np.ndarray] = [np.empty(0, dtype=np.int64)]
    buckets: list[np.ndarray] = [np.empty(0, dtype=np.int64)]
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
        members.append(ranks[order][shared])
        buckets.append((num_buckets + np.cumsum(begins) - 1)[shared])
        num_buckets += len(order)
    all_members, all_buckets = np.concatenate(members), np.concatenate(buckets)
    by_rank = np.argsort(all_members, kind="stable")
    return all_members[by_rank], all_buckets[by_rank]
