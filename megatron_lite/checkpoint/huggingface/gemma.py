"""Gemma 1 and 2 (Gemma Team 2024) as `transformers` has them: Llama's decoder with gains around 1 and embeddings that are scaled up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from data_pipeline.errors import ConfigError, Fault
from megatron_lite.checkpoint.huggingface.families import Fixed, Key, Together
from megatron_lite.checkpoint.huggingface.layer_types import in_turns, windows
from megatron_lite.checkpoint.huggingface.llama import ACTIVATIONS, ATTENTION_BIAS, LLAMA, decoder_keys, decoder_tensors, heads_divide_width
from megatron_lite.checkpoint.huggingface.rope_parameters import ROPE
from megatron_lite.model_config import ModelConfig

_NORM, _BRANCH = "attention.scale", "query_pre_attn_scalar"
_BOTH_WAYS = Fixed("use_bidirectional_attention", (None, False))
# Files of Gemma 1 as first published say gelu.
_TANH: Mapping[object, tuple[object, ...]] = {"gelu_pytorch_tanh": ("gelu_pytorch_tanh", "gelu_new", "gelu")}


def _keys(activation: tuple[str, ...], words: Mapping[object, tuple[object, ...]], *, kv_heads: int) -> tuple[Key, ...]:
    """Their activation under the names that versions gave it."""
    changed = {
        "head_dim": Key("head_dim", ("head_dim",), default=256),
        "mlp.activation": Key("mlp.activation", activation, default="gelu_pytorch_tanh", words=words),
    }
    return tuple(changed.get(key.ours, key) for key in decoder_keys(kv_heads=kv_heads, length=8192, tied=True))


def _write_scale(config: ModelConfig) -> dict[str, Any]:
    scale = config.attention.scale
    number = config.head_size if scale == "sqrt" else 0 if isinstance(scale, str) else round(scale**-2)
    if not number or (scale != "sqrt" and number**-0.5 != scale):
        raise ConfigError([Fault(f"model.{_NORM}", scale, "sqrt, or 1 / sqrt(n) of a whole n", f"{_BRANCH} is that n")])
    return {_BRANCH: number}


def _read_scale(tree: Mapping[str, Any], where: str) -> dict[str, object]:
    number = tree.get(_BRANCH, 256)
    if not isinstance(number, (int, float)) or number <= 0:
        raise ConfigError([Fault(f"{where}: {_BRANCH}", number, "a number above 0")])
    return {_NORM: "sqrt" if number == tree.get("head_dim", 256) else number**-0.5}


GEMMA = replace(
    LLAMA,
    architecture="GemmaForCausalLM",
    model_type="gemma",
    keys=_keys(("hidden_act", "hidden_activation"), _TANH, kv_heads=16),
    written={**LLAMA.written, "pad_token_id": None},  # theirs would take token 0 out of training
    demands={"norm.zero_centred": True, "embedding_multiplier": "sqrt_hidden_size"},
    fixed=(*LLAMA.fixed, _BOTH_WAYS),
    limits=lambda _: [],
)
GEMMA2 = replace(
    GEMMA,
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    keys=(
        *_keys(("hidden_activation",), ACTIVATIONS, kv_heads=4),
        Key("attention.logit_softcapping", ("attn_logit_softcapping",), default=50.0, nullable=True),
        Key("final_logit_softcapping", ("final_logit_softcapping",), default=30.0, nullable=True),
    ),
    demands={**GEMMA.demands, "norm.placement": "sandwich"},
    together=(ROPE, ATTENTION_BIAS, Together((_NORM,), _write_scale, _read_scale), windows(default=4096, silent=in_turns)),
    tensors=decoder_tensors(
        mlp_norm="pre_feedforward_layernorm",
        more=(
            ("attention_output_norm.weight", "post_attention_layernorm.weight", "D"),
            ("mlp_output_norm.weight", "post_feedforward_layernorm.weight", "D"),
        ),
    ),
    limits=heads_divide_width,
)
