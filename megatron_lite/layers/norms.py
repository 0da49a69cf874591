"""Normalisation, outside the tp regions: weights are replicated, and each rank sees its part of S under sequence parallel."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lite.layers.linear import bias_of, parameter_of, replicated_vector
from megatron_lite.layers.row_blocks import FEW, row_blocks
from megatron_lite.model_config import ModelConfig


def norm_of(config: ModelConfig, *, name: str, size: int | None = None) -> RMSNorm | LayerNorm:
    """The config's kind of norm over `size` channels (null: hidden_size); its gain has the logical name `name`.weight."""
    size = config.hidden_size if size is None else size
    name, eps, zero_centred = f"{name}.weight", config.norm_eps, config.norm.zero_centred
    if config.norm.type == "layer_norm":
        return LayerNorm(size, name=name, eps=eps, bias=config.norm.bias, zero_centred=zero_centred)
    return RMSNorm(size, name=name, eps=eps, zero_centred=zero_centred)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dim, the mean and the root in fp32 (Zhang and Sennrich 2019).

    With zero_centred the gain is 1 + weight, in fp32, and the product is rounded once.
    """

    def __init__(self, size: int, *, name: str, eps: float, zero_centred: bool = False) -> None:
        super().__init__()
        self.eps, self.zero_centred = eps, zero_centred
        self.weight = parameter_of(replicated_vector(name, size))

    def forward(self, x: Tensor) -> Tensor:
        weight = _one_more(self.weight) if self.zero_centred else self.weight
        few = x.dtype == torch.float32 and x.numel() <= FEW and not torch.is_grad_enabled()
        if x.device.type == "cpu" and x.dtype != torch.float64 and not few and not torch.compiler.is_compiling():
            return _RMSNorm.apply(x, weight, self.eps)
        return F.rms_norm(x.to(weight.dtype), (x.shape[-1],), weight, self.eps).to(x.dtype)


class LayerNorm(nn.Module):
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dim, statistics in fp32 (Ba et al. 2016)."""

    def __init__(self, size: int, *, name: str, eps: float, bias: bool, zero_centred: bool = False) -> None:
        super().__init__()
        self.eps, self.zero_centred = eps, zero_centred
        self.weight = parameter_of(replicated_vector(name, size))
        self.bias = parameter_of(replicated_vector(bias_of(name), size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if not self.zero_centred:
            return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.eps)
        weight = _one_more(self.weight)
        bias = None if self.bias is None else self.bias.to(weight.dtype)
        return F.layer_norm(x.to(weight.dtype), (x.shape[-1],), weight, bias, self.eps).to(x.dtype)


def _one_more(weight: Tensor) -> Tensor:
    """1 + weight in fp32 or wider: in bf16 a small weight would be lost beside the 1."""
    return 1.0 + weight.to(torch.promote_types(weight.dtype, torch.float32))


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
