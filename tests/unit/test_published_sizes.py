"""If this fails, a config that bears a known model's name is another model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from data_pipeline.schema import read_yaml
from megatron_lite.checkpoint.huggingface.catalogue import family_for
from megatron_lite.checkpoint.huggingface.families import to_tree
from megatron_lite.model_config import ModelConfig
from megatron_lite.models.build import build_model
from megatron_lite.parallel.groups import ProcessGroups
from megatron_lite.sizes import num_parameters
from tests.paths import ROOT

# Numbers of elements: of GPT-2 as its repository's released weights have, of the others as on their model cards.
# The keys are those of each model's own config.json, by transformers' class.
LLAMA31 = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
QWEN3 = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}
KNOWN: dict[str, tuple[int, str, dict[str, Any]]] = {
    "gpt2": (124_439_808, "GPT2", {}),
    "llama3-8b": (8_030_261_248, "Llama", LLAMA31),
    "qwen3-0.6b": (596_049_920, "Qwen3", QWEN3),
}


def config_of(path: Path) -> ModelConfig:
    return ModelConfig.model_validate(read_yaml(path))


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_model_has_its_size(name: str) -> None:
    """As published, as counted, as built on the meta device, and as transformers builds it from the model's own config.json, which is
    what ours would leave with."""
    import transformers

    published, prefix, keys = KNOWN[name]
    config = config_of(ROOT / "configs" / "model" / f"{name}.yaml")
    ours = build_model(config, ProcessGroups.single(), seed=0, materialise=False)
    theirs = getattr(transformers, f"{prefix}Config")(**keys)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(theirs)
    assert num_parameters(config) == published
    assert sum(each.numel() for each in ours.parameters()) == published
    assert sum(each.numel() for each in model.parameters()) == published
    wanted, said = theirs.to_dict(), to_tree(family_for(config), config)
    differing = {key for key in said if key in wanted and wanted[key] != said[key] and key not in ("rope_scaling", "architectures")}
    assert differing <= {"n_inner"}, {key: (said[key], wanted[key]) for key in differing}
