"""The training loop: batch, step, record, evaluate, save, until the last step or a request to stop."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from data_pipeline.errors import StopRequested
from launcher.batches import Batches, gather_batch_id
from launcher.checkpointing import Saver, Start
from launcher.config import RunConfig
from launcher.datasets import AnyRows
from launcher.evaluation.heldout import agree, evaluate
from launcher.faults import Faults
from launcher.recorder import Recorder
from launcher.stopping import StopFlag
from launcher.watchdog import Watchdog
from megatron_lite.checkpoint.agree import broadcast_json
from megatron_lite.training.engine import Engine
from megatron_lite.training.schedules import lr_at
from megatron_lite.training.statistics import watched
from megatron_lite.training.step import StepResult, train_step


@dataclass
class Fit:
    """A run on its way from `start` to `total_steps`. All ranks of the world run the same loop in step."""

    config: RunConfig
    engine: Engine
    device: torch.device
    rows: AnyRows
    heldout: AnyRows | None
    start: Start
    total_steps: int
    micro_batch_size: int
    saver: Saver
    recorder: Recorder
    watchdog: Watchdog
    stop: StopFlag
    faults: Faults

    def __post_init__(self) -> None:
        self.step, self.samples, self.tokens = self.start.step, self.start.samples, self.start.tokens
        self._logged_at, self._since_s, self._since_tokens, self._since_wait_s = self.step, 0.0, 0, 0.0
        # What is due at the first step may have been done by the attempt before, or cut off by a stop.
        self._evaluated_at = self.step if broadcast_json(self.recorder.metrics.evaluated(self.step), self.engine.groups.world) else -1

    def run(self) -> None:
        """Train to the end. Raises StopRequested, on all ranks at the same step and after saving, where a rank was asked to."""
        stop = self._evaluate()
        batches = Batches(
            self.rows,
            dp=self.engine.groups.dp,
            global_batch_size=self.config.training.global_batch_size,
            micro_batch_size=self.micro_batch_size,
            document_mask=self.config.data.document_mask,
            device=self.device,
            start_sample=self.samples,
        )
        try:
            while self.step < self.total_steps and not stop:
                stop = self._one_step(batches).stop or self._evaluate()
                if stop or self.step == self.total_steps or self.saver.due(self.step):
                    self._save()
                    stop = stop or (self.step < self.total_steps and self._asked_to_stop())
        finally:
            batches.close()
        if stop:
            raise StopRequested(
                f"stopped at step {self.step} of {self.total_steps} on request ({self.stop.reason or 'of another rank'}); start the same command again to go on"
            )

    def _one_step(self, batches: Batches) -> StepResult:
        began = time.perf_counter()
        batch, step = next(batches), self.step + 1
        self.watchdog.beat(f"in step {step}")
        self.faults.at_step(step)
        lr = lr_at(step, peak=self.config.optimizer.lr, num_steps=self.total_steps, scheduler=self.config.lr_scheduler)
        every = self.config.logging.statistics_interval_steps
        with watched(self.engine, self.config.optimizer) if every and step % every == 0 else nullcontext() as statistics:
            result = train_step(
                self.engine, batch.micro_batches, step=step, lr=lr, seed=self.config.run.seed, stop_requested=self.stop.requested
            )
        details = statistics.record(result.grad_norm) if statistics is not None else {}
        self.step, self.samples, self.tokens = step, self.samples + self.config.training.global_batch_size, self.tokens + result.num_targets
        self._since_s += time.perf_counter() - began
        self._since_tokens, self._since_wait_s = self._since_tokens + result.num_targets, self._since_wait_s + batch.wait_s
        if step % self.config.logging.interval_steps == 0 or step == self.total_steps:
            self._log(result, lr, gather_batch_id(batch.digests, self.engine.groups.dp), details)
        return result

    def _log(self, result: StepResult, lr: float, batch_id: str, details: Mapping[str, float]) -> None:
        record = {
            "step": self.step,
            "tokens": self.tokens,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": lr,
            "batch_id": batch_id,
            "data_wait_s": round(self._since_wait_s, 4),
            **details,
        }
        self.recorder.step(record, seconds=self._since_s, tokens=self._since_tokens, steps=self.step - self._logged_at)
        self._logged_at, self._since_s, self._since_tokens, self._since_wait_s = self.step, 0.0, 0, 0.0

    def _evaluate(self) -> bool:
        """Score the held-out rows where that is due at this step; whether a request to stop cut it short."""
        every = self.config.evaluation.interval_steps
        due = self.step == self.total_steps or (every is not None and self.step % every == 0)
        if self.heldout is None or not due or self._evaluated_at == self.step:
            return False
        found = evaluate(
            self.engine.eval_forward,
            self.heldout,
            groups=self.engine.groups,
            micro_batch_size=self.micro_batch_size,
            max_sequences=self.config.evaluation.max_sequences,
            document_mask=self.config.data.document_mask,
            device=self.device,
            stop=self._stop_in_evaluation,
        )
        if found is None:
            return True
        self._evaluated_at = self.step
        self.recorder.evaluation(self.step, found.record())
        return False

    def _stop_in_evaluation(self) -> bool:
        self.watchdog.beat(f"in the evaluation after step {self.step}")
        self.faults.at_evaluation()
        return self.stop.requested

    def _save(self) -> None:
        self.watchdog.beat(f"saving step {self.step}")
        self.saver.save(self.recorder, step=self.step, samples=self.samples, tokens=self.tokens)
        self.watchdog.beat(f"after saving step {self.step}")

    def _asked_to_stop(self) -> bool:
        """A request that came while saving is heard at once: the step just saved is the one to stop at."""
        return agree(self.stop.requested, self.engine.groups, self.device)
