"""Dropout whose mask is a pure function of (seed, step, sample, layer, site, position, channel)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatron_lite.parallel.random import folded, keep_mask, site

EMBEDDING, ATTENTION, PROBABILITIES, MLP = (site(name) for name in ("embedding", "attention", "probabilities", "mlp"))
CROSS_ATTENTION, CROSS_PROBABILITIES = site("cross_attention"), site("cross_probabilities")


@dataclass(frozen=True)
class DropoutPlace:
    """Where in the run's dropout a forward stands: keys of its rows, int64 [B] (`random.sample_keys`), inside a layer with
    the layer folded in.

    `first_position` is the place in the row of this rank's first position: not 0 where activations are split along S.
    """

    keys: Tensor
    first_position: int = 0

    def within(self, layer: str) -> DropoutPlace:
        """The same rows inside the layer of this name."""
        return DropoutPlace(folded(self.keys, site(layer)), self.first_position)


def dropout(x: Tensor, probability: float, place: DropoutPlace | None, *, where: int) -> Tensor:
    """x [B, S, D] with elements zeroed with `probability`, the rest scaled by 1/(1 - probability). No place: x itself."""
    if place is None or probability == 0.0:
        return x
    keep = keep_mask(place.keys, where, [place.first_position], [x.shape[1]], x.shape[2], probability)
    return x.masked_fill(~keep, 0.0) * (1.0 / (1.0 - probability))


def attention_dropout(
    probabilities: Tensor, probability: float, place: DropoutPlace, *, first_head: int, where: int = PROBABILITIES
) -> Tensor:
    """The same for attention probabilities [B, H/tp, S, T], by global head, query's and key's place in the row."""
    _, num_heads, num_queries, num_keys = probabilities.shape
    keep = keep_mask(place.keys, where, [first_head, 0], [num_heads, num_queries], num_keys, probability)
    return probabilities.masked_fill(~keep, 0.0) * (1.0 / (1.0 - probability))
