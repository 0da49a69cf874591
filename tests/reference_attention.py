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


def distance_bias(w: dict[str, Tensor], config: ModelConfig, head: int, distance: int, *, bidirectional: bool) -> Tensor:
    """What a head's score gets for a key so many tokens before the query, or after it."""
    heads = config.num_attention_heads
    if config.position.type == "alibi":
        power = 2 ** math.floor(math.log2(heads))
        slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)] + [2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]
        return torch.tensor(-slopes[head] * abs(distance))
    buckets, reach = config.position.relative_attention_num_buckets, config.position.relative_attention_max_distance
    first = 0
    if bidirectional:
        buckets //= 2
        first = buckets if distance < 0 else 0
        distance = abs(distance)
    exact = buckets // 2
    bucket = max(distance, 0)
    if bucket >= exact:
        bucket = min(exact + int(math.log(bucket / exact) / math.log(reach / exact) * (buckets - exact)), buckets - 1)
    return w["position_bias.weight"][head, first + bucket]


def normalised(x: Tensor, gain: Tensor, config: ModelConfig) -> Tensor:
    """x [..., E]."""
    wide_x, eps = wide(x), config.rms_norm_eps
    if config.norm.zero_centred:
        gain = 1 + gain
    if config.attention.qk_norm == "layer_norm":
        eps = config.layer_norm_eps
        wide_x = wide_x - wide_x.mean(-1, keepdim=True)
    return (wide_x / (wide_x.square().mean(-1, keepdim=True) + eps).sqrt()).to(x.dtype) * gain


def attention(
    w: dict[str, Tensor],
    config: ModelConfig,
    h: Tensor,
    positions: Tensor,
    visible: Tensor,
    factor: Tensor | None,
    *,
    layer: int = 0,
    bidirectional: bool = False,
    memory: Tensor | None = None,
) -> Tensor:
    """h [S, D] -> [S, D]; w has the layer's tensors; visible bool [S, T]; factor: dropout's, [H, S, T]. With `memory` [T, D]
    cross-attention, which knows no positions."""
    how, size, name = config.attention, config.head_size, "attention" if memory is None else "cross_attention"
    keys = h if memory is None else memory
    length, num_keys = len(h), len(keys)

    def projected(x: Tensor, part: str) -> Tensor:
        out = x @ w[f"{name}.{part}.weight"].T
        return out + w[f"{name}.{part}.bias"] if f"{name}.{part}.bias" in w else out

    q, k, v = (projected(x, part).view(len(x), -1, size) for part, x in (("q", h), ("k", keys), ("v", keys)))
    if how.qk_norm != "none":
        q = normalised(q, w[f"{name}.q_norm.weight"], config)
        k = normalised(k, w[f"{name}.k_norm.weight"], config)
    if config.position.type == "rope" and memory is None:
        q, k = rotated(q, positions, config.rope), rotated(k, positions, config.rope)
    if how.sliding_window is not None and (how.global_every is None or (layer + 1) % how.global_every):
        places = torch.arange(length)
        visible = visible & (places[:, None] - places < how.sliding_window)
    heads = []
    for head in range(q.shape[1]):
        source = head // (q.shape[1] // k.shape[1])
        one_q, one_k = wide(q[:, head]), wide(k[:, source])
        scores = one_q @ one_k.T
        if how.scale == "sqrt":
            scores = scores / math.sqrt(size)
        elif how.scale in ("temperature", "head_temperature"):
            temperatures = w[f"{name}.log_temperature"].exp()
            scores = scores / math.sqrt(size) / temperatures[head if how.scale == "head_temperature" else 0]
        elif how.scale == "cosine":
            scores = scores / one_q.norm(dim=-1)[:, None] / one_k.norm(dim=-1) * w[f"{name}.cosine_gain"][head]
        elif how.scale != "init":
            scores = scores * how.scale
        if config.mup.base_head_dim is not None:
            scores = scores * math.sqrt(config.mup.base_head_dim / size)
        if how.logit_softcapping is not None:
            scores = how.logit_softcapping * torch.tanh(scores / how.logit_softcapping)
        if config.position.type in ("alibi", "t5") and memory is None:
            first = -length
            table = [distance_bias(w, config, head, distance, bidirectional=bidirectional) for distance in range(first, length)]
            scores = scores + torch.stack(table)[(positions[:, None] - positions) - first]
        scores = scores.masked_fill(~visible, float("-inf"))
        sink = [w[f"{name}.sinks"][head].expand(length, 1)] if how.sinks else []
        probabilities = torch.cat([scores, *sink], -1).softmax(-1)[:, :num_keys]
        if factor is not None:
            probabilities = probabilities * factor[head]
        heads.append((probabilities @ wide(v[:, source])).to(h.dtype))
    return projected(torch.cat(heads, -1), "o")
