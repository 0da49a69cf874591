"""Normalisation, outside the tp regions: weights are replicated, and each rank sees its part of S under sequence parallel."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lite.layers.linear import parameter_of, replicated_vector


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
    """The same with half the passes over memory that torch's composition makes on CPU in backward; sums are fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        inverse = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight, inverse = ctx.saved_tensors
        normalised, above = (x * inverse).flatten(0, -2), gradient.flatten(0, -2)
        product = normalised * above
        along = torch.mv(product, weight.float()).div_(-x.shape[-1])  # what of the gradient only scales x
        of_x = torch.addcmul(above.float() * weight, normalised, along[:, None]).mul_(inverse.flatten(0, -2))
        return of_x.view(x.shape).to(x.dtype), product.sum(dim=0).to(weight.dtype), None
