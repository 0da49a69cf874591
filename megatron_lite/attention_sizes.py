"""What positions and attention add to a model's sizes, and which scores are written out, as pure functions of its config."""

from __future__ import annotations

from typing import Literal

from megatron_lite.model_config import ModelConfig

Bias = Literal["none", "fixed", "learned"]  # added to scores; learned: what comes back through it is asked for


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


def written_out(*, dropout: bool = False, changed: bool = False, bias: Bias = "none", on_cpu: bool = False, compiled: bool = False) -> bool:
    """Whether attention makes all scores, by its formula in fp32: no kernel drops single probabilities by their logical coordinates, or
    changes scores. SDPA takes a bias, but on GPUs in the queries' dtype only, and without a gradient for it."""
    return dropout or changed or bias == "learned" or (bias == "fixed" and (compiled or not on_cpu))


def why_written_out(config: ModelConfig, *, on_cpu: bool, dropout: bool = True) -> str:
    """Why the scores of this model are, in training or, without `dropout`, in evaluation; "" where they are not."""
    attention, kind = config.attention, config.position.type
    bias: Bias = "learned" if kind == "t5" else "fixed" if kind == "alibi" else "none"
    reasons = {
        "attention_dropout drops single probabilities, which no fused kernel does our way": written_out(
            dropout=dropout and config.attention_dropout > 0
        ),
        f"position.type: {kind} adds a bias to scores": written_out(bias=bias, on_cpu=on_cpu),
        "attention.logit_softcapping changes scores": written_out(changed=attention.logit_softcapping is not None),
        "attention.sinks take part in the softmax": written_out(changed=attention.sinks),
    }
    return ", ".join(reason for reason, holds in reasons.items() if holds)
