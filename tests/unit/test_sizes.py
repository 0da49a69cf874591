"""If this fails, reported parameters, FLOPs and MFU are wrong."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import MarianConfig, MarianMTModel

from data_pipeline.schema import validate
from data_pipeline.yaml_text import read_yaml
from megatron_lite.model_config import ModelConfig
from megatron_lite.models.batch import Batch, DropoutKey
from megatron_lite.models.build import build_model
from megatron_lite.parallel.groups import ProcessGroups
from megatron_lite.sizes import flops_per_token, num_parameters
from tests.paths import ROOT

SMALL = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}


VARIATIONS: list[dict[str, Any]] = [
    {"norm": {"type": "layer_norm", "bias": True, "placement": "sandwich"}, "residual": {"learned_step_size": "branch"}},
    {"norm": {"placement": "post"}, "mlp": {"gated": False, "bias": True, "activation": "gelu"}},
    {"residual": {"parallel": "one_norm", "learned_step_size": "layer"}, "mlp": {"bias": True}},
]


@pytest.mark.parametrize("extra", [{}, {"tie_word_embeddings": True}, {"num_key_value_heads": 1, "head_dim": 16}, *VARIATIONS])
def test_number_of_parameters_is_the_models(extra: dict) -> None:
    """If this fails, `plan` and the MFU count another model than the one that trains."""
    config = ModelConfig(**SMALL, **extra)
    model = build_model(config, ProcessGroups.single(), seed=0, materialise=False)
    assert num_parameters(config) == sum(parameter.numel() for parameter in model.parameters())


def test_known_models() -> None:
    """Llama-3-8B has 8,030,261,248 parameters (its model card)."""
    llama = ModelConfig(
        vocab_size=128256,
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14336,
        max_position_embeddings=8192,
    )
    assert num_parameters(llama) == 8_030_261_248


@pytest.mark.parametrize(("name", "published", "count"), [("base", 65e6, 63_045_632), ("big", 213e6, 214_171_648)])
def test_models_of_the_2017_paper(name: str, published: float, count: int) -> None:
    """Vaswani et al. 2017, table 3, with the 37,000 tokens of their section 5.1; the paper's own numbers are rounded, and 3 % off what
    it describes. `transformers`' Marian of the same shape has as many, its attention's biases and its table of positions apart."""
    config = validate(ModelConfig, read_yaml(ROOT / "configs" / "model" / f"transformer_{name}.yaml"))
    assert num_parameters(config) == count == pytest.approx(published, rel=0.031)
    size, width, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    attention, norm, feed_forward = 4 * size * size, 2 * size, 2 * size * width + width + size
    assert count == 37_000 * size + layers * (3 * attention + 2 * feed_forward + 5 * norm)
    with torch.device("meta"):
        theirs = MarianMTModel(
            MarianConfig(
                vocab_size=37_000,
                d_model=size,
                encoder_layers=layers,
                decoder_layers=layers,
                encoder_ffn_dim=width,
                decoder_ffn_dim=width,
                encoder_attention_heads=config.num_attention_heads,
                decoder_attention_heads=config.num_attention_heads,
                pad_token_id=0,
            )
        )
    biases = re.compile(r"attn\.[qkv]_proj\.bias|attn\.out_proj\.bias|embed_positions")
    assert count == sum(weight.numel() for key, weight in theirs.named_parameters() if not biases.search(key))


@pytest.mark.parametrize("extra", [{}, {"mlp": {"gated": False, "bias": True}}, {"family": "seq2seq", "encoder": {"num_hidden_layers": 2}}])
def test_flops_are_those_that_torch_counts(extra: dict[str, Any]) -> None:
    """Forward and backward through the logits; with dropout attention is written out and counts all keys, as the formula does."""
    config = ModelConfig(**SMALL, **extra, num_key_value_heads=2, attention_dropout=0.1)  # dropout: attention as plain products
    model = build_model(config, ProcessGroups.single(), seed=0)
    length, num_rows = 24, 2
    ids = np.random.default_rng(0).integers(0, 96, (num_rows, length))
    batch = Batch.from_rows(ids, ids, [[0]] * num_rows, range(num_rows), document_mask=True)
    source_length = None
    if config.family == "seq2seq":
        source_length = 16
        batch = batch.with_source(ids[:, :source_length], [[0]] * num_rows)
    with FlopCounterMode(display=False) as counter:
        logits, _ = model(batch, DropoutKey(0, 1), output="logits")
        logits.sum().backward()
    assert counter.get_total_flops() == flops_per_token(config, length, source_length) * num_rows * length
