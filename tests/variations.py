"""Variations of the model that stand beside the default in tests of equality, cut over tp and not. See tests/reference.py."""

from __future__ import annotations

from typing import Any

from megatron_lite.model_config import ModelConfig
from tests.tiny_model import TINY

_BASE: dict[str, Any] = {**TINY, "vocab_size": 61, "init": {"std": 0.2}}  # scores that differ, so that what is done with them shows
SCALED = {"factor": 4.0, "original_max_position_embeddings": 8}
# Layers as they are put together beside attention.
GPT2 = {"norm": {"type": "layer_norm", "bias": True}, "mlp": {"activation": "gelu_pytorch_tanh", "gated": False, "bias": True}}
VASWANI = {"norm": {"type": "layer_norm", "placement": "post", "bias": True}, "mlp": {"activation": "relu", "gated": False, "bias": True}}
GEMMA2 = {"norm": {"placement": "sandwich", "zero_centred": True}, "mlp": {"activation": "gelu_pytorch_tanh"}}
NEOX = {**GPT2, "residual": {"parallel": "two_norms"}, "mlp": {"activation": "gelu", "gated": False, "bias": True}}
GPTJ = {"norm": {"type": "layer_norm", "bias": True}, "residual": {"parallel": "one_norm"}, "mlp": {"activation": "relu2"}}
VARIATIONS: dict[str, dict[str, Any]] = {
    "gpt2 layers": GPT2,
    "2017 layers": VASWANI,
    "gemma2 layers": GEMMA2,
    "neox layers": NEOX,
    "gptj layers": GPTJ,
    "logits scaled and capped": {
        "embedding_multiplier": "sqrt_hidden_size",
        "logit_scale": 4.0,
        "final_logit_softcapping": 5.0,
        "tie_word_embeddings": True,
    },
    "small steps": {"residual": {"step_size": "inverse_sqrt_layers"}},
    "none": {"position": {"type": "none"}},
    "sinusoidal": {"position": {"type": "sinusoidal"}},
    "learned": {"position": {"type": "learned"}},
    "linear": {"rope": {"scaling": {"type": "linear", "factor": 2.0}}},
    "ntk": {"rope": {"scaling": {"type": "ntk", "factor": 4.0}}},
    "yarn": {"rope": {"theta": 100.0, "scaling": {"type": "yarn", **SCALED}}},
    "alibi": {"position": {"type": "alibi"}},
    "t5": {
        "position": {"type": "t5", "relative_attention_num_buckets": 8, "relative_attention_max_distance": 9},
        "attention": {"scale": 1.0},
    },
    "temperature, layernorm, qkv bias": {"attention": {"scale": "temperature", "qk_norm": "layer_norm", "qkv_bias": True}},
    "head_temperature, o bias, zero-centred rms_norm, mup": {
        "attention": {"scale": "head_temperature", "qk_norm": "rms_norm", "o_bias": True},
        "norm": {"zero_centred": True},
        "mup": {"base_hidden_size": 16, "base_head_dim": 4},
    },
    "cosine, window": {"attention": {"scale": "cosine", "sliding_window": 3, "qkv_bias": True, "o_bias": True}},
    "init, no positions": {"position": {"type": "none"}, "attention": {"scale": "init"}},
    "softcap, local and global": {"attention": {"logit_softcapping": 2.0, "sliding_window": 4, "global_every": 2}},
    "sinks, alibi, window": {"position": {"type": "alibi"}, "attention": {"sinks": True, "sliding_window": 4}},
    "everything, t5": {
        "position": {"type": "t5", "relative_attention_num_buckets": 4, "relative_attention_max_distance": 5},
        "attention": {"scale": "cosine", "logit_softcapping": 3.0, "sliding_window": 6, "global_every": 2, "sinks": True},
    },
    "llama3": {"rope": {"partial_rotary_factor": 0.5, "scaling": {"type": "llama3", **SCALED}}},
}
# Those that are proved in tests/proofs alone.
MORE: dict[str, dict[str, Any]] = {
    "layer_norm without bias, zero-centred": {"norm": {"type": "layer_norm", "zero_centred": True}},
    "sandwich of layer_norm": {"norm": {"type": "layer_norm", "bias": True, "placement": "sandwich"}},
    "post rms_norm, biases": {"norm": {"placement": "post"}, "mlp": {"bias": True}},
    "parallel, one norm, sandwich": {"norm": {"placement": "sandwich"}, "residual": {"parallel": "one_norm"}},
    "one learned step a layer": {"residual": {"step_size": 0.5, "learned_step_size": "layer"}},
    "learned steps a branch": {"residual": {"step_size": "inverse_sqrt_layers", "learned_step_size": "branch"}},
    **{f"{name}, gated": {"mlp": {"activation": name}} for name in ("gelu", "gelu_pytorch_tanh", "relu")},
    **{f"{name}, no gate": {"mlp": {"activation": name, "gated": False, "bias": True}} for name in ("silu", "gelu", "relu2")},
    "small init": {"init": {"scheme": "small"}},
    "xavier, embeddings times the root of the width": {
        "init": {"scheme": "xavier_uniform", "scaled_residual": False},
        "embedding_multiplier": "sqrt_hidden_size",
    },
    "zero residual": {"init": {"zero_residual": True}},
    "mup": {"mup": {"base_hidden_size": 16}},
    "label smoothing, z-loss": {"vocab_size": 90},
}


def config_of(name: str, **changes: Any) -> ModelConfig:
    return ModelConfig.model_validate({**_BASE, **VARIATIONS[name], **changes})
