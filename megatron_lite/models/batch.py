"""One micro-batch of rows as the model takes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from megatron_lite.parallel.random import DropoutKey

__all__ = ["Batch", "DropoutKey"]


@dataclass(frozen=True)
class Source:
    """What an encoder reads beside the rows of a batch."""

    inputs: Tensor  # int64 [B, S]
    positions: Tensor  # int64 [B, S]
    segments: Tensor  # int32 [B, S]: tokens see those of their own number, and are seen by targets of it
    longest: int  # tokens of the longest piece

    @staticmethod
    def of(texts: Sequence[Sequence[int] | np.ndarray], *, device: torch.device | str = "cpu") -> Source:
        """One text a row, of any lengths; padding after it is segment 1."""
        length = max(map(len, texts))
        inputs = np.zeros((len(texts), length), dtype=np.int64)
        for row, text in enumerate(texts):
            inputs[row, : len(text)] = text
        return _source(inputs, [[0] if len(text) == length else [0, len(text)] for text in texts], device)

    @property
    def length(self) -> int:
        return self.inputs.shape[1]


@dataclass(frozen=True)
class Batch:
    """B rows of S tokens. A target stands at the place of the input it is predicted from: nothing is shifted later."""

    inputs: Tensor  # int64 [B, S]
    targets: Tensor  # int64 [B, S]; -100: none
    positions: Tensor  # int64 [B, S], for the position encoding; with isolated documents from 0 in each
    segments: Tensor | None  # int32 [B, S], the number of the document piece in the row; None: one document a row, plain causal
    samples: Tensor  # int64 [B], sample numbers, for dropout
    boundaries: Tensor | None = None  # int32 [N + 1]: where pieces start in the rows laid end to end, then B * S
    longest: int = 0  # tokens of the longest piece: here, so that no kernel's sizes need to be read from the device
    source: Source | None = None  # of an encoder-decoder; `segments` are numbers of the same pairs then, never None

    @staticmethod
    def from_rows(
        inputs: np.ndarray,
        targets: np.ndarray,
        segment_starts: Sequence[Sequence[int] | np.ndarray],
        samples: Sequence[int] | np.ndarray,
        *,
        document_mask: bool,
        device: torch.device | str = "cpu",
    ) -> Batch:
        """Rows [B, S]; `segment_starts` has for each row the places where a document piece starts, the first of them 0.

        With `document_mask` a token sees only its own piece and positions restart in each; else the row is one text.
        """
        num_rows, length = inputs.shape
        positions, segments, boundaries = np.broadcast_to(np.arange(length), (num_rows, length)), None, None
        longest = 0
        if document_mask and any(len(starts) > 1 for starts in segment_starts):
            segments, positions = _pieces(segment_starts, length)
            boundaries = np.append(np.flatnonzero(positions == 0), positions.size)
            longest = int(np.diff(boundaries).max())
        return Batch(
            inputs=_tensor(inputs, np.int64, device),
            targets=_tensor(targets, np.int64, device),
            positions=_tensor(positions, np.int64, device),
            segments=None if segments is None else _tensor(segments, np.int32, device),
            samples=_tensor(np.asarray(samples), np.int64, device),
            boundaries=None if boundaries is None else _tensor(boundaries, np.int32, device),
            longest=longest,
        )

    def with_source(self, inputs: np.ndarray, segment_starts: Sequence[Sequence[int] | np.ndarray]) -> Batch:
        """The same with the source side of its rows of pairs, [B, S]; segment k belongs to segment k of the targets."""
        return replace(self, source=_source(inputs, segment_starts, self.inputs.device))

    @property
    def num_rows(self) -> int:
        return self.inputs.shape[0]

    @property
    def length(self) -> int:
        return self.inputs.shape[1]


def _source(inputs: np.ndarray, segment_starts: Sequence[Sequence[int] | np.ndarray], device: torch.device | str) -> Source:
    segments, positions = _pieces(segment_starts, inputs.shape[1])
    longest = int(positions.max()) + 1
    return Source(_tensor(inputs, np.int64, device), _tensor(positions, np.int64, device), _tensor(segments, np.int32, device), longest)


def _pieces(segment_starts: Sequence[Sequence[int] | np.ndarray], length: int) -> tuple[np.ndarray, np.ndarray]:
    """([B, S] the number of the piece that a position lies in, [B, S] its place in the piece), both from 0."""
    begins = np.zeros((len(segment_starts), length), dtype=np.int32)
    for row, starts in enumerate(segment_starts):
        begins[row, np.asarray(starts, dtype=np.int64)] = 1
    begins[:, 0] = 1
    places = np.arange(length)
    return np.cumsum(begins, axis=1, dtype=np.int32) - 1, places - np.maximum.accumulate(np.where(begins > 0, places, 0), axis=1)


def _tensor(array: np.ndarray, dtype: type, device: torch.device | str) -> Tensor:
    on_host = torch.from_numpy(np.array(array, dtype=dtype, order="C"))
    if torch.device(device).type == "cuda":
        on_host = on_host.pin_memory()  # a copy from memory that is not pinned would wait for the device
    return on_host.to(device, non_blocking=True)
