"""From logits to tokens: pure functions of logits, options and a number in [0, 1).

Order: temperature, then the top k, then the nucleus of what is left renormalised (Holtzman et al. 2020).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from data_pipeline.errors import ConfigError, Fault, NonFiniteError

GREEDY_BELOW = 1e-6  # of the temperature: no fp32 logits differ by less and matter
NUCLEUS_SLACK = 1e-6  # of the mass: fp32 probabilities that add up to top_p exactly come out just below or above


@dataclass(frozen=True)
class SamplingOptions:
    """How one row's tokens are chosen. Raises ConfigError naming every bad value."""

    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # the most probable k; 0: all
    top_p: float = 1.0  # the fewest most probable that have this mass together; 1: all; at least one stays
    seed: int = 0

    def __post_init__(self) -> None:
        faults = []
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            faults.append(Fault("temperature", self.temperature, "a number from 0 (greedy)"))
        if self.top_k < 0:
            faults.append(Fault("top_k", self.top_k, "a count from 1, or 0 for no limit"))
        if not 0 <= self.top_p <= 1:
            faults.append(Fault("top_p", self.top_p, "a probability from 0 to 1"))
        if faults:
            raise ConfigError(faults)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


def probabilities(logits: Tensor, options: Sequence[SamplingOptions]) -> Tensor:
    """float64 [B, V]: each row's distribution after its own temperature, top k and nucleus; greedy rows have one 1.

    Ties go to the lower id. Raises NonFiniteError where a row has NaN or nothing finite.
    """
    ids, likely = _candidates(logits, options)
    return likely.new_zeros(logits.shape).scatter_(-1, ids, likely)


def choose(logits: Tensor, options: Sequence[SamplingOptions], draws: Tensor) -> Tensor:
    """int64 [B]: the token whose part of the cumulative distribution holds the row's draw, float64 [B] in [0, 1)."""
    if all(each.greedy for each in options):
        require_usable(logits)
        return logits.argmax(dim=-1)
    ids, likely = _candidates(logits, options)
    cumulative = likely.cumsum(dim=-1)
    total = cumulative[:, -1:]  # 1 only up to rounding
    wanted = torch.minimum(draws.to(cumulative)[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    place = torch.searchsorted(cumulative, wanted, right=True)  # the first beyond: never one of probability 0
    return ids.gather(-1, place).squeeze(-1)


def _candidates(logits: Tensor, options: Sequence[SamplingOptions]) -> tuple[Tensor, Tensor]:
    """(ids int64 [B, C], probabilities float64 [B, C]) of all tokens that may be chosen, perhaps with some of probability 0."""
    require_usable(logits)
    vocabulary = logits.shape[-1]

    def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=logits.device)[:, None]

    temperature = column([1.0 if each.greedy else each.temperature for each in options], torch.float64)
    limits = [1 if each.greedy else min(each.top_k or vocabulary, vocabulary) for each in options]
    if min(limits) == vocabulary and all(each.top_p >= 1 for each in options):
        ids = torch.arange(vocabulary, device=logits.device).expand_as(logits)
        return ids, ((logits - logits.amax(dim=-1, keepdim=True)).double() / temperature).softmax(dim=-1)
    values, ids = _ranked(logits, max(limits))
    rank = torch.arange(values.shape[-1], device=logits.device)[None]
    scaled = ((values - values[:, :1]).double() / temperature).masked_fill(rank >= column(limits, torch.int64), float("-inf"))
    likely = scaled.softmax(dim=-1)
    top_p = column([2.0 if each.top_p >= 1 else each.top_p for each in options], torch.float64)
    before = likely.cumsum(dim=-1) - likely  # the mass of those that are more probable
    likely = likely.masked_fill((before >= top_p - NUCLEUS_SLACK) & (rank > 0), 0.0)
    return ids, likely / likely.sum(dim=-1, keepdim=True)


def _ranked(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(logits, ids) of at least the `count` largest of each row, largest first, equal ones by id."""
    if 4 * count < logits.shape[-1]:
        least = logits.topk(count).values[:, -1:]
        count = int((logits >= least).sum(dim=-1).max())  # with all that equal the last
    if 4 * count >= logits.shape[-1]:
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
        return values, ids
    ids = logits.topk(count).indices.sort(dim=-1).values
    values, order = logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)


def draw(seed: int, place: int) -> float:
    """A number in [0, 1) that depends on the seed and the token's place in its text, not on the batch or the layout."""
    digest = hashlib.sha256(f"megatron-lite sampling {seed} {place}".encode()).digest()
    return (int.from_bytes(digest[:8], "little") >> 11) * 2.0**-53


def require_usable(logits: Tensor) -> None:
    """Raises NonFiniteError unless every row [V] has a finite maximum and no NaN."""
    if not bool(torch.isfinite(logits.amax(dim=-1)).all()):  # a NaN is its row's maximum
        raise NonFiniteError("the model's logits are not finite: its weights are damaged, or training diverged before this checkpoint")
