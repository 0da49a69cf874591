"""If this fails, reported parameters, FLOPs and MFU are wrong."""

from typing import Any

import numpy as np
import pytest
from torch.utils.flop_counter import FlopCounterMode

from megatron_lite.model_config import ModelConfig
from megatron_lite.models.batch import Batch, DropoutKey
from megatron_lite.models.build import build_model
from megatron_lite.parallel.groups import ProcessGroups
from megatron_lite.sizes import flops_per_token, num_parameters

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


@pytest.mark.parametrize("extra", [{}, {"mlp": {"gated": False, "bias": True}}])
def test_flops_are_those_that_torch_counts(extra: dict[str, Any]) -> None:
    """Forward and backward through the logits; with dropout attention is written out and counts all keys, as the formula does."""
    config = ModelConfig(**SMALL, **extra, num_key_value_heads=2, attention_dropout=0.1)  # dropout: attention as plain products
    model = build_model(config, ProcessGroups.single(), seed=0)
    length, num_rows = 24, 2
    ids = np.random.default_rng(0).integers(0, 96, (num_rows, length))
    batch = Batch.from_rows(ids, ids, [[0]] * num_rows, range(num_rows), document_mask=True)
    with FlopCounterMode(display=False) as counter:
        logits, _ = model(batch, DropoutKey(0, 1), output="logits")
        logits.sum().backward()
    assert counter.get_total_flops() == flops_per_token(config, length) * num_rows * length
