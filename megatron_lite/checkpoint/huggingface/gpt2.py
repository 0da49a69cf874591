"""GPT-2 (Radford et al. 2019) as `transformers` has it: matrices are [in, out] there, and q, k and v are one."""

from __future__ import annotations

from megatron_lite.checkpoint.huggingface.families import UNTIED, Family, Fixed, Key
from megatron_lite.checkpoint.huggingface.llama import ACTIVATIONS, NOT_QUANTIZED
from megatron_lite.checkpoint.huggingface.tensors import Tensor, with_bias

_OURS, _THEIRS = "layers.{layer}", "transformer.h.{layer}"
_FUSED = f"{_THEIRS}.attn.c_attn"
GPT2 = Family(
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    keys=(
        Key("vocab_size", ("vocab_size",)),
        Key("hidden_size", ("n_embd",)),
        Key("num_hidden_layers", ("n_layer",)),
        Key("num_attention_heads", ("n_head",)),
        Key("intermediate_size", ("n_inner",), default=lambda tree: 4 * tree.get("n_embd", 0)),
        Key("max_position_embeddings", ("n_positions",), default=1024),
        Key("tie_word_embeddings", ("tie_word_embeddings",), default=True),
        Key("layer_norm_eps", ("layer_norm_epsilon",), default=1e-5),
        Key(
            "mlp.activation",
            ("activation_function",),
            default="gelu_new",
            words={**ACTIVATIONS, "gelu_pytorch_tanh": ("gelu_new", "gelu_pytorch_tanh")},
        ),
        Key("hidden_dropout", ("resid_pdrop", "embd_pdrop"), default=0.1, computes=False),
        Key("attention_dropout", ("attn_pdrop",), default=0.1, computes=False),
        Key("init.std", ("initializer_range",), default=0.02, computes=False),
    ),
    demands={
        "position.type": "learned",
        "norm.type": "layer_norm",
        "norm.bias": True,
        "mlp.gated": False,
        "mlp.bias": True,
        "attention.qkv_bias": True,
        "attention.o_bias": True,
    },
    written={"use_cache": True},
    fixed=(
        Fixed("scale_attn_weights", (True,)),
        Fixed("scale_attn_by_inverse_layer_idx", (False,)),
        Fixed("add_cross_attention", (False,)),
        NOT_QUANTIZED,
    ),
    training_only=("init.",),
    unread=("rms_norm_eps",),
    tensors=(
        Tensor("embedding.weight", "transformer.wte.weight", "VD"),
        Tensor("position_embedding.weight", "transformer.wpe.weight", "PD"),
        *with_bias(f"{_OURS}.attention_norm", f"{_THEIRS}.ln_1", "D"),
        *(
            Tensor(f"{_OURS}.attention.{each}.weight", f"{_FUSED}.weight", f"{rows}D", transposed=True, fused="QKK", part=part)
            for part, (each, rows) in enumerate((("q", "Q"), ("k", "K"), ("v", "K")))
        ),
        *(
            Tensor(f"{_OURS}.attention.{each}.bias", f"{_FUSED}.bias", rows, fused="QKK", part=part)
            for part, (each, rows) in enumerate((("q", "Q"), ("k", "K"), ("v", "K")))
        ),
        *with_bias(f"{_OURS}.attention.o", f"{_THEIRS}.attn.c_proj", "DQ", transposed=True),
        *with_bias(f"{_OURS}.mlp_norm", f"{_THEIRS}.ln_2", "D"),
        *with_bias(f"{_OURS}.mlp.up", f"{_THEIRS}.mlp.c_fc", "FD", transposed=True),
        *with_bias(f"{_OURS}.mlp.down", f"{_THEIRS}.mlp.c_proj", "DF", transposed=True),
        *with_bias("final_norm", "transformer.ln_f", "D"),
        Tensor("lm_head.weight", "lm_head.weight", "VD", when=UNTIED),
    ),
    ignored=r"transformer\.h\.\d+\.attn\.(masked_)?bias",
    base="transformer.",
)
