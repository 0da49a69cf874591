"""Keys and values of the tokens so far, so that decoding reads each token once."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_lite.layers.context import EncodedSource


class KVCache:
    """Room for `capacity` tokens a row; this rank's heads only. Implements the layers' KeyValueStore.

    Layers see exactly what was stored, never free room. What stands at padding (negative positions) is stored as zeros:
    attention multiplies masked values by 0, and a NaN would survive that. `memory`: of the rows' sources, in an encoder-decoder.
    `padded`: whether any place of any row may be padding; where none is, no mask is needed.
    """

    def __init__(self, capacity: int, *, memory: EncodedSource | None = None, padded: bool = True) -> None:
        self.capacity, self.padded = capacity, padded
        self.memory = memory
        self.length = 0  # tokens stored a row, padding included
        self._positions: Tensor | None = None  # int64 [B, capacity]
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}  # [B, K/tp, capacity, E] each
        self._new = 0
        self._padding: Tensor | None = None  # bool [B, 1, S, 1] of the tokens being added; None where there is none

    def extend_positions(self, positions: Tensor) -> Tensor:
        """Begin a forward with these tokens' positions [B, S]; returns the positions of all, [B, T]."""
        num_rows, self._new = positions.shape
        assert self.length + self._new <= self.capacity, (self.length, self._new, self.capacity)
        if self._positions is None:
            self._positions = torch.empty(num_rows, self.capacity, dtype=torch.int64, device=positions.device)
        self._positions[:, self.length : self.length + self._new] = positions
        padding = (positions < 0)[:, None, :, None] if self.padded and self._new > 1 else None
        self._padding = padding if padding is not None and bool(padding.any()) else None
        self.length += self._new
        return self._positions[:, : self.length]

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values [B, K/tp, S, E]; returns all of them, [B, K/tp, T, E]."""
        if layer not in self._layers:
            room = (*keys.shape[:2], self.capacity, keys.shape[3])
            self._layers[layer] = (keys.new_empty(room), values.new_empty(room))
        stored = self._layers[layer]
        for whole, new in zip(stored, (keys, values)):
            kept = new if self._padding is None else new.masked_fill(self._padding, 0.0)
            whole[:, :, self.length - self._new : self.length] = kept
        return stored[0][:, :, : self.length], stored[1][:, :, : self.length]

    def reorder(self, rows: Tensor) -> None:
        """Row n becomes what row rows[n] was, int64 [B']: fewer rows, more, some of them several times."""
        if self._positions is not None:
            self._positions = self._positions[rows]
        for layer, stored in self._layers.items():
            self._layers[layer] = (self._reordered(stored[0], rows), self._reordered(stored[1], rows))
        if self.memory is not None:
            self.memory = self.memory.reordered(rows)

    def _reordered(self, whole: Tensor, rows: Tensor) -> Tensor:
        """Only what is stored is copied, and in place only of the rows that change."""
        if len(rows) != len(whole):
            target = whole.new_empty(len(rows), *whole.shape[1:])
            target[:, :, : self.length] = whole[:, :, : self.length][rows]
            return target
        changed = (rows != torch.arange(len(rows), device=rows.device)).nonzero().squeeze(1)
        if len(changed):
            whole[changed, :, : self.length] = whole[rows[changed], :, : self.length]
        return whole
