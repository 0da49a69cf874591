"""What positions and attention add to a model's sizes, as pure functions of its config."""

from __future__ import annotations

from megatron_lite.model_config import ModelConfig


def num_attentions(config: ModelConfig) -> int:
    """Attentions of all layers, cross-attention counted by itself."""
    return config.num_hidden_layers * (2 if config.family == "seq2seq" else 1) + config.encoder_layers


def replicated_extras(config: ModelConfig) -> int:
    """Elements, beside the matrices, that every tp rank holds."""
    sides = 2 if config.family == "seq2seq" else 1
    learned = sides * config.max_position_embeddings * config.hidden_size if config.position.type == "learned" else 0
    o_bias = num_attentions(config) * config.hidden_size if config.attention.o_bias else 0
    return learned + o_bias + temperatures(config) + gains_of_heads(config)


def gains_of_heads(config: ModelConfig) -> int:
    """Of these, gains of the queries' and keys' norms: each tp rank uses them for its own heads, and their gradients are summed."""
    return num_attentions(config) * 2 * config.head_size if config.attention.qk_norm != "none" else 0


def temperatures(config: ModelConfig) -> int:
    """Single numbers, one for each attention's queries."""
    return num_attentions(config) if config.attention.scale == "temperature" else 0


def cut_extras(config: ModelConfig) -> int:
    """Elements, beside the matrices, that are cut over tp, by heads."""
    heads, buckets = config.num_attention_heads, config.position.relative_attention_num_buckets
    a_head = (config.attention.scale in ("head_temperature", "cosine")) + config.attention.sinks
    biases = (heads + 2 * config.kv_heads) * config.head_size if config.attention.qkv_bias else 0
    tables = (2 if config.family == "seq2seq" else 1) * heads * buckets if config.position.type == "t5" else 0
    return num_attentions(config) * (a_head * heads + biases) + tables


def keys_seen(config: ModelConfig, sequence_length: int) -> int:
    """Keys that a query of a whole row is multiplied with, summed over the layers: all S, or those of a window."""
    windows = (config.attention.window_of(layer) for layer in range(config.num_hidden_layers))
    return sum(sequence_length if window is None else min(window, sequence_length) for window in windows)
