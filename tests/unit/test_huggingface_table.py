"""If these fail, a config is taken for another model's, or something that Llama can't be leaves without a word."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.errors import ConfigError
from megatron_lite.checkpoint.huggingface.catalogue import FAMILIES
from megatron_lite.checkpoint.huggingface.families import differences, from_tree, leaves, names, to_tree
from megatron_lite.checkpoint.huggingface.llama import LLAMA
from megatron_lite.checkpoint.manifest import read_manifest
from megatron_lite.model_config import ModelConfig, RopeConfig
from megatron_lite.models.build import build_model
from megatron_lite.parallel.groups import ProcessGroups
from tests.huggingface_cases import MODELS, checkpoint

GQA = MODELS["gqa"]


@pytest.mark.parametrize("name", MODELS)
def test_table_names_the_tensors_of_the_model(name: str, tmp_path: Path) -> None:
    """The table's logical names and shapes are those that a checkpoint of the model has, no more and no fewer."""
    path = checkpoint(tmp_path, build_model(MODELS[name], ProcessGroups.single(), seed=1))
    wanted = {tensor: entry.shape for tensor, entry in read_manifest(path).tensors.items()}
    assert {ours: place.shape for ours, place in LLAMA.places(MODELS[name]).items()} == wanted


WITHOUT_COUNTERPART = (
    "family",
    "position.",
    "rope.partial_rotary_factor",
    "attention.",
    "norm.",
    "residual.",
    "mlp.gated",
    "encoder.",
    "embedding_multiplier",
    "logit_scale",
    "final_logit_softcapping",
    "mup.",
)  # refused unless they are the defaults


def test_every_model_key_has_a_place() -> None:
    """A key of `model` that is in no table would go unnoticed only until it differs from its default: then it is refused."""
    placeless = {name for name, _ in leaves(ModelConfig().model_dump()) if not names(name, LLAMA.known)}
    assert placeless and all(names(name, WITHOUT_COUNTERPART) for name in placeless)
    unknowing = replace(LLAMA, together=LLAMA.together[1:])
    to_tree(unknowing, GQA)
    with pytest.raises(ConfigError, match=r"model\.rope\.theta: got 7\.0, wanted 10000\.0\. LlamaForCausalLM has no counterpart"):
        to_tree(unknowing, GQA.model_copy(update={"rope": RopeConfig(theta=7.0)}))


def test_what_llama_cannot_be_is_refused_by_name() -> None:
    """All at once; 64 is not divided by 6 heads, which transformers refuses to build."""
    config = ModelConfig(hidden_size=64, num_attention_heads=6, head_dim=16, vocab_size=97)
    with pytest.raises(ConfigError, match=r"model\.num_attention_heads: got 6"):
        to_tree(LLAMA, config)


@pytest.mark.parametrize("name", MODELS)
def test_config_comes_back(name: str) -> None:
    family, back = from_tree(FAMILIES, json.loads(json.dumps(to_tree(LLAMA, MODELS[name]))), where="x")
    assert family is LLAMA and differences(LLAMA, MODELS[name], back, where="x") == []
    assert back.model_dump(exclude={"num_key_value_heads", "head_dim"}) == MODELS[name].model_dump(
        exclude={"num_key_value_heads", "head_dim"}
    )
    assert (back.kv_heads, back.head_size) == (MODELS[name].kv_heads, MODELS[name].head_size)


def test_config_of_other_versions() -> None:
    """transformers 4 writes rope_theta flat and may leave out head_dim and KV heads; 5 has rope_parameters alone."""
    tree = to_tree(LLAMA, MODELS["mha-theta-eps"])
    old = {key: value for key, value in tree.items() if key not in ("rope_parameters", "head_dim", "num_key_value_heads")}
    new = {key: value for key, value in tree.items() if key not in ("rope_theta", "rope_scaling")}
    bare = {key: value for key, value in tree.items() if key not in ("rope_theta", "rope_parameters", "rms_norm_eps", "architectures")}
    for given in (old, new):
        assert differences(LLAMA, MODELS["mha-theta-eps"], from_tree(FAMILIES, given, where="x")[1], where="x") == []
    found = from_tree(FAMILIES, bare, where="x")[1]
    assert (found.rope.theta, found.rms_norm_eps) == (10000.0, 1e-6)  # LlamaConfig's own defaults


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 8.0}}, "rope_type"),
        ({"rope_scaling": {"rope_type": "longrope"}, "rope_parameters": {}}, "rope_type: got 'longrope'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "original_max_position_embeddings"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "mscale": 0.7}}, "rope_parameters.mscale"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"factor": 3.0}}, "factor"),
        ({"hidden_act": "mish"}, "hidden_act"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_theta": 5e5}, "rope_theta and rope_parameters.rope_theta"),
        ({"architectures": ["MixtralForCausalLM"]}, "architectures"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_configs_that_we_cannot_be_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        from_tree(FAMILIES, {**to_tree(LLAMA, GQA), **changes}, where="DIR/config.json")
    assert named in str(refused.value) and "DIR/config.json" in str(refused.value)


def test_another_model_section_is_refused_with_what_to_set() -> None:
    """Every key with which the weights would compute something else, those of training left alone."""
    other = GQA.model_copy(update={"rms_norm_eps": 1e-6, "vocab_size": 98, "tie_word_embeddings": True, "attention_dropout": 0.1})
    faults = differences(LLAMA, GQA, other, where="DIR/config.json")
    assert {fault.field for fault in faults} == {"model.rms_norm_eps", "model.vocab_size", "model.tie_word_embeddings"}
    assert "set model.tie_word_embeddings=true" in [fault.fix for fault in faults]
