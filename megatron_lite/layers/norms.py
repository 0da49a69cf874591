"""Normalisation, outside the tp regions: weights are replicated, and each rank sees its part of S under sequence parallel."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lite.layers.linear import parameter_of, replicated_vector
from megatron_lite.layers.row_blocks import row_blocks


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dim, the mean and the root in fp32 (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, *, name: str, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = parameter_of(replicated_vector(name, size))

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and x.dtype != torch.float64 and not torch.compiler.is_compiling():
            return _RMSNorm.apply(x, self.weight, self.eps)
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class _RMSNorm(torch.autograd.Function):
    """The same in blocks of rows that stay in the cache, where torch's composition on CPU passes over memory many times; sums
    are fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows, gain = x.flatten(0, -2), weight.float()
        out, inverse = torch.empty_like(rows), torch.empty(rows.shape[0], 1)
        for block in row_blocks(rows):
            wide = rows[block].to(torch.float32, copy=True)
            norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
            inverse[block] = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
            out[block] = wide.mul_(inverse[block]).mul_(gain)
        ctx.save_for_backward(x, weight, inverse)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight, inverse = ctx.saved_tensors
        rows, above, gain = x.flatten(0, -2), gradient.flatten(0, -2), weight.float()
        of_x, of_gain = torch.empty_like(rows), torch.zeros_like(gain)
        for block in row_blocks(rows):
            normalised = rows[block].to(torch.float32, copy=True).mul_(inverse[block])
            wide = above[block].to(torch.float32, copy=True)
            product = normalised * wide
            of_gain += product.sum(dim=0)
            along = torch.mv(product, gain).div_(-x.shape[-1])  # what of the gradient only scales x
            of_x[block] = wide.mul_(gain).addcmul_(normalised, along[:, None]).mul_(inverse[block])
        return of_x.view(x.shape), of_gain.to(weight.dtype), None
