"""Which bytes of which file go where: pure arithmetic between what is stored and what is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_lite.checkpoint.manifest import BLOCK_BYTES, ITEM_BYTES, FileEntry, Manifest
from megatron_lite.checkpoint.slices import Block, LogicalSlice, Rectangle, overlap


@dataclass(frozen=True)
class Source:
    """A flat range of a block, as it lies in a file."""

    block: Block
    first: int
    last: int
    offset: int  # elements of the file's data area before it


@dataclass(frozen=True)
class Job:
    """Copy what a stored slice and a needed one have in common."""

    source: Source
    target: LogicalSlice


@dataclass(frozen=True)
class Plan:
    """For each file that is needed, its needed blocks by number, and for each block the jobs that copy from it."""

    files: list[tuple[FileEntry, dict[int, list[Job]]]]


def make_plan(manifest: Manifest, targets: Sequence[LogicalSlice], *, index: Index | None = None) -> Plan:
    """Find the source of every element of the targets; names and shapes agree already. `index`: of this manifest, made before."""
    index = index or Index(manifest)
    needs: dict[int, dict[int, list[Job]]] = {}
    for target in targets:
        wanted = target.block.rectangles(target.first, target.last)
        found = 0
        for file, source in index.candidates(target.block.name, target.state, wanted):
            shared = overlap(source.block.rectangles(source.first, source.last), wanted)
            if not shared:
                continue
            found += sum((bottom - top) * (right - left) for top, bottom, left, right in shared)
            job = Job(source, target)
            for number in _blocks(source, shared):
                needs.setdefault(file, {}).setdefault(number, []).append(job)
        assert found == target.last - target.first, f"{target.block.name} {target.state}: found {found} of {target.last - target.first}"
    return Plan([(manifest.files[file], needs[file]) for file in sorted(needs)])


def _blocks(source: Source, rectangles: list[Rectangle]) -> list[int]:
    """Numbers of the checksummed blocks that hold the rectangles, which lie within the source."""
    numbers: set[int] = set()
    for top, bottom, left, right in rectangles:
        base = source.offset - source.first - source.block.column
        first = base + (top - source.block.row) * source.block.width + left
        last = base + (bottom - 1 - source.block.row) * source.block.width + right
        numbers.update(range(first * ITEM_BYTES // BLOCK_BYTES, (last * ITEM_BYTES - 1) // BLOCK_BYTES + 1))
    return sorted(numbers)


class Index:
    """All stored slices by (name, state), with their bounding rectangles as columns: there may be a million of them."""

    def __init__(self, manifest: Manifest) -> None:
        self._blocks = [block for file in manifest.files for block in file.blocks]
        self._keys: dict[tuple[str, str], int] = {}
        columns: list[list[np.ndarray]] = []
        base = 0
        for number, file in enumerate(manifest.files):
            pairs, inverse = np.unique(np.stack([file.block, file.state]), axis=1, return_inverse=True)
            names = [(file.blocks[block].name, file.states[state]) for block, state in pairs.T.tolist()]
            keys = np.array([self._keys.setdefault(name, len(self._keys)) for name in names], dtype=np.int64)
            columns.append(
                [keys[inverse.reshape(-1)], np.full(len(file.block), number), file.block + base, file.first, file.last, file.offset]
            )
            base += len(file.blocks)
        table = [np.concatenate(column) for column in zip(*columns)] if columns else [np.zeros(0, dtype=np.int64)] * 6
        order = np.argsort(table[0], kind="stable")
        self._key, self._file, self._block, self._first, self._last, self._offset = (column[order] for column in table)
        width, row, column = (
            np.array([getattr(block, name) for block in self._blocks], dtype=np.int64)[self._block] for name in ("width", "row", "column")
        )
        self._top, self._bottom = row + self._first // width, row + (self._last - 1) // width + 1
        one = self._bottom - self._top == 1
        self._left = np.where(one, column + self._first % width, column)
        self._right = np.where(one, column + (self._last - 1) % width + 1, column + width)

    def candidates(self, name: str, state: str, wanted: list[Rectangle]) -> list[tuple[int, Source]]:
        """(file number, source) of the stored slices that may touch the rectangles."""
        key = self._keys.get((name, state), -1)
        low, high = np.searchsorted(self._key, [key, key + 1])
        span = slice(int(low), int(high))
        top, bottom = min(r[0] for r in wanted), max(r[1] for r in wanted)
        left, right = min(r[2] for r in wanted), max(r[3] for r in wanted)
        near = (self._top[span] < bottom) & (top < self._bottom[span]) & (self._left[span] < right) & (left < self._right[span])
        return [(int(self._file[place]), self._source(place)) for place in (np.flatnonzero(near) + int(low)).tolist()]

    def _source(self, place: int) -> Source:
        offset, remainder = divmod(int(self._offset[place]), ITEM_BYTES)
        assert remainder == 0, "slices lie at whole elements"
        return Source(self._blocks[int(self._block[place])], int(self._first[place]), int(self._last[place]), offset)
