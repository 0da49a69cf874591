"""One attempt of a run on this rank: join the world, build everything, fit, and end so that status.json tells the truth."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from data_pipeline.errors import StopRequested
from data_pipeline.loader import Dataset, Phase
from launcher.checkpointing import Saver, Start, choose_start, restore, saved_config
from launcher.config import RunConfig, vocabulary_notice
from launcher.console import show
from launcher.datasets import AnyRows, open_rows
from launcher.devices import peak_flops
from launcher.distributed import describe_attention, find_siblings, make_deterministic, start_device, start_groups
from launcher.environment import Environment
from launcher.faults import Faults
from launcher.fit import Fit
from launcher.huggingface import changed_meaning_of_folder
from launcher.memory_check import MemoryCheck
from launcher.mixture import describe_mixture, mixture_lines, phases_for, require_epochs
from launcher.plan import plan_run
from launcher.process_tree import Link
from launcher.recorder import Rates, Recorder
from launcher.resume_policy import (
    changed_meaning,
    identity,
    other_meaning,
    packing_version,
    recorded_changes,
    require_same_meaning,
    require_same_run,
)
from launcher.run_folder import RunFolder, write_json
from launcher.stopping import StopFlag
from launcher.trackers import open_trackers
from launcher.watchdog import FailureMark, Watchdog, explain, is_lost_connection
from megatron_lite.checkpoint.agree import broadcast_json
from megatron_lite.parallel.groups import ProcessGroups
from megatron_lite.sizes import flops_per_token, num_parameters
from megatron_lite.training.deepspeed_config import deepspeed_config
from megatron_lite.training.engine import build_engine

GROUP_TIMEOUT_EXTRA_S = 120.0  # a collective outlives the watchdog, which says more


def run_job(
    config: RunConfig, environment: Environment, folder: RunFolder, datasets: list[Dataset], faults: Faults, chain: list[Link]
) -> int:
    """Train; the exit code. The first rank holds the folder's lock and has opened the attempt; `chain` are the launchers above."""
    job = Job(config, environment, folder, datasets, faults, chain)
    mark = FailureMark(folder, rank=environment.rank)
    try:
        job.join(mark)
        try:
            code, state, message = job.train()
        except StopRequested as request:
            code, state, message = request.exit_code, "stopped", str(request)
        job.end(code, state, message)
    except BaseException as error:
        code, message, details = explain(error)
        if is_lost_connection(error):
            time.sleep(2)  # this is how another rank's death shows here: let that one, or the watchdog, say it
        mark.claim(code, message, details)
        logging.error("%s\n%s", message, details)
    return code


