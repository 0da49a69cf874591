"""A run on disk, opened for use: its config, and the model of one of its checkpoints."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from data_pipeline.errors import CheckpointError, ConfigError, Fault
from data_pipeline.schema import apply_override, read_yaml, validate
from launcher.config import RunConfig, cross_faults
from launcher.distributed import start_device, start_groups
from launcher.environment import read_environment
from launcher.run_folder import read_json
from megatron_lite.checkpoint.find import checkpoint_at, newest_checkpoint
from megatron_lite.checkpoint.load import load_into
from megatron_lite.checkpoint.manifest import RunState
from megatron_lite.checkpoint.slices import model_slices
from megatron_lite.models.build import build_model
from megatron_lite.models.decoder import Decoder
from megatron_lite.parallel.groups import ProcessGroups


@dataclass(frozen=True)
class FinishedRun:
    """A model with the weights of `checkpoint`, in evaluation."""

    config: RunConfig
    checkpoint: Path
    state: RunState
    model: Decoder
    groups: ProcessGroups
    device: torch.device


def read_config(run: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The run's saved config; `data.path=DIR` takes the place of its sources. Data paths that were relative to the folder
    where the run was started are found from anywhere. Raises ConfigError."""
    if not (run / "config.yaml").is_file():
        raise ConfigError([Fault("RUN", str(run), "a run folder, with a config.yaml in it", "it is printed when a run starts: runs/NAME")])
    tree = read_yaml(run / "config.yaml")
    other_data = any(override.partition("=")[0].strip() == "data.path" for override in overrides)
    if other_data:
        tree["data"]["sources"] = None
    _find_data(tree["data"], run)
    for override in overrides:
        apply_override(tree, override)
    config = validate(RunConfig, tree)
    return config.model_copy(update={"run": config.run.model_copy(update={"dir": str(run)})})


def _find_data(data: dict[str, Any], run: Path) -> None:
    attempts = sorted((run / "attempts").glob("[0-9]*"))
    started = read_json(attempts[-1] / "environment.json").get("cwd") if attempts else None
    for place in [data, *(data.get("sources") or [])]:
        path = place.get("path")
        if path and started and not Path(path).exists() and (Path(started) / path).exists():
            place["path"] = str(Path(started) / path)


def open_run(path: Path, overrides: Sequence[str] = ()) -> FinishedRun:
    """Load the newest checkpoint of a run folder, or the checkpoint at `path`. One process, or tp of them under a launcher.

    Raises ConfigError for what is no run, CheckpointError where there is no usable checkpoint.
    """
    environment = read_environment(os.environ)
    run = path.parent.parent if (path / "manifest.json").is_file() else path
    config = read_config(run, ["parallel.tp=1", "parallel.sequence_parallel=false", *overrides])
    faults = cross_faults(config.model, config.parallel, config.training, config.lr_scheduler, world_size=environment.world_size)
    if faults := [fault for fault in faults if fault.field.startswith("parallel.tp")]:
        raise ConfigError(faults)
    device = start_device(environment)
    if environment.world_size == 1:
        groups = ProcessGroups.single()
    else:
        groups = start_groups(environment, config.parallel, device=device, timeout_s=config.run.hang_timeout_s)
    if run is path:
        choice = newest_checkpoint(run / "checkpoints", groups, allow_fallback=config.checkpoint.allow_fallback)
        if choice is None:
            raise CheckpointError(f"{run} has no checkpoint yet: train it, or give a checkpoint folder")
        info = choice.info
    else:
        info = checkpoint_at(path, groups)
    dtype = torch.bfloat16 if config.training.precision == "bf16" else torch.float32
    model = build_model(config.model, groups, seed=config.run.seed, device=device, dtype=dtype)
    load_into(info.path, model_slices(model), groups, weights_only=True)
    return FinishedRun(config, info.path, info.state, model.eval(), groups, device)
