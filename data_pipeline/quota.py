"""The quota method for one period of a mixture: the earliest deadline among the sources that are below their quota.

Sample t (from 1) goes to a source with served < w t; among these to the one whose next sample is due first, that is with
the smallest (served + 1) / w; among equals to the first. Each source is then served within one sample of w t at every t
(Balinski and Young 1975; unit jobs by earliest deadline). Weights are integers, so nothing is rounded; after sum(w)
samples every source has had exactly w, so t never needs to exceed one period.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

Walk = Callable[[np.ndarray, np.ndarray, int, int], tuple[np.ndarray, np.ndarray]]
_PLAIN_LIMIT = 50_000  # comparisons: below this the interpreter is done before a compiled version is loaded


def walk(weights: np.ndarray, served: np.ndarray, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Sources of the samples first .. first + count - 1 of a period (from 0), and how often each had been served before.

    `served` (int64, as it stood at `first`) is updated in place. Products stay below sum(weights)^2 < 2^62.
    """
    total = weights.sum()
    sources = np.empty(count, dtype=np.int32)
    ranks = np.empty(count, dtype=np.int64)
    for step in range(count):
        t = first + step + 1
        best = -1
        for i in range(weights.size):
            if served[i] * total < weights[i] * t and (best < 0 or (served[i] + 1) * weights[best] < (served[best] + 1) * weights[i]):
                best = i
        sources[step] = best
        ranks[step] = served[best]
        served[best] += 1
    return sources, ranks


def fast_walk(num_sources: int, count: int) -> Walk:
    """`walk`, compiled where that pays."""
    return walk if num_sources * count <= _PLAIN_LIMIT else _compiled()


@cache
def _compiled() -> Any:
    import numba

    return numba.njit(cache=True)(walk)
