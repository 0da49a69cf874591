"""Small models as checkpoints and as Hugging Face folders."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from launcher.commands.export import DTYPES
from megatron_lite.checkpoint.huggingface.export import CHUNK_ELEMENTS, export_weights
from megatron_lite.checkpoint.huggingface.families import to_tree
from megatron_lite.checkpoint.huggingface.llama import LLAMA
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
    path: Path, folder: Path, *, dtype: str = "fp32", max_file_bytes: int = 10**9, chunk_elements: int = CHUNK_ELEMENTS, **keys: Any
) -> Path:
    """The checkpoint as a folder with weights and config.json; `keys` change the latter."""
    folder.mkdir(parents=True, exist_ok=True)
    manifest = read_manifest(path)
    config = ModelConfig.model_validate(manifest.state.model)
    export_weights(path, manifest, folder, LLAMA.names(config), dtype=dtype, max_file_bytes=max_file_bytes, chunk_elements=chunk_elements)
    write_config(folder, {**to_tree(LLAMA, config), "dtype": DTYPES[dtype], **keys})
    return folder


def write_config(folder: Path, tree: Mapping[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(tree))
