"""Positions as a bias of attention scores by distance and head: ALiBi (Press et al. 2022), T5's buckets (Raffel et al. 2020)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lite.layers.linear import cut_rows, parameter_of
from megatron_lite.model_config import ModelConfig
from megatron_lite.parallel.groups import Axis, ProcessGroups


class AlibiBias(nn.Module):
    """Distances [..., S, T] of queries from keys -> fp32 [..., H/tp, S, T]: minus the head's slope times the distance."""

    def __init__(self, num_heads: int, tp: Axis) -> None:
        super().__init__()
        self.num_heads, self.tp = num_heads, tp

    def forward(self, distances: Tensor) -> Tensor:
        mine = self.num_heads // self.tp.size
        slopes = alibi_slopes(self.num_heads, distances.device).narrow(0, self.tp.rank * mine, mine)
        return -slopes[:, None, None] * distances.abs().float().unsqueeze(-3)


def alibi_slopes(num_heads: int, device: torch.device | None = None) -> Tensor:
    """fp32 [H]: 2^(-8 (h + 1) / n) for n heads, n a power of two; of another number of heads those beyond the power of two below it
    get every second slope of twice as many heads, as the authors have it."""
    heads = torch.arange(1, num_heads + 1, dtype=torch.float32, device=device)
    power = 1 << (num_heads.bit_length() - 1)
    between = 2 * (heads - power) - 1
    return torch.exp2(-torch.where(heads <= power, 8 * heads / power, 4 * between / power))


class RelativeBias(nn.Module):
    """Distances [..., S, T] of queries from keys -> fp32 [..., H/tp, S, T]: a learned number by head and bucket of the distance.

    `bidirectional`: half of the buckets are of keys that come after; else those are taken as distance 0.
    """

    def __init__(self, config: ModelConfig, tp: Axis, *, name: str, bidirectional: bool) -> None:
        super().__init__()
        self.bidirectional, self.max_distance = bidirectional, config.position.relative_attention_max_distance
        self.num_buckets = config.position.relative_attention_num_buckets
        self.weight = parameter_of(cut_rows({name: config.num_attention_heads}, self.num_buckets, tp))

    def forward(self, distances: Tensor) -> Tensor:
        buckets = t5_buckets(distances, self.num_buckets, self.max_distance, bidirectional=self.bidirectional)
        return F.embedding(buckets, self.weight.t()).float().movedim(-1, -3)


def t5_buckets(distances: Tensor, num_buckets: int, max_distance: int, *, bidirectional: bool) -> Tensor:
    """int64: half of the buckets (of a direction) hold one distance each, the others grow geometrically up to max_distance, from
    which on all distances share the last."""
    first: Tensor | int = 0
    if bidirectional:
        num_buckets //= 2
        first = (distances < 0) * num_buckets
        distances = distances.abs()
    else:
        distances = distances.clamp(min=0)
    exact = num_buckets // 2
    grown = (distances.float() / exact).log() / math.log(max_distance / exact) * (num_buckets - exact)
    large = (exact + grown.clamp(min=0).long()).clamp(max=num_buckets - 1)
    return first + torch.where(distances < exact, distances, large)


def position_bias(config: ModelConfig, groups: ProcessGroups, *, name: str, bidirectional: bool = False) -> AlibiBias | RelativeBias | None:
    """What is added to the scores under this config, its table of this name; None for positions that enter elsewhere."""
    if config.position.type == "alibi":
        return AlibiBias(config.num_attention_heads, groups.tp)
    if config.position.type == "t5":
        return RelativeBias(config, groups.tp, name=name, bidirectional=bidirectional)
    return None


def distances_in_row(length: int, device: torch.device) -> Tensor:
    """int64 [S, S]: how far each query stands behind each key of its row."""
    places = torch.arange(length, device=device)
    return places[:, None] - places
