"""The small models that runs under any layout are compared on (tests/parity.py)."""

from __future__ import annotations

from megatron_lite.attention_config import AttentionConfig, PositionConfig
from megatron_lite.block_config import MLPConfig, NormConfig, ResidualConfig
from megatron_lite.config import LossConfig
from megatron_lite.init_config import InitConfig, MupConfig
from megatron_lite.model_config import EncoderConfig, ModelConfig
from tests.variations import MORE, VARIATIONS

LENGTH = 32  # targets a sequence
_BASE = ModelConfig(
    vocab_size=97,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=96,
    max_position_embeddings=LENGTH,
)
MODELS = {
    "gqa": _BASE,  # 2 KV heads: shared by 2 ranks each at tp 4; 97 is divided by no tp
    "mqa": _BASE.model_copy(update={"num_key_value_heads": 1, "vocab_size": 90, "tie_word_embeddings": True}),
    "2017": _BASE.model_copy(
        update={
            "norm": NormConfig(type="layer_norm", placement="post", bias=True),
            "mlp": MLPConfig(activation="relu", gated=False, bias=True),
            "residual": ResidualConfig(step_size="inverse_sqrt_layers", learned_step_size="branch"),
            "init": InitConfig(embedding_std=0.1),
            "embedding_multiplier": 8.0,  # the root of the width
            "final_logit_softcapping": 20.0,
            "mup": MupConfig(base_hidden_size=32),
        }
    ),
    "scores": _BASE.model_copy(
        update={
            "position": PositionConfig(type="t5", relative_attention_num_buckets=8, relative_attention_max_distance=16),
            "attention": AttentionConfig(
                scale="temperature",
                qk_norm="rms_norm",
                logit_softcapping=10.0,
                sliding_window=12,
                global_every=2,
                sinks=True,
                qkv_bias=True,
                o_bias=True,
            ),
        }
    ),
    "gpt2": _BASE.model_copy(
        update={
            "num_key_value_heads": None,
            "position": PositionConfig(type="learned"),
            "norm": NormConfig(type="layer_norm", bias=True),
            "mlp": MLPConfig(activation="gelu_pytorch_tanh", gated=False, bias=True),
            "attention": AttentionConfig(qkv_bias=True, o_bias=True),
            "tie_word_embeddings": True,
        }
    ),
    "tiny-vocabulary": _BASE.model_copy(update={"vocab_size": 9}),  # at tp 4 the last rank holds padding only
    "seq2seq": _BASE.model_copy(update={"family": "seq2seq", "tie_word_embeddings": True}),  # one matrix for source, target and output
    "seq2seq-apart": _BASE.model_copy(
        update={"family": "seq2seq", "encoder": EncoderConfig(num_hidden_layers=1, share_embedding=False), "num_key_value_heads": 1}
    ),
}
SOURCE_LENGTH = 24  # of a row of pairs
MODELS |= {
    name: ModelConfig.model_validate({**_BASE.model_dump(), **values}) for name, values in {**VARIATIONS, **MORE}.items()
}  # for tests/proofs/prove_variations.py
VARIED = ("2017", *VARIATIONS, *MORE)
EXTRAS = {  # by model
    "2017": LossConfig(label_smoothing=0.1, z_loss=1e-3),
    "label smoothing, z-loss": LossConfig(label_smoothing=0.2, z_loss=0.01),
}
TABLE = ("gqa", "mqa")  # the models of the whole table
