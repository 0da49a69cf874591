"""Where a run starts from, and when and how it saves."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_pipeline.errors import CheckpointError, ConfigError, Fault
from data_pipeline.yaml_text import read_yaml
from launcher.config import RunConfig
from launcher.faults import Faults
from launcher.huggingface import huggingface_folder
from launcher.recorder import Recorder
from launcher.run_folder import RunFolder
from megatron_lite.checkpoint.agree import broadcast_json
from megatron_lite.checkpoint.find import Choice, checkpoint_at, newest_checkpoint, quarantine
from megatron_lite.checkpoint.huggingface.load import load_huggingface
from megatron_lite.checkpoint.load import load_into
from megatron_lite.checkpoint.manifest import RunState
from megatron_lite.checkpoint.retention import apply_retention
from megatron_lite.checkpoint.save import save_checkpoint
from megatron_lite.parallel.groups import ProcessGroups
from megatron_lite.training.engine import Engine


@dataclass(frozen=True)
class Start:
    """What a run goes on from. `state` is None for a new run; `weights` is a checkpoint, or a Hugging Face folder, whose weights
    alone are taken."""

    path: Path | None = None
    state: RunState | None = None
    weights: Path | None = None
    origin: RunState | None = None  # of the checkpoint whose weights alone are taken
    passed_over: list[tuple[Path, str]] = field(default_factory=list)
    unfinished: list[Path] = field(default_factory=list)  # saves that were never committed

    @property
    def step(self) -> int:
        return self.state.step if self.state else 0

    @property
    def samples(self) -> int:
        return self.state.samples if self.state else 0

    @property
    def tokens(self) -> int:
        return self.state.tokens if self.state else 0

    def total_steps(self, config: RunConfig) -> int:
        """Updates of the whole run. A budget in tokens counts what earlier attempts consumed at their own batch size."""
        training = config.training
        if training.steps is not None:
            return training.steps
        assert training.tokens is not None
        left = training.tokens - self.samples * training.sequence_length
        return self.step + max(0, -(-left // (training.global_batch_size * training.sequence_length)))


def choose_start(folder: RunFolder, config: RunConfig, groups: ProcessGroups) -> Start:
    """The run's own newest checkpoint, else what `resume` or `init_from` name, else the beginning. Collective over the world.

    Raises ConfigError where `resume` forbids it, CheckpointError where there is no usable checkpoint but should be.
    """
    wanted = config.checkpoint
    found: Choice | None = newest_checkpoint(folder.checkpoints, groups, allow_fallback=wanted.allow_fallback)
    if found is not None:
        _check_resume_word(wanted.resume, folder, config)
        return Start(path=found.info.path, state=found.info.state, passed_over=found.passed_over, unfinished=found.unfinished)
    folder.require_checkpoints_that_were_saved(None)
    if wanted.resume not in ("auto", "never"):
        info = _the_checkpoint(Path(wanted.resume), groups, "checkpoint.resume")
        return Start(path=info[0], state=info[1])
    if (huggingface := huggingface_folder(wanted.init_from)) is not None:
        return Start(weights=huggingface)
    if wanted.init_from is not None:
        taken = _the_checkpoint(Path(wanted.init_from), groups, "checkpoint.init_from")
        return Start(weights=taken[0], origin=taken[1])
    return Start()


def _check_resume_word(resume: str, folder: RunFolder, config: RunConfig) -> None:
    """`never` touches no folder with checkpoints; a path seeds an empty one, and the same command goes on from there."""
    if resume == "auto":
        return
    saved = saved_config(folder).get("checkpoint", {}).get("resume")
    if resume != "never" and saved == resume:
        return
    want = "a run folder without checkpoints" if resume == "never" else "auto, since the run folder has checkpoints of its own"
    raise ConfigError([Fault("checkpoint.resume", resume, want, f"{folder.checkpoints} has some: use auto, or choose another run.name")])


def _the_checkpoint(path: Path, groups: ProcessGroups, key: str) -> tuple[Path, RunState]:
    """The checkpoint at `path`, or the newest of the run at `path`."""
    if (path / "checkpoints").is_dir():
        choice = newest_checkpoint(path / "checkpoints", groups)
        if choice is None:
            raise CheckpointError(f"{key}: {path} has no checkpoint")
        return choice.info.path, choice.info.state
    info = checkpoint_at(path, groups)
    return info.path, info.state


def saved_config(folder: RunFolder) -> dict[str, Any]:
    """The config of the attempt before, as plain values; empty for a new run. Raises ConfigError where the file is damaged."""
    if not folder.config.exists():
        return {}
    fix = f"put a copy back (one is in each of {folder.path / 'attempts'}), or delete it: then what changed since is not recorded"
    try:
        tree = read_yaml(folder.config)
    except ConfigError as error:
        raise ConfigError(f"{error}\n{folder.config} is damaged: {fix}") from None
    if not isinstance(tree.get("run"), dict):
        raise ConfigError([Fault(str(folder.config), sorted(tree), "the config of a run", fix)])
    return tree


def restore(engine: Engine, start: Start, config: RunConfig, recorder: Recorder) -> None:
    """Load what the run starts from, and clear abandoned later steps out of the way. Collective over the world."""
    path = start.path or start.weights
    if path is None:
        return
    if path == huggingface_folder(config.checkpoint.init_from):
        load_huggingface(path, engine.owned_slices(), engine.groups)
    else:
        load_into(path, engine.owned_slices(), engine.groups, weights_only=start.state is None)
    engine.refresh()
    if start.state is not None:
        engine.set_optimizer_step(start.state.step)
    if recorder.active:
        for damaged, reason in start.passed_over:
            moved = quarantine(damaged)
            recorder.say(f"{reason}\n{damaged.name} was moved to {moved.name}; going on from {path.name} instead")
            recorder.event("passed_over", checkpoint=str(moved), reason=reason)
        for left in start.unfinished:
            recorder.say(f"{left.name} is incomplete: its save was cut off, so it does not count; going on from {path.name}")
            recorder.event("incomplete", checkpoint=str(left))


class Saver:
    """Saves when it is time, and once when the run stops or ends."""

    def __init__(
        self,
        folder: RunFolder,
        config: RunConfig,
        engine: Engine,
        *,
        identity: Mapping[str, Any],
        phases: list[Any],
        start: Start,
        faults: Faults,
    ) -> None:
        self._folder, self._config, self._engine, self._faults = folder, config, engine, faults
        self._identity, self._phases = dict(identity), phases
        self.last_step = start.step
        self._saved_at = time.monotonic()

    def due(self, step: int) -> bool:
        """Whether the cadence asks for a checkpoint of this step. By minutes, the first rank's clock counts. Collective then."""
        wanted = self._config.checkpoint
        if wanted.interval_steps is not None and step % wanted.interval_steps == 0:
            return True
        if wanted.interval_minutes is None:
            return False
        return bool(broadcast_json(time.monotonic() - self._saved_at >= 60 * wanted.interval_minutes, self._engine.groups.world))

    def save(self, recorder: Recorder, *, step: int, samples: int, tokens: int) -> None:
        """Commit a checkpoint of this step, then note it and delete what is not to be kept. Collective over the world."""
        if step == self.last_step:
            return
        began = time.monotonic()
        self._faults.at_save()
        recorder.sync()
        state = RunState(
            step=step,
            samples=samples,
            tokens=tokens,
            global_batch_size=self._config.training.global_batch_size,
            phases=self._phases,
            optimizer={"step": self._engine.optimizer_step},
            **self._identity,
        )
        path = save_checkpoint(
            self._folder.checkpoints,
            step=step,
            slices=self._engine.owned_slices(),
            groups=self._engine.groups,
            attempt=self._folder.attempt,
            state=state,
            on_point=self._faults.at_save_point,
        )
        self.last_step, self._saved_at = step, time.monotonic()
        if recorder.active:
            wanted = self._config.checkpoint
            deleted = apply_retention(
                self._folder.checkpoints, keep_last=wanted.keep_last, keep_every_steps=wanted.keep_every_steps, protect=path
            )
            seconds = round(time.monotonic() - began, 2)
            recorder.event("saved", step=step, seconds=seconds, deleted=[old.name for old in deleted])
            self._folder.write_status("running", step=step, checkpoint=step, save_s=seconds)  # by which a job stops in time
