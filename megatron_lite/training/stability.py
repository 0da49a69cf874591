"""The global gradient norm, clipping, and the checks that keep a non-finite number away from the weights."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist

from data_pipeline.errors import NonFiniteError
from megatron_lite.parallel.groups import ProcessGroups
from megatron_lite.parallel.shard_spec import ShardSpec


@torch.no_grad()
def global_norm(gradients: Iterable[tuple[ShardSpec, torch.Tensor]], groups: ProcessGroups) -> torch.Tensor:
    """L2 norm over the whole model of gradients that are already summed over dp; a float64 scalar, the same on every rank.

    A cut parameter counts on every rank of the model axes, a replicated one on the first tp rank only. All-reduces one
    number over pp x tp.
    """
    squares: list[torch.Tensor] = []
    for spec, gradient in gradients:
        if spec.cut or groups.tp.rank == 0:
            squares.append(torch.linalg.vector_norm(gradient, dtype=torch.float64).square())
        else:
            squares.append(torch.zeros((), dtype=torch.float64, device=gradient.device))
    total = torch.stack(squares).sum()
    if groups.model.group is not None:
        dist.all_reduce(total, group=groups.model.group)
    return total.sqrt()


def clip_factor(norm: float, max_norm: float | None) -> float:
    """What to multiply the gradients by, so that their norm is at most max_norm; 1 where max_norm is 0 or None (off)."""
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm else 1.0


def require_finite(value: float, *, what: str) -> float:
    """The value; raises NonFiniteError where it is not finite. Call it with a number that is the same on every rank."""
    if not math.isfinite(value):
        raise NonFiniteError(
            f"{what} is {value}: stopped before the update, so the weights and the last checkpoint are those of the step before. "
            "Look at the loss of the steps before in metrics.jsonl; a lower optimizer.lr, a longer lr_scheduler.warmup_steps or a "
            "smaller optimizer.max_grad_norm helps against divergence"
        )
    return value
