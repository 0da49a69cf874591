"""Which source the t-th sample comes from, and the how-many-th of that source it is: a function of t alone.

Weights count samples, which all have the same number of targets, so they are weights by tokens. A phase holds from its
first sample on; the counts of each source go on across phases. Within a phase every source stays within one sample of
its share at every sample, also where the weights change by a schedule.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import gcd, lcm
from typing import Any

import numpy as np

from data_pipeline.errors import ConfigError, Fault
from data_pipeline.quota import fast_scheduled_walk, fast_walk

BLOCK_SAMPLES = 65_536
_KEPT_BLOCKS = 4
_MAX_PERIOD = 1 << 31
_FAR = 1 << 31  # samples of a phase with a schedule: products with a period stay below 2^62


@dataclass(frozen=True)
class Phase:
    """From this sample on, the sources are drawn in proportion to these weights, and from the samples of `changes` on in
    proportion to those. A later phase may begin before all changes came; which sample came from where does not change then,
    so a phase is kept whole."""

    from_sample: int
    weights: tuple[float, ...]
    changes: tuple[tuple[int, tuple[float, ...]], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as a run keeps them."""
        plain: dict[str, Any] = {"from_sample": self.from_sample, "weights": list(self.weights)}
        if self.changes:
            plain["changes"] = [{"from_sample": sample, "weights": list(weights)} for sample, weights in self.changes]
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Phase:
        changes = tuple((change["from_sample"], tuple(change["weights"])) for change in plain.get("changes", ()))
        return cls(plain["from_sample"], tuple(plain["weights"]), changes)


class Mixture:
    """Samples to sources by the quota method, within each phase."""

    def __init__(self, phases: Sequence[Phase]) -> None:
        assert phases and phases[0].from_sample == 0
        assert all(a.from_sample < b.from_sample for a, b in pairwise(phases))
        assert len({len(weights) for phase in phases for weights in (phase.weights, *(w for _, w in phase.changes))}) == 1
        self.num_sources = len(phases[0].weights)
        self._starts = [phase.from_sample for phase in phases]
        self._walked = [_scheduled(phase) if phase.changes else _periodic(phase.weights) for phase in phases]
        self._before = [np.zeros(self.num_sources, dtype=np.int64)]
        for walked, start, end in zip(self._walked, self._starts, self._starts[1:]):
            self._before.append(self._before[-1] + walked.served(end - start))

    def locate(self, sample: int) -> tuple[int, int]:
        """(source, how many samples it has had before this one)."""
        phase = bisect_right(self._starts, sample) - 1
        source, rank = self._walked[phase].locate(sample - self._starts[phase])
        return source, int(self._before[phase][source]) + rank

    def served(self, num_samples: int) -> np.ndarray:
        """How many of the first `num_samples` samples come from each source; int64."""
        phase = bisect_right(self._starts, num_samples) - 1
        return self._before[phase] + self._walked[phase].served(num_samples - self._starts[phase])


class _Walked:
    """The samples of one phase, walked in blocks; the counts at each block's start are kept. With a `round` (the counts of
    one whole period) it repeats after it."""

    def __init__(
        self, walk: Callable[[np.ndarray, int, int], tuple[np.ndarray, np.ndarray]], num_sources: int, *, round: np.ndarray | None
    ) -> None:
        self._walk, self._round = walk, round
        self._length = int(round.sum()) if round is not None else _FAR
        self._states = [np.zeros(num_sources, dtype=np.int64)]
        self._blocks: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._lock = threading.Lock()  # rows are read by several threads

    def locate(self, sample: int) -> tuple[int, int]:
        rounds, place = self._place(sample)
        sources, ranks = self._block(place // BLOCK_SAMPLES)
        source = int(sources[place % BLOCK_SAMPLES])
        rank = int(ranks[place % BLOCK_SAMPLES])
        return source, rank if self._round is None else rank + rounds * int(self._round[source])

    def served(self, num_samples: int) -> np.ndarray:
        rounds, place = self._place(num_samples)
        counts = np.zeros_like(self._states[0]) if self._round is None else self._round * rounds
        if place:
            block = place // BLOCK_SAMPLES
            sources, _ = self._block(block)
            counts = counts + self._states[block] + np.bincount(sources[: place % BLOCK_SAMPLES], minlength=counts.size)
        return counts

    def _place(self, sample: int) -> tuple[int, int]:
        if self._round is None:
            assert sample < self._length, sample
            return 0, sample
        return divmod(sample, self._length)

    def _block(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Sources and ranks of block `number`; walks the blocks before it once, to know the counts at its start."""
        with self._lock:
            while number not in self._blocks:
                block = min(len(self._states) - 1, number)
                served = self._states[block].copy()
                count = min(BLOCK_SAMPLES, self._length - block * BLOCK_SAMPLES)
                sources, ranks = self._walk(served, block * BLOCK_SAMPLES, count)
                if block == len(self._states) - 1:
                    self._states.append(served)
                if block == number:
                    while len(self._blocks) >= _KEPT_BLOCKS:
                        self._blocks.pop(next(iter(self._blocks)))
                    self._blocks[block] = (sources, ranks)
            return self._blocks[number]


def _periodic(weights: Sequence[float]) -> _Walked:
    whole = integer_weights(weights)

    def walk(served: np.ndarray, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        return fast_walk(whole.size, count)(whole, served, first, count)

    return _Walked(walk, whole.size, round=whole)


def _scheduled(phase: Phase) -> _Walked:
    starts = np.array([0, *(sample - phase.from_sample for sample, _ in phase.changes)], dtype=np.int64)
    assert (np.diff(starts) > 0).all(), phase
    weights = common_weights([phase.weights, *(weights for _, weights in phase.changes)])
    due = np.concatenate([np.zeros_like(weights[:1]), np.cumsum(weights[:-1] * np.diff(starts)[:, None], axis=0)])

    def walk(served: np.ndarray, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        return fast_scheduled_walk(weights.shape[1], count)(starts, weights, due, served, first, count)

    return _Walked(walk, weights.shape[1], round=None)


def common_weights(several: Sequence[Sequence[float]]) -> np.ndarray:
    """Integers in the proportions of each of several lists of weights, all with the same sum; int64[lists, sources]."""
    whole = [integer_weights(weights) for weights in several]
    total = lcm(*(int(weights.sum()) for weights in whole))
    if total >= _MAX_PERIOD:
        raise ConfigError(
            [
                Fault(
                    "data.schedule",
                    [list(weights) for weights in several],
                    f"weights whose common denominator is below {_MAX_PERIOD:,}",
                    "give shares with the same few decimals, for example [0.7, 0.2, 0.1]",
                )
            ]
        )
    return np.array([weights * (total // int(weights.sum())) for weights in whole], dtype=np.int64)


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
