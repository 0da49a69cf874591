"""What every layer of one forward shares."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from megatron_lite.layers.dropout import DropoutPlace
from megatron_lite.layers.kernels import AttentionMask
from megatron_lite.layers.positions import Rotation


class KeyValueStore(Protocol):
    """Keys and values of earlier forwards, for decoding."""

    def extend_positions(self, positions: Tensor) -> Tensor:
        """Called once a forward with the new tokens' positions [B, S] (negative: padding); returns all keys' positions
        [B, T], the new ones last."""
        ...

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Called once a layer with this rank's new [B, K/tp, S, E], rotated; returns all, [B, K/tp, T, E]."""
        ...


@dataclass(frozen=True)
class ForwardContext:
    """Made once a forward, read by every layer."""

    rotation: Rotation | None  # None: queries and keys are not turned
    mask: AttentionMask
    split: bool  # activations outside the tp regions are split along S
    dropout: DropoutPlace | None = None  # of the hidden states: first_position is this rank's
    attention_dropout: DropoutPlace | None = None  # of the attention probabilities, where every rank has all of S
    store: KeyValueStore | None = None

    def within(self, layer: str) -> ForwardContext:
        """What the layer of this name gets: the dropout is its own."""
        if self.dropout is None or self.attention_dropout is None:
            return self
        return replace(self, dropout=self.dropout.within(layer), attention_dropout=self.attention_dropout.within(layer))
