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
    require_usable(logits)
    device = logits.device
    greedy = torch.tensor([each.greedy for each in options], device=device)[:, None]
    temperature = torch.tensor([1.0 if each.greedy else each.temperature for each in options], dtype=torch.float64, device=device)[:, None]
    ordered, ids = logits.double().sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=device)[None]
    limit = torch.tensor([each.top_k or logits.shape[-1] for each in options], device=device)[:, None].masked_fill(greedy, 1)
    scaled = ((ordered - ordered[:, :1]) / temperature).masked_fill(rank >= limit, float("-inf"))
    likely = scaled.softmax(dim=-1)
    top_p = torch.tensor([2.0 if each.top_p >= 1 else each.top_p for each in options], dtype=torch.float64, device=device)[:, None]
    before = likely.cumsum(dim=-1) - likely  # the mass of those that are more probable
    likely = likely.masked_fill((before >= top_p - NUCLEUS_SLACK) & (rank > 0), 0.0)
    likely /= likely.sum(dim=-1, keepdim=True)
    return torch.zeros_like(likely).scatter_(-1, ids, likely)


def choose(logits: Tensor, options: Sequence[SamplingOptions], draws: Tensor) -> Tensor:
    """int64 [B]: the token whose part of the cumulative distribution holds the row's draw, float64 [B] in [0, 1)."""
    if all(each.greedy for each in options):
        require_usable(logits)
        return logits.argmax(dim=-1)
    cumulative = probabilities(logits, options).cumsum(dim=-1)
    total = cumulative[:, -1:]  # 1 only up to rounding
    wanted = torch.minimum(draws.to(cumulative)[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, wanted, right=True).squeeze(-1)  # the first beyond: never one of probability 0


def draw(seed: int, place: int) -> float:
    """A number in [0, 1) that depends on the seed and the token's place in its text, not on the batch or the layout."""
    digest = hashlib.sha256(f"megatron-lite sampling {seed} {place}".encode()).digest()
    return (int.from_bytes(digest[:8], "little") >> 11) * 2.0**-53


def require_usable(logits: Tensor) -> None:
    """Raises NonFiniteError unless every row [V] has a finite maximum and no NaN."""
    if not bool(torch.isfinite(logits.amax(dim=-1)).all()):  # a NaN is its row's maximum
        raise NonFiniteError("the model's logits are not finite: its weights are damaged, or training diverged before this checkpoint")
