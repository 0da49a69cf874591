"""Absolute positions, added to the embeddings: sines and cosines of Vaswani et al. (2017), or a learned table."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data_pipeline.errors import ConfigError, Fault
from megatron_lite.layers.linear import parameter_of
from megatron_lite.model_config import ModelConfig
from megatron_lite.parallel.shard_spec import Piece, ShardSpec


class LearnedPositions(nn.Module):
    """positions [B, S] -> [B, S, D], rows of a [L, D] table that every tp rank holds; a rank may have its part of S."""

    def __init__(self, length: int, hidden_size: int, *, name: str) -> None:
        super().__init__()
        self.length, shape = length, (length, hidden_size)
        self.weight = parameter_of(ShardSpec((Piece(name, shape, (0, 0), shape),), shape, cut=False, gradient="partial_under_sp"))

    def forward(self, positions: Tensor) -> Tensor:
        return F.embedding(positions.clamp(min=0), self.weight)  # padding, which nothing sees, is at negative positions

    def require(self, length: int) -> None:
        """Raises ConfigError where a text of `length` tokens has positions without a row."""
        if length > self.length:
            fix = "shorten it; rope, alibi, t5 and sinusoidal positions go further, learned ones don't"
            want = f"at most model.max_position_embeddings ({self.length}) with position.type: learned"
            raise ConfigError([Fault("sequence length", f"{length} tokens", want, fix)])


class SinusoidalPositions(nn.Module):
    """positions [B, S] -> fp32 [B, S, D]: sin(p * w_i) in the first half of the channels, cos(p * w_i) in the second, with
    w_i = 10000^(-2i/D). The paper has the same channels in turns."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size

    def forward(self, positions: Tensor) -> Tensor:
        pairs = torch.arange(self.hidden_size // 2, dtype=torch.float64, device=positions.device)
        angles = positions.float()[..., None] * (pairs * (-2 * math.log(10000.0) / self.hidden_size)).exp().float()
        return torch.cat([angles.sin(), angles.cos()], dim=-1)


PositionEmbedding = LearnedPositions | SinusoidalPositions


def position_embedding(config: ModelConfig, *, name: str) -> PositionEmbedding | None:
    """What is added to the embeddings under this config, its table of this name; None for positions that enter elsewhere."""
    if config.position.type == "learned":
        return LearnedPositions(config.max_position_embeddings, config.hidden_size, name=name)
    return SinusoidalPositions(config.hidden_size) if config.position.type == "sinusoidal" else None
