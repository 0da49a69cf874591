"""A row of pairs: source tokens for an encoder, inputs and targets for a decoder, and where each pair begins on either side."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from data_pipeline.rows import NO_TARGET, segment_starts


@dataclass(frozen=True)
class PairRow:
    """`source` int64[S]; `inputs`, `targets` int64[T] (NO_TARGET in padding); `source_starts`, `target_starts` int32: where segment k
    begins on each side, the first at 0. Segment k of the targets belongs to segment k of the source, and attends to it alone. Padding at
    the end of a side is one more segment, with the number `num_pairs`; it may be there on one side and not on the other, so what a padded
    target computes means nothing. The arrays can't be written to.
    """

    source: np.ndarray
    source_starts: np.ndarray
    inputs: np.ndarray
    targets: np.ndarray
    target_starts: np.ndarray
    num_pairs: int
    num_source_tokens: int
    num_targets: int
    target_bytes: int

    def __post_init__(self) -> None:
        for array in (self.source, self.source_starts, self.inputs, self.targets, self.target_starts):
            array.flags.writeable = False

    @cached_property
    def source_segments(self) -> np.ndarray:
        """Which pair each source position belongs to, from 0, `num_pairs` in padding; int32[S]."""
        return _segments(self.source_starts, self.source.size)

    @cached_property
    def target_segments(self) -> np.ndarray:
        """Which pair each target belongs to, likewise; int32[T]."""
        return _segments(self.target_starts, self.targets.size)

    @cached_property
    def source_positions(self) -> np.ndarray:
        """Position within the segment, from 0; int32[S]."""
        return np.arange(self.source.size, dtype=np.int32) - self.source_starts[self.source_segments]

    @cached_property
    def target_positions(self) -> np.ndarray:
        """int32[T]"""
        return np.arange(self.targets.size, dtype=np.int32) - self.target_starts[self.target_segments]

    @property
    def segment_starts(self) -> np.ndarray:
        """Of the targets, as a row of documents has them."""
        return self.target_starts

    def digest(self) -> bytes:
        """sha256 of source and targets as little-endian uint32 (0xFFFFFFFF where there is none), then of the number of pairs and the starts
        of both sides, likewise."""
        source = self.source.astype("<u4")
        source[self.num_source_tokens :] = 0xFFFFFFFF
        targets = np.where(self.targets == NO_TARGET, 0xFFFFFFFF, self.targets).astype("<u4")
        starts = np.concatenate([[self.num_pairs], self.source_starts, self.target_starts]).astype("<u4")
        return hashlib.sha256(source.tobytes() + targets.tobytes() + starts.tobytes()).digest()


def _segments(starts: np.ndarray, length: int) -> np.ndarray:
    marks = np.zeros(length, dtype=np.int32)
    marks[starts] = 1
    return np.cumsum(marks, dtype=np.int32) - 1


def assemble_pairs(
    tokens: np.ndarray,
    source_lengths: Sequence[int],
    target_lengths: Sequence[int],
    *,
    source_length: int,
    target_length: int,
    begin_id: int,
    token_bytes: np.ndarray,
) -> PairRow:
    """A row from the tokens of the source sides of its pairs, one after another, then those of the target sides, and how many each side
    of each has, its end included. A target's input is the one before it, `begin_id` before the first."""
    source = np.full(source_length, begin_id, dtype=np.int64)
    inputs = np.full(target_length, begin_id, dtype=np.int64)
    targets = np.full(target_length, NO_TARGET, dtype=np.int64)
    at = sum(source_lengths)
    to = tokens.size - at
    source[:at], targets[:to] = tokens[:at], tokens[at:]
    source_starts, target_starts = segment_starts(source_lengths, source_length), segment_starts(target_lengths, target_length)
    inputs[1:to] = targets[: to - 1]
    inputs[target_starts] = begin_id
    target_bytes = int(token_bytes[tokens[at:]].sum(dtype=np.int64))
    return PairRow(source, source_starts, inputs, targets, target_starts, len(source_lengths), at, to, target_bytes)
