"""Which source the t-th sample comes from, and the how-many-th of that source it is: a function of t alone.

Weights count samples, which all have the same number of targets, so they are weights by tokens. A phase holds from its
first sample on; the counts of each source go on across phases.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import gcd, lcm

import numpy as np

from data_pipeline.errors import ConfigError, Fault
from data_pipeline.quota import fast_walk

BLOCK_SAMPLES = 65_536
_KEPT_BLOCKS = 4
_MAX_PERIOD = 1 << 31


@dataclass(frozen=True)
class Phase:
    """From this sample on, the sources are drawn in proportion to these weights."""

    from_sample: int
    weights: tuple[float, ...]


class Mixture:
    """Samples to sources by the quota method, within each phase."""

    def __init__(self, phases: Sequence[Phase]) -> None:
        assert phases and phases[0].from_sample == 0
        assert all(a.from_sample < b.from_sample for a, b in pairwise(phases))
        assert len({len(phase.weights) for phase in phases}) == 1
        self.num_sources = len(phases[0].weights)
        self._starts = [phase.from_sample for phase in phases]
        self._periods = [_Period(integer_weights(phase.weights)) for phase in phases]
        self._before = [np.zeros(self.num_sources, dtype=np.int64)]
        for period, start, end in zip(self._periods, self._starts, self._starts[1:]):
            self._before.append(self._before[-1] + period.served(end - start))

    def locate(self, sample: int) -> tuple[int, int]:
        """(source, how many samples it has had before this one)."""
        phase = bisect_right(self._starts, sample) - 1
        source, rank = self._periods[phase].locate(sample - self._starts[phase])
        return source, int(self._before[phase][source]) + rank

    def served(self, num_samples: int) -> np.ndarray:
        """How many of the first `num_samples` samples come from each source; int64."""
        phase = bisect_right(self._starts, num_samples) - 1
        return self._before[phase] + self._periods[phase].served(num_samples - self._starts[phase])


class _Period:
    """One phase: its integer weights, walked in blocks; the counts at each block's start are kept."""

    def __init__(self, weights: np.ndarray) -> None:
        self._weights = weights
        self._length = int(weights.sum())
        self._states = [np.zeros(weights.size, dtype=np.int64)]
        self._blocks: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._lock = threading.Lock()  # rows are read by several threads

    def locate(self, sample: int) -> tuple[int, int]:
        rounds, place = divmod(sample, self._length)
        sources, ranks = self._block(place // BLOCK_SAMPLES)
        source = int(sources[place % BLOCK_SAMPLES])
        return source, rounds * int(self._weights[source]) + int(ranks[place % BLOCK_SAMPLES])

    def served(self, num_samples: int) -> np.ndarray:
        rounds, place = divmod(num_samples, self._length)
        counts = self._weights * rounds
        if place:
            block = place // BLOCK_SAMPLES
            sources, _ = self._block(block)
            counts = counts + self._states[block] + np.bincount(sources[: place % BLOCK_SAMPLES], minlength=self._weights.size)
        return counts

    def _block(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Sources and ranks of block `number`; walks the blocks before it once, to know the counts at its start."""
        with self._lock:
            while number not in self._blocks:
                block = min(len(self._states) - 1, number)
                served = self._states[block].copy()
                count = min(BLOCK_SAMPLES, self._length - block * BLOCK_SAMPLES)
                sources, ranks = fast_walk(self._weights.size, count)(self._weights, served, block * BLOCK_SAMPLES, count)
                if block == len(self._states) - 1:
                    self._states.append(served)
                if block == number:
                    while len(self._blocks) >= _KEPT_BLOCKS:
                        self._blocks.pop(next(iter(self._blocks)))
                    self._blocks[block] = (sources, ranks)
            return self._blocks[number]


def integer_weights(weights: Sequence[float]) -> np.ndarray:
    """The smallest integers in exactly these proportions (0.7 is seven tenths, not the nearest binary fraction)."""
    exact = [Fraction(str(weight)) if np.isfinite(weight) else Fraction(-1) for weight in weights]
    if any(weight < 0 for weight in exact) or not any(exact):
        raise ConfigError([Fault("data.sources.weight", list(weights), "weights of 0 or more, at least one above 0")])
    scale = lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    whole = [weight // gcd(*whole) for weight in whole]
    if sum(whole) >= _MAX_PERIOD:
        rounded = [float(f"{weight / sum(exact):.6f}") for weight in map(float, exact)]
        raise ConfigError(
            [
                Fault(
                    "data.sources.weight",
                    list(weights),
                    f"proportions of integers whose sum is below {_MAX_PERIOD:,}",
                    f"round them, for example to {rounded}",
                )
            ]
        )
    return np.array(whole, dtype=np.int64)
