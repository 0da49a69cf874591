"""A row: S targets, the inputs that predict them, and where its documents begin."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

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

    def digest(self) -> bytes:
        """sha256 of the targets as little-endian uint32 (0xFFFFFFFF where there is none), then of the segment starts, likewise."""
        targets = np.where(self.targets == NO_TARGET, 0xFFFFFFFF, self.targets).astype("<u4")
        return hashlib.sha256(targets.tobytes() + self.segment_starts.astype("<u4").tobytes()).digest()


def assemble(
    tokens: np.ndarray, lengths: Sequence[int], before: Sequence[int], *, sequence_length: int, begin_id: int, token_bytes: np.ndarray
) -> Row:
    """A row from the tokens of its pieces, one after another, how many each has, and the id that stands before its first."""
    inputs = np.full(sequence_length, begin_id, dtype=np.int64)
    targets = np.full(sequence_length, NO_TARGET, dtype=np.int64)
    end, starts = tokens.size, segment_starts(lengths, sequence_length)
    targets[:end] = tokens
    inputs[1:end] = targets[: end - 1]
    inputs[starts[: len(lengths)]] = before
    target_bytes = int(token_bytes[tokens].sum(dtype=np.int64))
    return Row(inputs=inputs, targets=targets, segment_starts=starts, num_targets=end, target_bytes=target_bytes)


def segment_starts(lengths: Sequence[int], room: int) -> np.ndarray:
    """Where pieces of these lengths begin in a row, and then where its padding does, if there is any; int32."""
    *starts, end = accumulate(lengths, initial=0)
    return np.array(starts if end == room else [*starts, end], dtype=np.int32)


def batch_id(digests: Sequence[bytes]) -> str:
    """16 hex digits that name a global batch: sha256 over the digests of its rows in order."""
    return hashlib.sha256(b"".join(digests)).hexdigest()[:16]
