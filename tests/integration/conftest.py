"""A small dataset for all runs, and a workspace a test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.data_fixtures import tiny_dataset, tiny_texts
from tests.integration.jobs import Workspace

CONFIG: dict[str, Any] = {
    "run": {"name": "a", "seed": 7},
    "model": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
        "hidden_dropout": 0.1,
    },
    "training": {"steps": 8, "sequence_length": 32, "global_batch_size": 4, "micro_batch_size": 2},
    "optimizer": {"lr": 3e-3},
    "lr_scheduler": {"warmup_steps": 2},
    "checkpoint": {"interval_steps": 2},
    "evaluation": {"interval_steps": 4, "max_sequences": 6},
    "logging": {"wandb": {"mode": "disabled"}},
}


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "tiny"
    tiny_dataset(folder, tiny_texts(40, seed=3))
    return folder


@pytest.fixture(scope="session")
def other_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "other"
    tiny_dataset(folder, tiny_texts(40, seed=4))
    return folder


@pytest.fixture
def make_workspace(dataset: Path) -> Callable[[Path], Workspace]:
    def make(folder: Path) -> Workspace:
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / "run.yaml"
        config.write_text(yaml.safe_dump({**CONFIG, "data": {"path": str(dataset)}}))
        return Workspace(folder, config)

    return make


@pytest.fixture
def workspace(tmp_path: Path, make_workspace: Callable[[Path], Workspace]) -> Workspace:
    return make_workspace(tmp_path)
