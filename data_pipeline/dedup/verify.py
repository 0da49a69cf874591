"""True Jaccard similarity of candidates, from texts that are read again when they are needed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

import numpy as np

from data_pipeline.dedup.shingles import jaccard, shingle_set

CACHE_BYTES = 32 << 20  # some three times what is loaded ahead: 4 MB of text are sets of 5 to 11 MB


class Verifier:
    """Compares documents by number; keeps the shingle sets that were used last, up to a bound in bytes."""

    def __init__(self, fetch: Callable[[Sequence[int]], Sequence[str]], *, ngram: int, executor: Executor) -> None:
        self._fetch, self._ngram, self._executor = fetch, ngram, executor
        self._cache: OrderedDict[int, np.ndarray] = OrderedDict()
        self._held_bytes = 0

    def load(self, numbers: Sequence[int]) -> None:
        """Read the documents that aren't held, in one fetch."""
        missing = [number for number in dict.fromkeys(numbers) if number not in self._cache]
        if not missing:
            return
        sets = self._executor.map(lambda text: shingle_set(text, self._ngram), self._fetch(missing))
        for number, shingles in zip(missing, sets):
            self._cache[number] = shingles
            self._held_bytes += shingles.nbytes

    def first_match(self, number: int, others: Sequence[int], threshold: float) -> tuple[int | None, float, int]:
        """(first of `others` with similarity >= threshold, that similarity, how many were compared); None where there is none."""
        self.load([number])
        mine = self._use(number)
        for compared, other in enumerate(others, start=1):
            self.load([other])
            theirs = self._use(other)
            if min(len(mine), len(theirs)) >= threshold * max(len(mine), len(theirs)) * (1 - 1e-9):  # J can't exceed the ratio of the sizes
                similarity = jaccard(mine, theirs)
                if similarity >= threshold:
                    return other, similarity, compared
        return None, 0.0, len(others)

    def _use(self, number: int) -> np.ndarray:
        self._cache.move_to_end(number)
        while self._held_bytes > CACHE_BYTES and len(self._cache) > 2:
            _, dropped = self._cache.popitem(last=False)
            self._held_bytes -= dropped.nbytes
        return self._cache[number]
