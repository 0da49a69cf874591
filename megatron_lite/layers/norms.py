"""Normalisation, outside the tp regions: weights are replicated, and each rank sees its part of S under sequence parallel."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lite.layers.linear import parameter_of
from megatron_lite.parallel.shard_spec import Piece, ShardSpec


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dim, the mean and the root in fp32 (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, *, name: str, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = parameter_of(ShardSpec((Piece(name, (size,), (0,), (size,)),), (size,), cut=False, gradient="partial_under_sp"))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
