"""Llama (Touvron et al. 2023) as `transformers` has it: the decoder of ours, tensor by tensor.

Rotary pairs are (i, i + E/2) on both sides and matrices are [out, in], so no tensor is changed on the way.
"""

from __future__ import annotations

from data_pipeline.errors import Fault
from megatron_lite.checkpoint.huggingface.families import Family, Fixed, Key, Tensor
from megatron_lite.model_config import ModelConfig

_THEIRS = "model.layers.{layer}"


def _limits(config: ModelConfig) -> list[Fault]:
    heads, size = config.num_attention_heads, config.hidden_size
    if size % heads:
        return [
            Fault(
                "model.num_attention_heads", heads, f"a divisor of hidden_size ({size})", "LlamaConfig refuses others, whatever head_dim is"
            )
        ]
    return []


LLAMA = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    keys=(
        Key("vocab_size", ("vocab_size",)),
        Key("hidden_size", ("hidden_size",)),
        Key("intermediate_size", ("intermediate_size",)),
        Key("num_hidden_layers", ("num_hidden_layers",)),
        Key("num_attention_heads", ("num_attention_heads",)),
        Key("num_key_value_heads", ("num_key_value_heads",), default=None),
        Key("head_dim", ("head_dim",), default=None),
        Key("max_position_embeddings", ("max_position_embeddings",), default=2048, computes=False),
        Key("tie_word_embeddings", ("tie_word_embeddings",), default=False),
        Key("rms_norm_eps", ("rms_norm_eps",), default=1e-6),
        Key("rope.theta", ("rope_theta", "rope_parameters.rope_theta"), default=10000.0),  # transformers 4, transformers 5
        Key("attention_dropout", ("attention_dropout",), default=0.0, computes=False),
        Key("init.std", ("initializer_range",), default=0.02, computes=False),
    ),
    written={
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default"},
        "use_cache": True,
    },
    fixed=(
        Fixed("hidden_act", ("silu", "swish")),
        Fixed("attention_bias", (False,)),
        Fixed("mlp_bias", (False,)),
        Fixed("rope_scaling.rope_type", ("default",)),
        Fixed("rope_scaling.type", ("default",)),
        Fixed("rope_parameters.rope_type", ("default",)),
        Fixed("partial_rotary_factor", (None, 1.0)),
        Fixed("rope_parameters.partial_rotary_factor", (None, 1.0)),
        Fixed("quantization_config", (None,)),
    ),
    training_only=("hidden_dropout", "init.scheme", "init.embedding_std", "init.scaled_residual", "init.zero_residual"),
    tensors=(
        Tensor("embedding.weight", "model.embed_tokens.weight", "VD"),
        Tensor("layers.{layer}.attention_norm.weight", f"{_THEIRS}.input_layernorm.weight", "D"),
        Tensor("layers.{layer}.attention.q.weight", f"{_THEIRS}.self_attn.q_proj.weight", "QD"),
        Tensor("layers.{layer}.attention.k.weight", f"{_THEIRS}.self_attn.k_proj.weight", "KD"),
        Tensor("layers.{layer}.attention.v.weight", f"{_THEIRS}.self_attn.v_proj.weight", "KD"),
        Tensor("layers.{layer}.attention.o.weight", f"{_THEIRS}.self_attn.o_proj.weight", "DQ"),
        Tensor("layers.{layer}.mlp_norm.weight", f"{_THEIRS}.post_attention_layernorm.weight", "D"),
        Tensor("layers.{layer}.mlp.gate.weight", f"{_THEIRS}.mlp.gate_proj.weight", "FD"),
        Tensor("layers.{layer}.mlp.up.weight", f"{_THEIRS}.mlp.up_proj.weight", "FD"),
        Tensor("layers.{layer}.mlp.down.weight", f"{_THEIRS}.mlp.down_proj.weight", "DF"),
        Tensor("final_norm.weight", "model.norm.weight", "D"),
        Tensor("lm_head.weight", "lm_head.weight", "VD", untied=True),
    ),
    ignored=r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
    limits=_limits,
)

FAMILIES = (LLAMA,)  # a new one stands here and nowhere else
