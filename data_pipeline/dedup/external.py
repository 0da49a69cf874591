"""Sorting what doesn't fit in memory: (key, where) pairs in sorted runs on disk, read back a range of keys at a time.

A run holds RUN_RECORDS pairs, ordered by the top BOUND_BITS of their keys, with the bounds of each range. Reading takes as many ranges
at once as fit in a budget, from all runs: equal keys always come together. 16 bytes a pair on disk; in memory one run while writing,
the budget while reading, and some times as much to sort them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from data_pipeline.blockfile import BlockFile, BlockWriter, write_blockfile

PAIR = np.dtype([("key", "<u8"), ("where", "<u8")])
RUN_RECORDS = 1 << 18
BUDGET_BYTES = 8 << 20
BOUND_BITS = 12
MAX_RANGES_BITS = 10  # a budget below 1/1024 of all would be read in too many small pieces
_SPANS_HELD = 8


class RunWriter:
    """Collects pairs; keys should be hashes, spread evenly."""

    def __init__(self, out: BlockWriter) -> None:
        self._out = out
        self._keys: list[np.ndarray] = []
        self._wheres: list[np.ndarray] = []
        self._held = self._written = 0
        self._bounds: list[np.ndarray] = []
        out.begin("pairs", PAIR)

    def add(self, keys: np.ndarray, wheres: np.ndarray) -> None:
        """uint64 of equal length."""
        self._keys.append(keys)
        self._wheres.append(wheres)
        self._held += len(keys)
        if self._held >= RUN_RECORDS:
            self._end_run()

    def _end_run(self) -> None:
        keys = np.concatenate(self._keys)
        ranges = (keys >> np.uint64(64 - BOUND_BITS)).astype(np.uint16)
        order = np.argsort(ranges, kind="stable")  # a radix sort
        pairs = np.empty(len(keys), dtype=PAIR)
        pairs["key"], pairs["where"] = keys[order], np.concatenate(self._wheres)[order]
        self._out.append(pairs)
        self._bounds.append(self._written + np.searchsorted(ranges[order], np.arange((1 << BOUND_BITS) + 1)))
        self._written += len(keys)
        self._keys, self._wheres, self._held = [], [], 0

    def finish(self) -> None:
        if self._held:
            self._end_run()
        self._out.add("bounds", np.concatenate([*self._bounds, np.empty(0, dtype=np.int64)]).astype("<i8"))


@contextmanager
def write_runs(path: Path) -> Iterator[RunWriter]:
    with write_blockfile(path, kind="runs") as out:
        writer = RunWriter(out)
        yield writer
        writer.finish()


def ranges(paths: Sequence[Path], *, budget_bytes: int | None = None) -> Iterator[np.ndarray]:
    """PAIRs of all files, successive ranges of keys: what has one key is in one array, in no particular order."""
    files = [BlockFile(path, kind="runs") for path in paths]
    bounds = [file.read("bounds").reshape(-1, (1 << BOUND_BITS) + 1) for file in files]
    sizes = np.zeros(1 << BOUND_BITS, dtype=np.int64)
    for each in bounds:
        sizes += np.diff(each, axis=1).sum(axis=0)
    budget = max((BUDGET_BYTES if budget_bytes is None else budget_bytes) // PAIR.itemsize, int(sizes.sum()) >> MAX_RANGES_BITS)
    first = 0
    while first < len(sizes):
        stop = max(first + 1, int(np.searchsorted(np.cumsum(sizes[first:]), budget, side="right")) + first)
        pieces = [piece for file, each in zip(files, bounds) for piece in _pieces(file, each[:, [first, stop]])]
        if pieces:
            yield np.concatenate(pieces)
        first = stop


def _pieces(file: BlockFile, spans: np.ndarray) -> Iterator[np.ndarray]:
    """Copies of the spans [begin, end) of a file, one of each run; what was read of it is let go of soon."""
    for number, (begin, end) in enumerate(spans.tolist(), start=1):
        if end > begin:
            yield file.read("pairs", begin, end).copy()
        if number % _SPANS_HELD == 0 or number == len(spans):
            file.release()


def repeated(pairs: np.ndarray, *, keep: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """(later, firsts): of the keys that stand in more than `keep` places, the places after the first `keep`, and these first ones."""
    order = np.argsort(pairs["key"])
    keys = pairs["key"][order]
    same = keys[1:] == keys[:-1]
    shared = np.append(False, same)
    shared[:-1] |= same
    order, keys = order[shared], keys[shared]
    wheres = pairs["where"][order]
    by_place = np.lexsort((wheres, keys))
    keys, wheres = keys[by_place], wheres[by_place]
    begins = np.flatnonzero(np.append(True, keys[1:] != keys[:-1])[: len(keys)])
    counts = np.diff(np.append(begins, len(keys)))
    number = np.arange(len(keys)) - np.repeat(begins, counts)
    often = np.repeat(counts > keep, counts)
    return wheres[often & (number >= keep)], wheres[often & (number < keep)]
