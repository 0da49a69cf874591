"""Rotary positions (Su et al. 2021), pairs (i, i + E/2) as Hugging Face's Llama has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_lite.config import RopeConfig
from megatron_lite.layers.row_blocks import row_blocks


@dataclass(frozen=True)
class Rotation:
    """cos and sin of every position's angles, fp32 [B, S, 1, E/2]; made once a forward."""

    cos: Tensor
    sin: Tensor


def rotation(positions: Tensor, head_size: int, config: RopeConfig) -> Rotation:
    """Angles p * theta^(-2i/E) in fp32 for positions [B, S], whatever the model's dtype."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32, device=positions.device) / head_size
    angles = positions.float()[:, :, None, None] * (1.0 / config.theta**exponents)
    return Rotation(angles.cos(), angles.sin())


class _Rotate(torch.autograd.Function):
    """A rotation's backward is the rotation by the opposite angle: nothing of x needs to be kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _rotated(gradient, cos, -sin), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pair (a, b) -> (a cos - b sin, b cos + a sin); fp32 by promotion, rounded once to x's dtype."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        halves = x.unflatten(-1, (2, -1))
        turned = halves * cos.unsqueeze(-2)
        turned += halves.flip(-2) * torch.stack([-sin, sin], dim=-2)
        return turned.flatten(-2).to(x.dtype)
    # The same token by token in blocks: four passes that find them in the cache.
    out, half = x.new_empty(x.shape), x.shape[-1] // 2
    tokens, turned_tokens, cosines, sines = (each.flatten(0, 1) for each in (x, out, cos, sin))
    for block in row_blocks(tokens):
        wide = tokens[block].to(torch.promote_types(x.dtype, torch.float32))
        turned = (wide.unflatten(-1, (2, -1)) * cosines[block].unsqueeze(-2)).flatten(-2)
        turned[..., :half].addcmul_(wide[..., half:], sines[block], value=-1)
        turned[..., half:].addcmul_(wide[..., :half], sines[block])
        turned_tokens[block] = turned
    return out


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """x [B, S, heads, E] turned by its position's angles."""
    return _Rotate.apply(x, by.cos, by.sin)
