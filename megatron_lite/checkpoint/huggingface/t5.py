"""T5 (Raffel et al. 2020) and T5 1.1 as `transformers` has them: an encoder-decoder with biases by distance, whose scores are not divided."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from data_pipeline.errors import ConfigError, Fault
from megatron_lite.checkpoint.huggingface.families import UNTIED, Family, Key, Together
from megatron_lite.checkpoint.huggingface.llama import NOT_QUANTIZED, TRAINING_ONLY
from megatron_lite.checkpoint.huggingface.tensors import Tensor
from megatron_lite.model_config import ModelConfig

_PROJECTIONS: dict[tuple[bool, str], tuple[str, ...]] = {  # theirs of (mlp.gated, mlp.activation); the first is written
    (True, "gelu_pytorch_tanh"): ("gated-gelu", "gated-gelu_new", "gated-gelu_pytorch_tanh"),
    (True, "silu"): ("gated-silu", "gated-swish"),
    (True, "relu"): ("gated-relu",),
    (True, "relu2"): ("gated-relu2",),
    (False, "relu"): ("relu",),
    (False, "gelu"): ("gelu",),
    (False, "gelu_pytorch_tanh"): ("gelu_new", "gelu_pytorch_tanh"),
    (False, "silu"): ("silu", "swish"),
    (False, "relu2"): ("relu2",),
}
_FEED_FORWARD, _SCALED = "feed_forward_proj", "scale_decoder_outputs"


def _write_mlp(config: ModelConfig) -> dict[str, Any]:
    words = _PROJECTIONS.get((config.mlp.gated, config.mlp.activation))
    if words is None:
        fix = f"their gated-gelu is the tanh's: {_FEED_FORWARD} has no word for the exact one"
        raise ConfigError([Fault("model.mlp.activation", config.mlp.activation, "another with mlp.gated", fix)])
    return {_FEED_FORWARD: words[0]}


def _read_mlp(tree: Mapping[str, Any], where: str) -> dict[str, object]:
    said = tree.get(_FEED_FORWARD, "relu")
    for (gated, activation), words in _PROJECTIONS.items():
        if said in words:
            return {"mlp.gated": gated, "mlp.activation": activation}
    known = " or ".join(repr(word) for words in _PROJECTIONS.values() for word in words)
    raise ConfigError([Fault(f"{where}: {_FEED_FORWARD}", said, known, "this program has no such layer")])


def _write_head(config: ModelConfig) -> dict[str, Any]:
    """Logits are divided by the root of the width or not at all; versions without that key go by whether the head is tied."""
    scaled = config.hidden_size**-0.5
    if config.logit_scale != 1.0 and abs(config.logit_scale - scaled) > 1e-9 * scaled:
        want = f"{scaled!r}, which is hidden_size^-0.5, or 1.0"
        raise ConfigError([Fault("model.logit_scale", config.logit_scale, want, "T5 has nothing else")])
    return {"tie_word_embeddings": config.tie_word_embeddings, _SCALED: config.logit_scale != 1.0}


def _read_head(tree: Mapping[str, Any], where: str) -> dict[str, object]:
    tied = tree.get("tie_word_embeddings") is not False
    scaled = tree.get(_SCALED, tied)
    return {"tie_word_embeddings": tied, "logit_scale": int(tree.get("d_model") or 1) ** -0.5 if scaled else 1.0}


def _stack(ours: str, theirs: str, branches: tuple[tuple[str, str], ...]) -> tuple[Tensor, ...]:
    """An encoder's or decoder's tensors; each branch is (our name, theirs)."""
    layer, block = f"{ours}layers.{{layer}}", f"{theirs}.block.{{layer}}.layer"
    rows = []
    for number, (branch, their_branch) in enumerate(branches):
        rows.append(Tensor(f"{layer}.{branch}_norm.weight", f"{block}.{number}.layer_norm.weight", "D"))
        within = f"{block}.{number}.{their_branch}"
        if branch == "mlp":
            rows.append(Tensor(f"{layer}.mlp.gate.weight", f"{within}.wi_0.weight", "FD", when=("mlp.gated", True)))
            rows.append(Tensor(f"{layer}.mlp.up.weight", f"{within}.wi_1.weight", "FD", when=("mlp.gated", True)))
            rows.append(Tensor(f"{layer}.mlp.up.weight", f"{within}.wi.weight", "FD", when=("mlp.gated", False)))
            rows.append(Tensor(f"{layer}.mlp.down.weight", f"{within}.wo.weight", "DF"))
        else:
            rows += [
                Tensor(f"{layer}.{branch}.{each}.weight", f"{within}.{each}.weight", shape)
                for each, shape in (("q", "QD"), ("k", "QD"), ("v", "QD"), ("o", "DQ"))
            ]
    bias = f"{theirs}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    return (
        Tensor(f"{ours}position_bias.weight", bias, "HB", transposed=True),
        *rows,
        Tensor(f"{ours}final_norm.weight", f"{theirs}.final_layer_norm.weight", "D"),
    )


_ATTENTION, _MLP = ("attention", "SelfAttention"), ("mlp", "DenseReluDense")
T5 = Family(
    architecture="T5ForConditionalGeneration",
    model_type="t5",
    keys=(
        Key("vocab_size", ("vocab_size",)),
        Key("hidden_size", ("d_model",)),
        Key("head_dim", ("d_kv",), default=64),
        Key("intermediate_size", ("d_ff",)),
        Key("num_attention_heads", ("num_heads",)),
        Key("encoder.num_hidden_layers", ("num_layers",)),
        Key("num_hidden_layers", ("num_decoder_layers",), default=lambda tree: tree.get("num_layers")),
        Key("position.relative_attention_num_buckets", ("relative_attention_num_buckets",), default=32),
        Key("position.relative_attention_max_distance", ("relative_attention_max_distance",), default=128),
        Key("rms_norm_eps", ("layer_norm_epsilon",), default=1e-6),
        Key("max_position_embeddings", ("n_positions",), default=512, computes=False),
        Key("hidden_dropout", ("dropout_rate",), default=0.1, computes=False),
    ),
    demands={"family": "seq2seq", "position.type": "t5", "attention.scale": 1.0, "encoder.share_embedding": True},
    together=(
        Together(("mlp.gated", "mlp.activation"), _write_mlp, _read_mlp),
        Together(("tie_word_embeddings", "logit_scale"), _write_head, _read_head),
    ),
    written={"is_encoder_decoder": True, "use_cache": True},
    fixed=(NOT_QUANTIZED,),
    training_only=(*TRAINING_ONLY, "attention_dropout"),
    unread=("layer_norm_eps",),
    tensors=(
        Tensor("embedding.weight", "shared.weight", "VD"),
        *_stack("encoder.", "encoder", (_ATTENTION, _MLP)),
        *_stack("", "decoder", (_ATTENTION, ("cross_attention", "EncDecAttention"), _MLP)),
        Tensor("lm_head.weight", "lm_head.weight", "VD", when=UNTIED),
    ),
    head_as_stored=True,
    copies=r"(en|de)coder\.embed_tokens\.weight",
    ignored=r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
)
