"""What positions and attention add to a model's sizes, as pure functions of its config."""

from __future__ import annotations

from megatron_lite.model_config import ModelConfig


def replicated_extras(config: ModelConfig) -> int:
    """Elements, beside the matrices, that every tp rank holds."""
    sides = 2 if config.family == "seq2seq" else 1
    return sides * config.max_position_embeddings * config.hidden_size if config.position.type == "learned" else 0
