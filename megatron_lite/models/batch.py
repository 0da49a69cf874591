"""One micro-batch of rows as the model takes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_lite.parallel.random import DropoutKey

__all__ = ["Batch", "DropoutKey"]


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
        positions = np.broadcast_to(np.arange(length), (num_rows, length))
        segments = boundaries = None
        longest = 0
        if document_mask and any(len(starts) > 1 for starts in segment_starts):
            begins = np.zeros((num_rows, length), dtype=np.int32)
            for row, starts in enumerate(segment_starts):
                begins[row, np.asarray(starts, dtype=np.int64)] = 1
            begins[:, 0] = 1
            positions = positions - np.maximum.accumulate(np.where(begins > 0, positions, 0), axis=1)
            segments = np.cumsum(begins, axis=1, dtype=np.int32) - 1
            boundaries = np.append(np.flatnonzero(begins), begins.size)
            longest = int(np.diff(boundaries).max())
        pin = torch.device(device).type == "cuda"  # a copy from memory that is not pinned would wait for the device

        def tensor(array: np.ndarray, dtype: type) -> Tensor:
            on_host = torch.from_numpy(np.array(array, dtype=dtype, order="C"))
            return (on_host.pin_memory() if pin else on_host).to(device, non_blocking=True)

        return Batch(
            inputs=tensor(inputs, np.int64),
            targets=tensor(targets, np.int64),
            positions=tensor(positions, np.int64),
            segments=None if segments is None else tensor(segments, np.int32),
            samples=tensor(np.asarray(samples), np.int64),
            boundaries=None if boundaries is None else tensor(boundaries, np.int32),
            longest=longest,
        )

    @property
    def num_rows(self) -> int:
        return self.inputs.shape[0]

    @property
    def length(self) -> int:
        return self.inputs.shape[1]
