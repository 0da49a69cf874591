"""Marian (Junczys-Dowmunt et al. 2018) as `transformers` has it: the encoder-decoder of Vaswani et al. (2017), with biases everywhere."""

from __future__ import annotations

from megatron_lite.checkpoint.huggingface.families import Family, Fixed, Key
from megatron_lite.checkpoint.huggingface.llama import ACTIVATIONS, NOT_QUANTIZED
from megatron_lite.checkpoint.huggingface.tensors import Tensor, with_bias


def _stack(ours: str, theirs: str, branches: tuple[tuple[str, str], ...]) -> tuple[Tensor, ...]:
    """An encoder's or decoder's tensors; each of its attentions is (our name, theirs)."""
    layer, block = f"{ours}layers.{{layer}}", f"model.{theirs}.layers.{{layer}}"
    rows: list[Tensor] = []
    for branch, their_branch in branches:
        for each, their_name, shape in (("q", "q_proj", "QD"), ("k", "k_proj", "QD"), ("v", "v_proj", "QD"), ("o", "out_proj", "DQ")):
            rows += with_bias(f"{layer}.{branch}.{each}", f"{block}.{their_branch}.{their_name}", shape)
        rows += with_bias(f"{layer}.{branch}_norm", f"{block}.{their_branch}_layer_norm", "D")
    rows += with_bias(f"{layer}.mlp.up", f"{block}.fc1", "FD")
    rows += with_bias(f"{layer}.mlp.down", f"{block}.fc2", "DF")
    return (*rows, *with_bias(f"{layer}.mlp_norm", f"{block}.final_layer_norm", "D"))


MARIAN = Family(
    architecture="MarianMTModel",
    model_type="marian",
    keys=(
        Key("vocab_size", ("vocab_size", "decoder_vocab_size")),
        Key("hidden_size", ("d_model",)),
        Key("intermediate_size", ("encoder_ffn_dim", "decoder_ffn_dim")),
        Key("num_attention_heads", ("encoder_attention_heads", "decoder_attention_heads")),
        Key("encoder.num_hidden_layers", ("encoder_layers",)),
        Key("num_hidden_layers", ("decoder_layers",)),
        Key("max_position_embeddings", ("max_position_embeddings",), default=1024, computes=False),
        Key("mlp.activation", ("activation_function",), default="gelu", words=ACTIVATIONS),
        Key("embedding_multiplier", ("scale_embedding",), default=False, words={1.0: (False,), "sqrt_hidden_size": (True,)}),
        Key("hidden_dropout", ("dropout",), default=0.1, computes=False),
        Key("attention_dropout", ("attention_dropout",), default=0.0, computes=False),
        Key("init.std", ("init_std",), default=0.02, computes=False),
    ),
    demands={
        "family": "seq2seq",
        "position.type": "sinusoidal",
        "norm.type": "layer_norm",
        "norm.placement": "post",
        "norm.bias": True,
        "layer_norm_eps": 1e-5,
        "mlp.gated": False,
        "mlp.bias": True,
        "attention.qkv_bias": True,
        "attention.o_bias": True,
        "encoder.share_embedding": True,
        "tie_word_embeddings": True,
    },
    written={
        "is_encoder_decoder": True,
        "share_encoder_decoder_embeddings": True,
        "tie_word_embeddings": True,
        "activation_dropout": 0.0,
        "forced_eos_token_id": None,
        "use_cache": True,
    },
    fixed=(Fixed("share_encoder_decoder_embeddings", (True,)), Fixed("tie_word_embeddings", (True,)), NOT_QUANTIZED),
    training_only=("init.",),
    unread=("rms_norm_eps",),
    tensors=(
        Tensor("embedding.weight", "model.shared.weight", "VD"),
        *_stack("encoder.", "encoder", (("attention", "self_attn"),)),
        *_stack("", "decoder", (("attention", "self_attn"), ("cross_attention", "encoder_attn"))),
    ),
    ignored=r"model\.(en|de)coder\.embed_positions\.weight",
    copies=r"lm_head\.weight|model\.(en|de)coder\.embed_tokens\.weight",
    zeros=r"final_logits_bias",
)
