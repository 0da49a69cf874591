"""Positions and attention in obvious maths: one row, one head at a time, every number from its formula. See tests/reference.py."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_lite.attention_config import RopeConfig
from megatron_lite.model_config import ModelConfig


def wide(x: Tensor, *, like: Tensor | None = None) -> Tensor:
    """In fp32, or in float64 where `like` (x itself) is."""
    return x.to(torch.promote_types((x if like is None else like).dtype, torch.float32))


def frequencies(rope: RopeConfig, head_size: int) -> list[float]:
    """Radians a token of each rotated pair, in Python's floats."""
    size = int(head_size * rope.partial_rotary_factor)
    scaling, theta = rope.scaling, rope.theta
    if scaling.type == "ntk":
        theta *= scaling.factor ** (size / (size - 2))
    plain = [theta ** (-2 * i / size) for i in range(size // 2)]
    if scaling.type == "linear":
        return [f / scaling.factor for f in plain]
    old = scaling.original_max_position_embeddings or 1
    if scaling.type == "llama3":
        found = []
        for f in plain:
            wavelength = 2 * math.pi / f
            if wavelength < old / scaling.high_freq_factor:
                found.append(f)
            elif wavelength > old / scaling.low_freq_factor:
                found.append(f / scaling.factor)
            else:
                smooth = (old / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
                found.append((1 - smooth) * f / scaling.factor + smooth * f)
        return found
    if scaling.type == "yarn":
        low, high = (size * math.log(old / (b * 2 * math.pi)) / (2 * math.log(theta)) for b in (scaling.beta_fast, scaling.beta_slow))
        low, high = max(math.floor(low), 0), min(math.ceil(high), size - 1)
        ramp = [min(max((i - low) / (high - low or 0.001), 0), 1) for i in range(size // 2)]
        return [f * (1 - r) + f / scaling.factor * r for f, r in zip(plain, ramp)]
    return plain


def rotated(x: Tensor, positions: Tensor, rope: RopeConfig) -> Tensor:
    """x [S, heads, E]; of the R first channels element i is the real and i + R/2 the imaginary part of pair i."""
    angular = torch.tensor(frequencies(rope, x.shape[-1]), dtype=torch.float64)
    half = len(angular)
    angles = wide(positions[:, None].double() * angular, like=x)[:, None, :]
    longer = 1.0
    if rope.scaling.type == "yarn":
        longer = rope.scaling.attention_factor or 0.1 * math.log(rope.scaling.factor) + 1
    turned = torch.complex(wide(x[..., :half]), wide(x[..., half : 2 * half])) * torch.polar(torch.full_like(angles, longer), angles)
    return torch.cat([turned.real.to(x.dtype), turned.imag.to(x.dtype), x[..., 2 * half :]], -1)


def position_embedding(weights: dict[str, Tensor], config: ModelConfig, positions: Tensor) -> Tensor:
    """What is added to the embeddings, [S, D] or a 0."""
    if config.position.type == "learned":
        return weights["position_embedding.weight"][positions]
    if config.position.type == "sinusoidal":
        size = config.hidden_size
        waves = [[float(p) / 10000 ** (2 * i / size) for i in range(size // 2)] for p in positions]
        table = [[math.sin(w) for w in row] + [math.cos(w) for w in row] for row in waves]
        return wide(torch.tensor(table, dtype=torch.float64), like=weights["embedding.weight"])
    return torch.zeros(())


def attention(w: dict[str, Tensor], config: ModelConfig, h: Tensor, positions: Tensor, visible: Tensor, factor: Tensor | None) -> Tensor:
    """h [S, D] -> [S, D]; w has the layer's tensors; visible bool [S, S]; factor: dropout's, [H, S, S]."""
    length = len(h)
    q, k, v = ((h @ w[f"attention.{name}.weight"].T).view(length, -1, config.head_size) for name in ("q", "k", "v"))
    if config.position.type == "rope":
        q, k = rotated(q, positions, config.rope), rotated(k, positions, config.rope)
    heads = []
    for head in range(q.shape[1]):
        source = head // (q.shape[1] // k.shape[1])
        scores = wide(q[:, head]) @ wide(k[:, source]).T / math.sqrt(config.head_size)
        probabilities = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        if factor is not None:
            probabilities = probabilities * factor[head]
        heads.append((probabilities @ wide(v[:, source])).to(h.dtype))
    return torch.cat(heads, -1) @ w["attention.o.weight"].T
