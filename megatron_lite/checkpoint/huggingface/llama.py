"""Llama (Touvron et al. 2023) and its kin Mistral and Qwen (Yang et al. 2025) as `transformers` has them: the decoder of ours,
tensor by tensor.

Rotary pairs are (i, i + E/2) on both sides and matrices are [out, in], so no tensor is changed on the way.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from data_pipeline.errors import ConfigError, Fault
from megatron_lite.checkpoint.huggingface.families import UNTIED, Family, Fixed, Key, Together
from megatron_lite.checkpoint.huggingface.layer_types import everywhere, from_a_layer_on, windows
from megatron_lite.checkpoint.huggingface.rope_parameters import ROPE, WHOLE_HEADS
from megatron_lite.checkpoint.huggingface.tensors import Tensor
from megatron_lite.model_config import ModelConfig

_OURS, _THEIRS = "layers.{layer}", "model.layers.{layer}"
ACTIVATIONS: Mapping[object, tuple[object, ...]] = {
    "silu": ("silu", "swish"),
    "gelu": ("gelu",),
    "gelu_pytorch_tanh": ("gelu_pytorch_tanh", "gelu_new"),
    "relu": ("relu",),
    "relu2": ("relu2",),
}
TRAINING_ONLY = ("hidden_dropout", "init.")
NOT_QUANTIZED = Fixed("quantization_config", (None,))


def heads_divide_width(config: ModelConfig) -> list[Fault]:
    """LlamaConfig and some others want that although head_dim may be anything."""
    heads, size = config.num_attention_heads, config.hidden_size
    if size % heads:
        fix = "their config refuses others, whatever head_dim is"
        return [Fault("model.num_attention_heads", heads, f"a divisor of hidden_size ({size})", fix)]
    return []


def _write_bias(config: ModelConfig) -> dict[str, Any]:
    attention = config.attention
    if attention.qkv_bias != attention.o_bias:
        want = f"{attention.qkv_bias} as model.attention.qkv_bias is"
        raise ConfigError([Fault("model.attention.o_bias", attention.o_bias, want, "attention_bias means all four projections")])
    return {"attention_bias": attention.qkv_bias}


def _read_bias(tree: Mapping[str, Any], where: str) -> dict[str, object]:
    return dict.fromkeys(("attention.qkv_bias", "attention.o_bias"), bool(tree.get("attention_bias", False)))


ATTENTION_BIAS = Together(("attention.qkv_bias", "attention.o_bias"), _write_bias, _read_bias)


def decoder_keys(*, kv_heads: int | None, length: int, tied: bool = False) -> tuple[Key, ...]:
    """What all of them have, with the defaults that differ; `kv_heads` null: as many as query heads."""
    return (
        Key("vocab_size", ("vocab_size",)),
        Key("hidden_size", ("hidden_size",)),
        Key("intermediate_size", ("intermediate_size",)),
        Key("num_hidden_layers", ("num_hidden_layers",)),
        Key("num_attention_heads", ("num_attention_heads",)),
        Key("num_key_value_heads", ("num_key_value_heads",), default=kv_heads, nullable=True),
        Key("head_dim", ("head_dim",), default=None),
        Key("max_position_embeddings", ("max_position_embeddings",), default=length, computes=False),
        Key("tie_word_embeddings", ("tie_word_embeddings",), default=tied),
        Key("rms_norm_eps", ("rms_norm_eps",), default=1e-6),
        Key("mlp.activation", ("hidden_act",), default="silu", words=ACTIVATIONS),
        Key("attention_dropout", ("attention_dropout",), default=0.0, computes=False),
        Key("init.std", ("initializer_range",), default=0.02, computes=False),
    )


def decoder_tensors(*, mlp_norm: str = "post_attention_layernorm", more: tuple[tuple[str, str, str], ...] = ()) -> tuple[Tensor, ...]:
    """Their decoders' tensors; `more` are a layer's own (our name, theirs, shape)."""

    def layer(ours: str, theirs: str, shape: str, when: tuple[str, object] | None = None) -> Tensor:
        return Tensor(f"{_OURS}.{ours}", f"{_THEIRS}.{theirs}", shape, when=when)

    projections = [("q", "QD"), ("k", "KD"), ("v", "KD"), ("o", "DQ")]
    attention = [layer(f"attention.{each}.weight", f"self_attn.{each}_proj.weight", shape) for each, shape in projections]
    attention += [
        layer(
            f"attention.{each}.bias",
            f"self_attn.{each}_proj.bias",
            shape[0],
            ("attention.o_bias" if each == "o" else "attention.qkv_bias", True),
        )
        for each, shape in projections
    ]
    matrices = [("gate", "FD"), ("up", "FD"), ("down", "DF")]
    mlp = [layer(f"mlp.{each}.weight", f"mlp.{each}_proj.weight", shape) for each, shape in matrices]
    mlp += [layer(f"mlp.{each}.bias", f"mlp.{each}_proj.bias", shape[0], ("mlp.bias", True)) for each, shape in matrices]
    return (
        Tensor("embedding.weight", "model.embed_tokens.weight", "VD"),
        layer("attention_norm.weight", "input_layernorm.weight", "D"),
        *attention,
        layer("mlp_norm.weight", f"{mlp_norm}.weight", "D"),
        *mlp,
        *(layer(*each) for each in more),
        Tensor("final_norm.weight", "model.norm.weight", "D"),
        Tensor("lm_head.weight", "lm_head.weight", "VD", when=UNTIED),
    )


_of_this_kind = partial(
    Family,
    written={"use_cache": True},
    fixed=(*WHOLE_HEADS, NOT_QUANTIZED),
    training_only=TRAINING_ONLY,
    unread=("layer_norm_eps",),
    ignored=r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
)
LLAMA = _of_this_kind(
    architecture="LlamaForCausalLM",
    model_type="llama",
    keys=(*decoder_keys(kv_heads=None, length=2048), Key("mlp.bias", ("mlp_bias",), default=False)),
    together=(ROPE, ATTENTION_BIAS),
    tensors=decoder_tensors(),
    limits=heads_divide_width,
)
MISTRAL = _of_this_kind(
    architecture="MistralForCausalLM",
    model_type="mistral",
    keys=decoder_keys(kv_heads=8, length=131072),
    together=(ROPE, windows(default=4096, silent=everywhere, listed=False)),
    tensors=decoder_tensors(),
)
QWEN2 = _of_this_kind(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    keys=decoder_keys(kv_heads=32, length=32768),
    demands={"attention.qkv_bias": True},
    together=(ROPE, windows(default=4096, silent=from_a_layer_on, switched=True)),
    tensors=decoder_tensors(),
)
QWEN3 = _of_this_kind(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    keys=tuple(
        Key("head_dim", ("head_dim",), default=128) if key.ours == "head_dim" else key for key in decoder_keys(kv_heads=32, length=32768)
    ),
    demands={"attention.qk_norm": "rms_norm"},
    together=(ROPE, ATTENTION_BIAS, windows(default=4096, silent=from_a_layer_on, switched=True)),
    tensors=decoder_tensors(
        more=(
            ("attention.q_norm.weight", "self_attn.q_norm.weight", "E"),
            ("attention.k_norm.weight", "self_attn.k_norm.weight", "E"),
        )
    ),
)
