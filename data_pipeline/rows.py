"""A row: S targets, the inputs that predict them, and where its documents begin."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

NO_TARGET = -100  # what cross-entropy ignores


@dataclass(frozen=True)
class Row:
    """`inputs`, `targets` int64[S] (NO_TARGET where there is none, only in padding at the end); `segment_starts` int32[n]:
    where the pieces of documents begin, the first at 0, padding being a segment of its own; `target_bytes`: UTF-8 bytes
    of the text of all targets. The arrays can't be written to.
    """

    inputs: np.ndarray
    targets: np.ndarray
    segment_starts: np.ndarray
    num_targets: int
    target_bytes: int

    def __post_init__(self) -> None:
        for array in (self.inputs, self.targets, self.segment_starts):
            array.flags.writeable = False

    @cached_property
    def segments(self) -> np.ndarray:
        """Which segment each position lies in, from 0; int32[S]."""
        marks = np.zeros(self.inputs.size, dtype=np.int32)
        marks[self.segment_starts] = 1
        return np.cumsum(marks, dtype=np.int32) - 1

    @cached_property
    def positions(self) -> np.ndarray:
        """Position within the segment, from 0; int32[S]."""
        return np.arange(self.inputs.size, dtype=np.int32) - self.segment_starts[self.segments]


def assemble(pieces: Iterable[tuple[np.ndarray, int]], *, sequence_length: int, begin_id: int, token_bytes: np.ndarray) -> Row:
    """A row from (tokens of a piece, the id that stands before its first)."""
    inputs = np.full(sequence_length, begin_id, dtype=np.int64)
    targets = np.full(sequence_length, NO_TARGET, dtype=np.int64)
    starts: list[int] = []
    place = 0
    for tokens, before in pieces:
        end = place + tokens.size
        starts.append(place)
        targets[place:end] = tokens
        inputs[place] = before
        inputs[place + 1 : end] = tokens[:-1]
        place = end
    if place < sequence_length:
        starts.append(place)
    target_bytes = int(token_bytes[targets[:place]].sum(dtype=np.int64))
    return Row(
        inputs=inputs, targets=targets, segment_starts=np.array(starts, dtype=np.int32), num_targets=place, target_bytes=target_bytes
    )


def row_digest(row: Row) -> bytes:
    """sha256 of the targets as little-endian uint32 (0xFFFFFFFF where there is none), then of the segment starts, likewise."""
    targets = np.where(row.targets == NO_TARGET, 0xFFFFFFFF, row.targets).astype("<u4")
    return hashlib.sha256(targets.tobytes() + row.segment_starts.astype("<u4").tobytes()).digest()


def batch_id(digests: Sequence[bytes]) -> str:
    """16 hex digits that name a global batch: sha256 over the digests of its rows in order."""
    return hashlib.sha256(b"".join(digests)).hexdigest()[:16]
