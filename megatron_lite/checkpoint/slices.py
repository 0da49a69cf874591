"""From what a rank owns (flat ranges of local parameters) to what a checkpoint holds (ranges of logical tensors), and back.

Every tensor is seen as a matrix: a vector as one row, dims after the second folded into the columns. A *block* is a rectangle
of that matrix; a *flat range* counts the block's elements row by row. ZeRO cuts flat ranges anywhere, so a range is at most
three rectangles: the rest of a row, whole rows, the start of a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron_lite.parallel.shard_spec import ShardSpec, spec_of

STATES = ("master", "exp_avg", "exp_avg_sq")  # the order in which a file holds them: weights alone are its first third

Rectangle = tuple[int, int, int, int]  # first row, last row + 1, first column, last column + 1


@dataclass(frozen=True)
class OwnedSlice:
    """A flat range of one state of a local parameter, as live storage: reading is a view, `view.copy_()` is the write.

    [start, stop) is what this rank needs, [write_start, write_stop) the part of it that this rank saves (None: all of it). Over
    the ranks of dp the written ranges cover each local parameter exactly once. Of a parameter that is the same on every tp
    rank only tp rank 0's is written; that is decided when saving, not here.
    """

    parameter_name: str
    spec: ShardSpec
    state: str
    start: int
    stop: int
    view: torch.Tensor  # [stop - start], fp32
    write_start: int | None = None
    write_stop: int | None = None

    def __post_init__(self) -> None:
        assert 0 <= self.start <= self.stop <= math.prod(self.spec.local_shape), (self.parameter_name, self.start, self.stop)
        assert self.view.dim() == 1 and self.view.numel() == self.stop - self.start, (self.parameter_name, self.view.shape)
        assert self.view.numel() < 2 or self.view.stride(0) == 1, self.parameter_name
        first, last = self.writes
        assert first >= last or self.start <= first <= last <= self.stop, (self.parameter_name, first, last)

    @property
    def writes(self) -> tuple[int, int]:
        """The flat range of the local parameter that this rank saves; empty where first >= last."""
        first = self.start if self.write_start is None else self.write_start
        return first, self.stop if self.write_stop is None else self.write_stop


@dataclass(frozen=True)
class Block:
    """A rectangular part of a logical tensor, seen as a matrix."""

    name: str
    global_shape: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.global_shape) == len(self.start) == len(self.shape), self
        assert all(at >= 0 and at + n <= full for at, n, full in zip(self.start, self.shape, self.global_shape)), self
        assert self.shape[2:] == self.global_shape[2:], f"{self.name}: only the first two dims may be cut"

    @classmethod
    def whole(cls, name: str, shape: Sequence[int]) -> Block:
        return cls(name, tuple(shape), (0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def row(self) -> int:
        return self.start[0] if len(self.shape) > 1 else 0

    @property
    def column(self) -> int:
        return self.start[1] * math.prod(self.shape[2:]) if len(self.shape) > 1 else sum(self.start)

    @property
    def width(self) -> int:
        """Columns of the block; a scalar has one."""
        return math.prod(self.shape[1:]) if len(self.shape) > 1 else self.numel

    def rectangles(self, first: int, last: int) -> list[Rectangle]:
        """The flat range [first, last) of this block as at most three rectangles of the logical matrix."""
        if first >= last:
            return []
        width, row, column = self.width, self.row, self.column
        (top, left), (bottom, right) = divmod(first, width), divmod(last, width)
        if top == bottom:
            return [(row + top, row + top + 1, column + left, column + right)]
        parts: list[Rectangle] = []
        if left:
            parts.append((row + top, row + top + 1, column + left, column + width))
            top += 1
        if top < bottom:
            parts.append((row + top, row + bottom, column, column + width))
        if right:
            parts.append((row + bottom, row + bottom + 1, column, column + right))
        return parts


@dataclass(frozen=True)
class LogicalSlice:
    """A flat range of a block of one state of a logical tensor, and the memory that holds it or shall hold it."""

    block: Block
    state: str
    first: int
    last: int
    view: torch.Tensor  # [last - first]


def logical_slices(owned: OwnedSlice, *, to_write: bool) -> Iterator[LogicalSlice]:
    """The parts of logical tensors within the range that is written, or else within the range that is needed."""
    start, stop = owned.writes if to_write else (owned.start, owned.stop)
    for piece in owned.spec.pieces:
        first, last = max(start, piece.offset), min(stop, piece.offset + piece.numel)
        if first < last:
            block = Block(piece.name, tuple(piece.global_shape), tuple(piece.start), tuple(piece.shape))
            view = owned.view[first - owned.start : last - owned.start]
            yield LogicalSlice(block, owned.state, first - piece.offset, last - piece.offset, view)


def padding(owned: OwnedSlice) -> Iterator[torch.Tensor]:
    """Views of the needed range that belong to no logical tensor (a padded vocabulary): zero in every state."""
    at = 0
    for piece in sorted(owned.spec.pieces, key=lambda piece: piece.offset):
        yield from _clip(owned, at, piece.offset)
        at = piece.offset + piece.numel
    yield from _clip(owned, at, math.prod(owned.spec.local_shape))


def _clip(owned: OwnedSlice, first: int, last: int) -> Iterator[torch.Tensor]:
    first, last = max(first, owned.start), min(last, owned.stop)
    if first < last:
        yield owned.view[first - owned.start : last - owned.start]


def model_slices(model: torch.nn.Module) -> list[OwnedSlice]:
    """The model's own weights as load targets, for use without an engine: every local parameter whole, in its own dtype."""
    return [
        OwnedSlice(name, spec_of(parameter), "master", 0, parameter.numel(), parameter.detach().view(-1))
        for name, parameter in model.named_parameters()
    ]


def overlap(ones: Sequence[Rectangle], others: Sequence[Rectangle]) -> list[Rectangle]:
    """The non-empty intersections of each of the ones with each of the others."""
    found = []
    for top, bottom, left, right in ones:
        for other_top, other_bottom, other_left, other_right in others:
            low, high = max(top, other_top), min(bottom, other_bottom)
            near, far = max(left, other_left), min(right, other_right)
            if low < high and near < far:
                found.append((low, high, near, far))
    return found


def window(flat: torch.Tensor, block: Block, first: int, rectangle: Rectangle) -> torch.Tensor:
    """The rectangle of the logical matrix as a 2-D view of `flat`, which holds the block's elements from number `first` on."""
    top, bottom, left, right = rectangle
    offset = (top - block.row) * block.width + (left - block.column) - first
    return flat.as_strided((bottom - top, right - left), (block.width, 1), flat.storage_offset() + offset)
