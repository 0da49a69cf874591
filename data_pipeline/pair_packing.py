"""Aligned pairs to rows with room for S source tokens and T targets: which pairs stand in which row. The tokens are never copied.

Within windows of 2^20 pairs in keyed order, runs of 4,096 are taken one after another, each from its longest pair on (by the larger of its
shares of S and T), and a pair is put into the row that it fills best: so long pairs begin rows, short ones fill those of before. A pair that
is longer than a side of a row is left out, and counted by that side.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from data_pipeline.packing import WINDOW_DOCUMENTS
from data_pipeline.permutation import Permutation

RUN_PAIRS = 4096
TOO_LONG = ("source_too_long", "target_too_long", "both_too_long")


@dataclass(frozen=True)
class PairRows:
    """Some rows: the pairs of each, row after row, uint32, and how many each row has."""

    pairs: np.ndarray
    pairs_per_row: np.ndarray


def too_long(source: np.ndarray, target: np.ndarray, *, source_length: int, target_length: int) -> np.ndarray:
    """int8[pairs]: 0 for a pair that fits a row, else 1 + its place in TOO_LONG."""
    over: np.ndarray = (source > source_length) + 2 * (target > target_length).astype(np.int8)
    return over.astype(np.int8)


def plan_pair_rows(
    source: np.ndarray, target: np.ndarray, *, source_length: int, target_length: int, key: str, window_pairs: int = WINDOW_DOCUMENTS
) -> Iterator[PairRows]:
    """The rows of a source, some at a time. `source`, `target`: tokens of the sides of each pair, their ends included, in stored order."""
    from data_pipeline.pairpack import best_fit_pairs  # compiles on first use; readers of finished plans never need it

    assert source.size == target.size < 1 << 32
    order = Permutation(source.size, key=f"packing {key}")
    fits = too_long(source, target, source_length=source_length, target_length=target_length) == 0
    for first in range(0, source.size, window_pairs):
        window = order.many(first, min(first + window_pairs, source.size))
        window = window[fits[window]]
        if not window.size:
            continue
        share = np.maximum(source[window] * target_length, target[window] * source_length)  # of the product of both: whole numbers
        window = window[np.lexsort((-share, np.arange(window.size) // RUN_PAIRS))]
        rows, num_rows = best_fit_pairs(source[window].astype(np.int64), target[window].astype(np.int64), source_length, target_length)
        by_row = np.argsort(rows, kind="stable")
        yield PairRows(window[by_row].astype(np.uint32), np.bincount(rows, minlength=num_rows).astype(np.int64))
