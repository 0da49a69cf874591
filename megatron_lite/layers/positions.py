"""Rotary positions (Su et al. 2021), pairs (i, i + R/2) of the R channels that are rotated, as Hugging Face's Llama has them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_lite.attention_config import RopeConfig, RopeScalingConfig
from megatron_lite.layers.row_blocks import FEW, row_blocks


@dataclass(frozen=True)
class Rotation:
    """cos and sin of every position's angles, fp32 [B, S, 1, R/2]; made once a forward."""

    cos: Tensor
    sin: Tensor


def rotation(positions: Tensor, head_size: int, config: RopeConfig) -> Rotation:
    """Angles p * frequency in fp32 for positions [B, S], whatever the model's dtype; yarn's are longer than 1."""
    angles = positions.float()[:, :, None, None] * frequencies(head_size, config, positions.device)
    cos, sin = angles.cos(), angles.sin()
    longer = attention_factor(config.scaling)
    return Rotation(cos, sin) if longer == 1.0 else Rotation(cos * longer, sin * longer)


def frequencies(head_size: int, config: RopeConfig, device: torch.device | None = None) -> Tensor:
    """fp32 [R/2]: radians a token, theta^(-2i/R), made slower as `config.scaling` says."""
    scaling, size = config.scaling, config.rotated_size(head_size)
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
    if scaling.type == "ntk":  # the slowest pair becomes `factor` times slower, the fastest stays
        return 1.0 / (config.theta * scaling.factor ** (size / (size - 2))) ** exponents
    plain = 1.0 / config.theta**exponents
    if scaling.type == "linear":
        return plain / scaling.factor
    if scaling.type == "yarn":
        return _blend(plain / scaling.factor, plain, _yarn_kept(size, config, device))
    if scaling.type == "llama3":
        return _blend(plain / scaling.factor, plain, _llama3_kept(plain, scaling))
    return plain


def attention_factor(scaling: RopeScalingConfig) -> float:
    """What queries and keys are multiplied with: yarn's 0.1 ln(factor) + 1, if not given (Peng et al. 2023, equation 22)."""
    if scaling.type != "yarn":
        return 1.0
    return scaling.attention_factor if scaling.attention_factor is not None else 0.1 * math.log(scaling.factor) + 1.0


def _blend(slow: Tensor, plain: Tensor, kept: Tensor) -> Tensor:
    return slow * (1 - kept) + plain * kept


def _yarn_kept(size: int, config: RopeConfig, device: torch.device | None) -> Tensor:
    """How much of each pair's frequency stays (Peng et al. 2023, section 3.2): all of those that turn more than beta_fast times in
    the old length, nothing of those that turn less than beta_slow times, along a line between. Pairs are counted in whole numbers,
    as the authors' code does."""
    scaling, old_length = config.scaling, config.scaling.original_max_position_embeddings
    assert old_length is not None

    def pair_that_turns(times: float) -> float:
        return size * math.log(old_length / (times * 2 * math.pi)) / (2 * math.log(config.theta))

    first = max(math.floor(pair_that_turns(scaling.beta_fast)), 0)
    last = min(math.ceil(pair_that_turns(scaling.beta_slow)), size - 1)
    pairs = torch.arange(size // 2, dtype=torch.float32, device=device)
    return 1 - ((pairs - first) / max(last - first, 0.001)).clamp(0, 1)


def _llama3_kept(plain: Tensor, scaling: RopeScalingConfig) -> Tensor:
    """The same for Llama 3.1: by wavelength, from the old length / low_freq_factor down to the old length / high_freq_factor."""
    assert scaling.original_max_position_embeddings is not None
    turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)
    return ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)


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
    if x.numel() <= FEW and not torch.is_grad_enabled():
        a, b = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
        return torch.cat([(a * cos).addcmul_(b, sin, value=-1), (b * cos).addcmul_(a, sin)], dim=-1).to(x.dtype)
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
    """x [B, S, heads, E], its first R channels turned by its position's angles."""
    size = 2 * by.cos.shape[-1]
    if size == x.shape[-1]:
        return _Rotate.apply(x, by.cos, by.sin) if torch.is_grad_enabled() else _rotated(x, by.cos, by.sin)
    turned, kept = x.split([size, x.shape[-1] - size], dim=-1)
    return torch.cat([_Rotate.apply(turned, by.cos, by.sin), kept], dim=-1)
