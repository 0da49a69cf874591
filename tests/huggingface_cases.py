"""Small models as checkpoints and as Hugging Face folders."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from launcher.commands.export import DTYPES
from megatron_lite.checkpoint.huggingface.catalogue import family_for
from megatron_lite.checkpoint.huggingface.export import CHUNK_ELEMENTS, export_weights
from megatron_lite.checkpoint.huggingface.families import to_tree
from megatron_lite.checkpoint.manifest import read_manifest
from megatron_lite.checkpoint.save import save_checkpoint
from megatron_lite.checkpoint.slices import model_slices
from megatron_lite.model_config import ModelConfig, RopeConfig
from megatron_lite.models.build import build_model
from megatron_lite.parallel.groups import ProcessGroups
from tests.checkpoint_fakes import run_state

_BASE = ModelConfig(
    vocab_size=97,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=96,
    max_position_embeddings=32,
)
MODELS = {
    "gqa": _BASE,
    "mqa-tied": _BASE.model_copy(update={"num_key_value_heads": 1, "vocab_size": 90, "tie_word_embeddings": True}),
    "mha-theta-eps": _BASE.model_copy(update={"num_key_value_heads": None, "rope": RopeConfig(theta=500.0), "rms_norm_eps": 1e-3}),
    "wide-heads": _BASE.model_copy(update={"head_dim": 32, "num_hidden_layers": 11}),
}


_TINY: dict[str, Any] = {**_BASE.model_dump(), "num_hidden_layers": 3, "init": {"std": 0.2}}
_LAYER_NORM = {"type": "layer_norm", "bias": True}
_LONGER = {"factor": 4.0, "original_max_position_embeddings": 8}
_BIASES = {"qkv_bias": True, "o_bias": True}
_PLAIN = {"gated": False, "bias": True}
_GEMMA = {"mlp": {"activation": "gelu_pytorch_tanh"}, "embedding_multiplier": "sqrt_hidden_size"}
_BUCKETS = {"type": "t5", "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20}
_T5 = {
    "family": "seq2seq",
    "encoder": {"num_hidden_layers": 2},
    "num_key_value_heads": None,
    "position": _BUCKETS,
    "attention": {"scale": 1.0},
    "init": {"std": 0.02},  # scores are not divided: with larger weights rounding alone would show
}
# Of every architecture: (its model_type, what of the model section makes it one).
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("llama", {"rope": {"theta": 100.0, "scaling": {"type": "llama3", **_LONGER}}, "head_dim": 32}),
    "llama-yarn-biases": ("llama", {"rope": {"scaling": {"type": "yarn", **_LONGER}}, "attention": _BIASES, "mlp": {"bias": True}}),
    "llama-linear-gelu": ("llama", {"rope": {"scaling": {"type": "linear", "factor": 2.0}}, "mlp": {"activation": "gelu"}}),
    "mistral": ("mistral", {"attention": {"sliding_window": 8}}),
    "qwen2": ("qwen2", {"attention": {"qkv_bias": True}, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"attention": {"qk_norm": "rms_norm"}, "head_dim": 32, "rms_norm_eps": 1e-3}),
    "qwen3-window": ("qwen3", {"attention": {"qk_norm": "rms_norm", "sliding_window": 8, "global_every": 3, **_BIASES}}),
    "gpt2": (
        "gpt2",
        {
            "num_key_value_heads": None,
            "position": {"type": "learned"},
            "norm": _LAYER_NORM,
            "mlp": {"activation": "gelu_pytorch_tanh", **_PLAIN},
            "attention": _BIASES,
            "tie_word_embeddings": True,
            "layer_norm_eps": 1e-3,
        },
    ),
    "gemma": ("gemma", {**_GEMMA, "norm": {"zero_centred": True}, "tie_word_embeddings": True, "head_dim": 32}),
    "gemma2": (
        "gemma2",
        {
            **_GEMMA,
            "norm": {"zero_centred": True, "placement": "sandwich"},
            "attention": {"scale": 50**-0.5, "logit_softcapping": 5.0, "sliding_window": 8, "global_every": 2},
            "final_logit_softcapping": 4.0,
        },
    ),
    "t5": ("t5", {**_T5, "mlp": {"activation": "relu", "gated": False}, "tie_word_embeddings": True, "logit_scale": 0.125}),
    "t5-1.1": ("t5", {**_T5, "mlp": {"activation": "gelu_pytorch_tanh"}, "head_dim": 32, "rms_norm_eps": 1e-3}),
    "marian": (
        "marian",
        {
            "family": "seq2seq",
            "encoder": {"num_hidden_layers": 2},
            "num_key_value_heads": None,
            "position": {"type": "sinusoidal"},
            "norm": {**_LAYER_NORM, "placement": "post"},
            "mlp": {"activation": "relu", **_PLAIN},
            "attention": _BIASES,
            "embedding_multiplier": "sqrt_hidden_size",
            "tie_word_embeddings": True,
        },
    ),
}


def architecture(name: str, **changes: Any) -> ModelConfig:
    """A small model of one of ARCHITECTURES."""
    return ModelConfig.model_validate({**_TINY, **ARCHITECTURES[name][1], **changes})


def trained(config: ModelConfig, *, seed: int = 3, noise: float = 0.1) -> torch.nn.Module:
    """A model none of whose weights is as it was made: norms and all differ from their defaults."""
    model = build_model(config, ProcessGroups.single(), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += noise * torch.randn(parameter.shape, generator=generator)
    return model


def checkpoint(root: Path, model: torch.nn.Module) -> Path:
    """A committed checkpoint of a bare model's weights."""
    config = model.config
    state = run_state(1, model=config.model_dump(mode="json"))  # type: ignore[operator, union-attr]
    return save_checkpoint(root, step=1, slices=model_slices(model), groups=ProcessGroups.single(), attempt=1, state=state)


def export(
    path: Path,
    folder: Path,
    *,
    to: str = "auto",
    dtype: str = "fp32",
    max_file_bytes: int = 10**9,
    chunk_elements: int = CHUNK_ELEMENTS,
    **keys: Any,
) -> Path:
    """The checkpoint as a folder with weights and config.json; `keys` change the latter."""
    folder.mkdir(parents=True, exist_ok=True)
    manifest = read_manifest(path)
    config = ModelConfig.model_validate(manifest.state.model)
    family = family_for(config, to)
    places = family.places(config)
    export_weights(path, manifest, folder, places, dtype=dtype, max_file_bytes=max_file_bytes, chunk_elements=chunk_elements)
    write_config(folder, {**to_tree(family, config), "dtype": DTYPES[dtype], **keys})
    return folder


def write_config(folder: Path, tree: Mapping[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(tree))
