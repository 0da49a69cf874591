"""What becomes of queries and keys before their product, and of their scores: norms, scale, sinks. Heads are cut over tp."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lite.layers.kernels import PLAIN, Scoring
from megatron_lite.layers.linear import cut_vectors, parameter_of
from megatron_lite.layers.norms import LayerNorm, RMSNorm
from megatron_lite.model_config import ModelConfig
from megatron_lite.parallel.groups import ProcessGroups
from megatron_lite.parallel.shard_spec import Piece, ShardSpec


def head_norm(config: ModelConfig, *, name: str) -> RMSNorm | LayerNorm:
    """The norm of each head [..., E] that attention.qk_norm names; zero_centred as the others, a LayerNorm without a bias."""
    size, zero_centred = config.head_size, config.norm.zero_centred
    if config.attention.qk_norm == "rms_norm":
        norm: RMSNorm | LayerNorm = RMSNorm(size, name=name, eps=config.rms_norm_eps, zero_centred=zero_centred)
    else:
        norm = LayerNorm(size, name=name, eps=config.layer_norm_eps, bias=False, zero_centred=zero_centred)
    norm.weight = _gain_of_heads(size, name)
    return norm


def _gain_of_heads(size: int, name: str) -> nn.Parameter:
    """[E], one for all heads, of which a rank has some: its gradient is a part."""
    return parameter_of(ShardSpec((Piece(name, (size,), (0,), (size,)),), (size,), cut=False, gradient="partial"))


class LearnedScale(nn.Module):
    """queries [B, S, H/tp, E] times exp(-log_temperature), one number or one a head; or times cosine_gain * sqrt(E), one a head."""

    def __init__(self, config: ModelConfig, groups: ProcessGroups, *, name: str) -> None:
        super().__init__()
        self.root = math.sqrt(config.head_size) if config.attention.scale == "cosine" else None
        name = f"{name}.log_temperature" if self.root is None else f"{name}.cosine_gain"
        if config.attention.scale == "temperature":
            spec = ShardSpec((Piece(name, (1,), (0,), (1,)),), (1,), cut=False, gradient="partial")
        else:
            spec = cut_vectors({name: config.num_attention_heads}, groups.tp)
        self.weight = parameter_of(spec)

    def forward(self, queries: Tensor) -> Tensor:
        factor = (-self.weight.float()).exp() if self.root is None else self.weight.float() * self.root
        return (queries * factor[:, None]).to(queries.dtype)


class QueryKey(nn.Module):
    """Queries [B, S, H/tp, E] and keys [B, S, K/tp, E] such that their product over sqrt(E) is the score.

    Both are normalised here; a scale is put on the queries. Rotations keep what is done here: scale before or after, it is the same.
    """

    def __init__(self, config: ModelConfig, groups: ProcessGroups, *, name: str) -> None:
        super().__init__()
        scale, root = config.attention.scale, math.sqrt(config.head_size)
        self.q_norm: RMSNorm | LayerNorm | None = None
        self.k_norm: RMSNorm | LayerNorm | None = None
        if config.attention.qk_norm != "none":
            self.q_norm, self.k_norm = (head_norm(config, name=f"{name}.{which}_norm.weight") for which in ("q", "k"))
        learned = scale in ("temperature", "head_temperature", "cosine")
        self.scale = LearnedScale(config, groups, name=name) if learned else None
        self.unit = scale == "cosine"
        self.times = root if scale == "init" else mup_factor(config) if isinstance(scale, str) else scale * root

    def of_queries(self, queries: Tensor) -> Tensor:
        if self.q_norm is not None:
            queries = self.q_norm(queries)
        if self.unit:
            queries = F.normalize(queries.float(), dim=-1).to(queries.dtype)
        if self.scale is not None:
            queries = self.scale(queries)
        return queries if self.times == 1.0 else queries * self.times

    def of_keys(self, keys: Tensor) -> Tensor:
        if self.k_norm is not None:
            keys = self.k_norm(keys)
        return F.normalize(keys.float(), dim=-1).to(keys.dtype) if self.unit else keys


class Sinks(nn.Module):
    """A learned score for each of this rank's heads, [H/tp]."""

    def __init__(self, config: ModelConfig, groups: ProcessGroups, *, name: str) -> None:
        super().__init__()
        self.weight = parameter_of(cut_vectors({f"{name}.sinks": config.num_attention_heads}, groups.tp))

    def forward(self) -> Tensor:
        return self.weight.clone()  # an engine may gather the weight for this call only


def scoring_of(softcap: float | None, sinks: Sinks | None) -> Scoring:
    return PLAIN if softcap is None and sinks is None else Scoring(softcap, None if sinks is None else sinks())


def query_key(config: ModelConfig, groups: ProcessGroups, *, name: str) -> QueryKey | None:
    """None where the scores are q k^T / sqrt(E) of queries and keys as they are."""
    plain = config.attention.scale == "sqrt" and config.attention.qk_norm == "none" and mup_factor(config) == 1.0
    return None if plain else QueryKey(config, groups, name=name)


def mup_factor(config: ModelConfig) -> float:
    """What muP puts beside 1 / sqrt(E): with it scores go with 1 / E, and are as usual at base_head_dim."""
    return math.sqrt(config.mup.base_head_dim / config.head_size) if config.mup.base_head_dim is not None else 1.0


def initial_factor(name: str, config: ModelConfig) -> float:
    """What initial weights of this name are multiplied with beside everything else: scale `init` makes q and k smaller, each by
    E^(1/4), so that q k^T has what the division by sqrt(E) would have given it."""
    if config.attention.scale == "init" and name.endswith(("attention.q.weight", "attention.k.weight")):
        return config.head_size**-0.25
    return 1.0
