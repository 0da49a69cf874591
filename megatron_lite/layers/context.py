"""What every layer of one forward shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from megatron_lite.layers.dropout import DropoutPlace
from megatron_lite.layers.kernels import AttentionMask
from megatron_lite.layers.positions import Rotation


@dataclass(frozen=True)
class EncodedSource:
    """What a decoder sees of its source: the encoder's output, or in decoding each layer's keys and values made of it once."""

    hidden: Tensor  # [B, S, D] on every tp rank, whose uses are summed in backward
    mask: AttentionMask  # of the source for the queries of this forward
    projected: dict[int, tuple[Tensor, Tensor]] | None = None  # by layer, [B, K/tp, S, E] each; None: not kept
    sources: Tensor | None = None  # int64 [B]: rows of one source have one number; in decoding

    def reordered(self, rows: Tensor) -> EncodedSource:
        """Row n becomes what row rows[n] was: nothing is copied where beams of one source change places."""
        assert self.mask.allowed is not None and self.projected is not None and self.sources is not None, "not a memory for decoding"
        sources = self.sources[rows]
        if torch.equal(sources, self.sources):
            return self
        projected = {layer: (keys[rows], values[rows]) for layer, (keys, values) in self.projected.items()}
        return EncodedSource(self.hidden[rows], AttentionMask(allowed=self.mask.allowed[rows]), projected, sources)


class KeyValueStore(Protocol):
    """Keys and values of earlier forwards, for decoding."""

    memory: EncodedSource | None  # of an encoder's source
    padded: bool  # whether any place of any row may be padding

    def extend_positions(self, positions: Tensor) -> Tensor:
        """Called once a forward with the new tokens' positions [B, S] (negative: padding); returns all keys' positions
        [B, T], the new ones last."""
        ...

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Called once a layer with this rank's new [B, K/tp, S, E], rotated; returns all, [B, K/tp, T, E]."""
        ...


Masks = Mapping[int | None, AttentionMask]  # by the sliding window of the layers that it is for; None: those without


@dataclass(frozen=True)
class ForwardContext:
    """Made once a forward, read by every layer."""

    rotation: Rotation | None  # None: queries and keys are not turned
    masks: Masks
    split: bool  # activations outside the tp regions are split along S
    dropout: DropoutPlace | None = None  # of the hidden states: first_position is this rank's
    attention_dropout: DropoutPlace | None = None  # of the attention probabilities, where every rank has all of S
    store: KeyValueStore | None = None
    memory: EncodedSource | None = None  # of the encoder

    def within(self, layer: str) -> ForwardContext:
        """What the layer of this name gets: the dropout is its own."""
        if self.dropout is None or self.attention_dropout is None:
            return self
        return replace(self, dropout=self.dropout.within(layer), attention_dropout=self.attention_dropout.within(layer))