@dataclass
class Job:
    """What stands for the whole of an attempt on this rank."""

    config: RunConfig
    environment: Environment
    folder: RunFolder
    datasets: list[Dataset]
    faults: Faults
    chain: list[Link]
    stop: StopFlag = field(default_factory=StopFlag)

    def join(self, mark: FailureMark) -> None:
        """Device, process groups, signals, watchdog. Until the groups stand, a signal simply ends the process: nothing is lost."""
        config, timeout_s = self.config, self.config.run.hang_timeout_s
        if config.training.deterministic:
            make_deterministic()
        self.device = start_device(self.environment, tf32=config.training.tf32)
        self.groups: ProcessGroups = start_groups(
            self.environment, config.parallel, device=self.device, timeout_s=timeout_s + GROUP_TIMEOUT_EXTRA_S
        )
        self.stop.listen()
        self.folder.attempt = broadcast_json(self.folder.attempt, self.groups.world)
        log_file = self.folder.log_file(self.groups.rank)
        logging.basicConfig(filename=log_file, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)
        logging.captureWarnings(True)
        self.watchdog = Watchdog(
            rank=self.groups.rank,
            stop=self.stop,
            mark=mark,
            siblings=find_siblings(self.groups),
            hang_timeout_s=timeout_s,
            log_file=log_file,
            chain=self.chain,
            on_stopping=self._say_stopping,
        )
        self.watchdog.start()

    def _say_stopping(self) -> None:
        if self.groups.rank == 0:
            self.folder.write_status("stopping")
            show(f"stopping ({self.stop.reason}): this step is finished and saved first")

    def train(self) -> tuple[int, str, str]:
        """(exit code, state, message). Raises StopRequested."""
        config, groups = self.config, self.groups
        start = choose_start(self.folder, config, groups)
        rows, heldout = self._open_rows()
        wanted = identity(config, rows.identity)
        if start.state is not None:
            require_same_run(start.state, wanted, folder=self.folder.path)
        if start.origin is not None:
            require_same_meaning(start.origin.identity(), wanted, where=start.weights)
        saved = start.state.phases if start.state else []
        phases = phases_for(config, self.datasets, saved=saved, step=start.step, samples=start.samples)
        rows = rows.with_phases([Phase.from_dict(phase) for phase in phases])
        total = start.total_steps(config)
        last_sample = start.samples + max(0, total - start.step) * config.training.global_batch_size
        require_epochs(config, rows, num_samples=last_sample)
        self.recorder = Recorder(self.folder, active=groups.rank == 0, total_steps=total, rates=self._rates())
        self._write_down(start, wanted, phases, describe_mixture(config, rows, first=start.samples, last=last_sample))
        budget = "training.steps" if config.training.steps is not None else "training.tokens"
        finished = f"{self.folder.path} is finished: {start.step} of {total} steps are done. To train on, raise {budget}"
        if start.step >= total and (heldout is None or broadcast_json(self.recorder.metrics.evaluated(start.step), groups.world)):
            return 0, "done", finished
        plan = plan_run(config, world=groups.world.size, device_type=self.device.type)
        memory = MemoryCheck(plan, self.device)
        self.watchdog.beat("building the model")
        engine = build_engine(
            config.model,
            config.training,
            config.optimizer,
            config.parallel,
            groups,
            seed=config.run.seed,
            device=self.device,
            deepspeed_overrides=config.deepspeed,
        )
        self.watchdog.beat("loading a checkpoint")
        restore(engine, start, config, self.recorder)
        self.watchdog.beat("starting to train")
        fit = Fit(
            config=config,
            engine=engine,
            device=self.device,
            rows=rows,
            heldout=heldout,
            start=start,
            total_steps=total,
            micro_batch_size=plan.micro_batch_size,
            saver=Saver(self.folder, config, engine, identity=wanted, phases=phases, start=start, faults=self.faults),
            recorder=self.recorder,
            watchdog=self.watchdog,
            stop=self.stop,
            faults=self.faults,
        )
        try:
            fit.run()
        finally:
            if fit.step > start.step:
                memory.report(self.recorder)
        return 0, "done", f"done: {total} steps, in {self.folder.path}"

    def _open_rows(self) -> tuple[AnyRows, AnyRows | None]:
        """Training and held-out rows. The first rank opens them first, and makes packing plans that are missing."""
        config = self.config

        def opened() -> tuple[AnyRows, AnyRows | None]:
            rows = open_rows(config, self.datasets)
            return rows, None if config.evaluation.max_sequences == 0 else open_rows(config, self.datasets, split="validation")

        self.watchdog.beat("opening the data")
        first = opened() if self.groups.rank == 0 else None
        broadcast_json("the packing plans are there", self.groups.world)
        self.watchdog.beat("opening the data")
        return first or opened()

    def _rates(self) -> Rates:
        config = self.config
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        return Rates(
            flops_per_token=flops_per_token(config.model, config.training.sequence_length, config.training.source_length),
            num_devices=self.groups.world.size,
            peak_flops=peak_flops(name, config.training.precision),
        )

    def _write_down(self, start: Start, wanted: dict[str, Any], phases: list[dict[str, Any]], mixture: list[dict[str, Any]]) -> None:
        """The first rank: what changed since the last attempt, the config, and where this attempt starts."""
        if self.groups.rank != 0:
            return
        config, folder, recorder = self.config, self.folder, self.recorder
        changes = recorded_changes(saved_config(folder), config) if folder.config.exists() else []
        if start.state is not None and phases != start.state.phases:
            before, after = (found[-1] if "changes" in found[-1] else found[-1]["weights"] for found in (start.state.phases, phases))
            changes.append(("data.weights", before, after))
        moved = recorder.metrics.rewind(start.step, recorder.events)
        recorder.event(
            "started",
            step=start.step,
            samples=start.samples,
            checkpoint=str(start.path or start.weights or ""),
            layout={"world": self.groups.world.size, "dp": self.groups.dp.size, **config.parallel.model_dump()},
            device=self.device.type,
            moved_metrics=moved,
        )
        version = packing_version(wanted["data_identity"].get("packing_version", 1))
        recorder.event("mixture", step=start.step, phases=phases, sources=mixture, **version)
        for key, before, after in changes:
            recorder.say(f"changed since the last attempt: {key} {before!r} -> {after!r}")
            recorder.event("changed", key=key, old=before, new=after)
        for key, before, after in self._changed_meaning(start, wanted):
            recorder.say(f"{other_meaning(key, before, after, who='this run')}: at first they compute something else")
            recorder.event("changed", key=key, old=before, new=after)
        folder.write_config(config.to_yaml())
        first = self.datasets[0]
        folder.keep_tokenizer(first.tokenizer_path, begin_id=first.vocabulary.begin_id, end_id=first.eod_id)
        if config.training.engine == "deepspeed":
            tree = deepspeed_config(config.training, config.optimizer, config.parallel, dp=self.groups.dp.size, overrides=config.deepspeed)
            write_json(folder.deepspeed, tree)
        folder.write_status(
            "running", step=start.step, checkpoint=start.step if start.path and start.path.parent == folder.checkpoints else None
        )
        recorder.trackers.trackers += open_trackers(
            folder.path,
            config.logging,
            name=config.run.name,
            config=config.model_dump(mode="json"),
            step=start.step,
            environ=os.environ,
            warn=self._warn,
        )
        origin = (
            f"from step {start.step} in {start.path}"
            if start.path
            else (f"with the weights of {start.weights}" if start.weights else "from step 0")
        )
        layout = f"dp {self.groups.dp.size} x tp {self.groups.tp.size}, ZeRO {config.parallel.zero_stage}, {config.training.precision}"
        recorder.say(
            f"{folder.path}: attempt {folder.attempt} {origin}; {num_parameters(config.model):,} parameters, {layout}, {self.device.type}"
        )
        for line in mixture_lines(mixture):
            recorder.say(line)
        if notice := vocabulary_notice(config, tokenizer_size=first.vocab_size):
            recorder.say(notice)
        recorder.say(describe_attention(config.model, config.training, document_mask=config.data.document_mask, device=self.device))
        if moved:
            recorder.say(f"{moved} lines of metrics after step {start.step} were moved to {folder.events.name}: those steps are done again")

    def _changed_meaning(self, start: Start, wanted: dict[str, Any]) -> list[tuple[str, Any, Any]]:
        """(key, old, new) of what the weights that are taken were trained with otherwise."""
        if start.origin is not None:
            return changed_meaning(start.origin.identity(), wanted)
        return [] if start.weights is None else changed_meaning_of_folder(start.weights, self.config.model)

    def _warn(self, text: str) -> None:
        show(f"warning: {text}")
        logging.warning(text)

    def end(self, code: int, state: str, message: str) -> None:
        """Record how it ended, wait for the others so that no launcher ends one early, and let go of everything. What goes
        wrong after the record is said, and changes nothing."""
        recorder = self.recorder
        if self.groups.rank == 0:
            recorder.event(state, message=message)
            self.folder.write_status(state, code=code, message=message)
            recorder.say(message)
        self.watchdog.leave()
        try:
            if self.groups.world.group is not None:
                dist.barrier(group=self.groups.world.group)
            recorder.close(title=self.config.run.name)
        except Exception as error:
            self._warn(f"after the end: {type(error).__name__}: {error}")
        self.folder.lock.release()  # the next attempt need not wait for a tracker
        recorder.trackers.finish()
        dist.destroy_process_group()
