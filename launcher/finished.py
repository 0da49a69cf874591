"""A run on disk, opened for use: its config, and the model of one of its checkpoints."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from data_pipeline.dataset import Dataset
from data_pipeline.errors import CheckpointError, ConfigError, DataError
from launcher.config import RunConfig
from launcher.console import show
from launcher.distributed import start_device, start_groups
from launcher.environment import read_environment
from launcher.resume_policy import changed_meaning, other_meaning, require_same_meaning
from launcher.saved_config import names_data, read_config, run_of
from megatron_lite.checkpoint.find import CheckpointInfo, checkpoint_at, newest_checkpoint
from megatron_lite.checkpoint.load import load_into
from megatron_lite.checkpoint.manifest import RunState
from megatron_lite.checkpoint.slices import model_slices
from megatron_lite.config import layout_faults
from megatron_lite.inference.text import LanguageModel
from megatron_lite.models.build import build_model
from megatron_lite.models.decoder import Decoder
from megatron_lite.notebook import SavedTokenizer, find_tokenizer
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


def open_run(path: Path, overrides: Sequence[str] = (), *, command: str) -> FinishedRun:
    """Load the newest checkpoint of a run folder, or the checkpoint at `path`. One process, or tp of them under a launcher, whose
    call is part of what is said where there are too few.

    Where overrides make it another model that the weights fit all the same, the first rank says so on stderr. Raises ConfigError for
    what is no run and for heads cut otherwise, CheckpointError where there is no usable checkpoint or none of these shapes.
    """
    environment = read_environment(os.environ)
    run = run_of(path)
    config = read_config(run, ["parallel.tp=1", "parallel.sequence_parallel=false", *overrides])
    start = f"torchrun --nproc-per-node {config.parallel.tp} -m launcher.cli {command} {path}"
    faults = layout_faults(config.model, config.parallel, config.training, world_size=environment.world_size, start=start)
    if faults := [fault for fault in faults if fault.field.startswith("parallel.tp")]:
        raise ConfigError(faults)
    device = start_device(environment)
    if environment.world_size == 1:
        groups = ProcessGroups.single()
    else:
        groups = start_groups(environment, config.parallel, device=device, timeout_s=config.run.hang_timeout_s)
    info = find_checkpoint(path, config, groups)
    origin = info.state.identity()
    wanted = {"model": config.model.model_dump(mode="json"), "tokenizer_hash": origin["tokenizer_hash"]}
    require_same_meaning(origin, wanted, where=info.path)
    dtype = torch.bfloat16 if config.training.precision == "bf16" else torch.float32
    model = build_model(config.model, groups, seed=config.run.seed, device=device, dtype=dtype)
    load_into(info.path, model_slices(model), groups, weights_only=True)
    if groups.rank == 0:
        for change in changed_meaning(origin, wanted, and_also=("max_position_embeddings",)):
            show(f"warning: {other_meaning(*change, who='this model')}: it is not the model that was trained", error=True)
    return FinishedRun(config, info.path, info.state, model.eval(), groups, device)


def find_checkpoint(path: Path, config: RunConfig, groups: ProcessGroups) -> CheckpointInfo:
    """The newest checkpoint of the run folder `path`, or the checkpoint at `path`. Collective. Raises CheckpointError."""
    if run_of(path) is not path:
        return checkpoint_at(path, groups)
    choice = newest_checkpoint(path / "checkpoints", groups, allow_fallback=config.checkpoint.allow_fallback)
    if choice is None:
        raise CheckpointError(f"{path} has no checkpoint yet: train it, or give a checkpoint folder")
    return choice.info


def dataset_of(config: RunConfig, state: RunState, checkpoint: Path) -> Dataset:
    """The run's data, for its tokenizer. Raises DataError where it is another than the checkpoint was trained with."""
    dataset = Dataset.open(config.data.mixture[0].path, cache=config.data.cache)
    if dataset.tokenizer_hash != state.tokenizer_hash:
        raise DataError(
            f"{dataset.location} has another tokenizer than the one that {checkpoint} was trained with: give data.path=DIR of that data"
        )
    return dataset


def with_tokenizer(run: FinishedRun, overrides: Sequence[str] = ()) -> LanguageModel:
    """The run's model and the tokenizer that it was trained with: from the run folder, from its data, or from data.path=DIR. Raises
    DataError."""
    saved = None if names_data(overrides) else find_tokenizer(run.checkpoint, run.state.tokenizer_hash)
    if saved is None:
        dataset = dataset_of(run.config, run.state, run.checkpoint)
        saved = SavedTokenizer(dataset.tokenizer_path, dataset.vocabulary.begin_id, (dataset.eod_id,))
    return saved.with_model(run.model, step=run.state.step)
