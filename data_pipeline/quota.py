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
ScheduledWalk = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int, int], tuple[np.ndarray, np.ndarray]]
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


def scheduled_walk(
    starts: np.ndarray, weights: np.ndarray, due_before: np.ndarray, served: np.ndarray, first: int, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """`walk` for weights that change at known samples: `starts` int64[P] (the first is 0), `weights` int64[P, n] with rows of
    one sum N, `due_before` int64[P, n]: N times what each source should have had when a piece begins.

    A source's k-th sample must be there before its quota passes k, wherever on the schedule that is; by earliest deadline
    every source stays within one sample of its quota at every t (Tijdeman 1980). Products stay below N t < 2^62.
    """
    num_pieces, num_sources = weights.shape
    total = weights[0].sum()
    sources = np.empty(count, dtype=np.int32)
    ranks = np.empty(count, dtype=np.int64)
    ahead = np.zeros(num_sources, dtype=np.int64)  # the piece in which the next sample of a source falls due
    deadlines = np.zeros(num_sources, dtype=np.int64)
    piece = 0
    changed = -1  # whose deadline is to be found: all, then that of the last one served
    for step in range(count):
        t = first + step + 1
        for i in range(num_sources):
            if changed == -1 or changed == i:
                need = (served[i] + 1) * total
                place = ahead[i]
                while place + 1 < num_pieces and due_before[place + 1, i] <= need:
                    place += 1
                ahead[i] = place
                if weights[place, i] == 0:
                    deadlines[i] = 1 << 62  # never: the source has ended
                else:
                    deadlines[i] = starts[place] + (need - due_before[place, i]) // weights[place, i] + 1
        while piece + 1 < num_pieces and starts[piece + 1] < t:
            piece += 1
        best = -1
        for i in range(num_sources):
            due = due_before[piece, i] + weights[piece, i] * (t - starts[piece])
            if served[i] * total < due and (best < 0 or deadlines[i] < deadlines[best]):
                best = i
        sources[step] = best
        ranks[step] = served[best]
        served[best] += 1
        changed = best
    return sources, ranks


def fast_walk(num_sources: int, count: int) -> Walk:
    """`walk`, compiled where that pays."""
    return walk if num_sources * count <= _PLAIN_LIMIT else _compiled(walk)


def fast_scheduled_walk(num_sources: int, count: int) -> ScheduledWalk:
    """`scheduled_walk`, compiled where that pays."""
    return scheduled_walk if num_sources * count <= _PLAIN_LIMIT else _compiled(scheduled_walk)


@cache
def _compiled(plain: Any) -> Any:
    import numba

    return numba.njit(cache=True)(plain)
