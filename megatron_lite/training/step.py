"""One optimizer update on one global batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_lite.models.batch import Batch, DropoutKey
from megatron_lite.training.engine import Engine
from megatron_lite.training.stability import require_finite


@dataclass(frozen=True)
class StepResult:
    loss: float  # mean over all valid targets of the global batch, nats
    grad_norm: float  # before clipping
    num_targets: int  # of the global batch
    stop: bool  # some rank was asked to stop: save and leave, all at this step


def train_step(
    engine: Engine, micro_batches: Sequence[Batch], *, step: int, lr: float, seed: int, stop_requested: bool = False
) -> StepResult:
    """Forward and backward over this rank's micro-batches (as many on every rank), then one update; `step` counts from 1.

    Every target weighs the same, wherever it lies. Two all-reduces beside the engine's own: (targets, stop) over the world
    before the first backward, the loss over dp before the update. Raises NonFiniteError before any weight is touched.
    """
    groups = engine.groups
    num_targets, stop = _agree(engine, micro_batches, stop_requested)
    loss_sum = torch.zeros((), dtype=torch.float64, device=micro_batches[0].inputs.device)
    for number, batch in enumerate(micro_batches, start=1):
        micro_loss, _ = engine.forward(batch, DropoutKey(seed, step))
        engine.backward(micro_loss * (groups.dp.size / num_targets), last=number == len(micro_batches))
        loss_sum += micro_loss.detach()
    if groups.dp.group is not None:
        dist.all_reduce(loss_sum, group=groups.dp.group)
    loss = require_finite(loss_sum.item() / num_targets, what=f"the loss of step {step}")
    grad_norm = engine.step(lr)
    return StepResult(loss=loss, grad_norm=grad_norm, num_targets=num_targets, stop=stop)


def _agree(engine: Engine, micro_batches: Sequence[Batch], stop_requested: bool) -> tuple[int, bool]:
    """The valid targets of the global batch, at least 1, and whether any rank was asked to stop."""
    groups = engine.groups
    targets = torch.stack([(batch.targets >= 0).sum() for batch in micro_batches]).sum()
    counts = torch.stack([targets, torch.full_like(targets, int(stop_requested))])
    if groups.world.group is not None:
        dist.all_reduce(counts, group=groups.world.group)
    total, stops = counts.tolist()
    replicas = groups.world.size // groups.dp.size  # tp ranks hold the same rows
    return max(total // replicas, 1), stops > 0
