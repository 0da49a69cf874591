"""Faults that the parity test must notice. Each is what a real bug of its kind would do, put in for one run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from megatron_lite.models.batch import Batch, DropoutKey
from megatron_lite.parallel import collectives, shard_spec
from megatron_lite.training.engine_deepspeed import DeepSpeedEngine


@contextlib.contextmanager
def planted(fault: str | None) -> Iterator[None]:
    """Run with the fault of this name, or with none."""
    with contextlib.nullcontext() if fault is None else FAULTS[fault]():
        yield


def _missing_mark() -> Any:
    """The down projection is not marked as cut: its norm counts on the first tp rank only."""
    attach = shard_spec.attach

    def unmarked(parameter: torch.nn.Parameter, spec: shard_spec.ShardSpec) -> torch.nn.Parameter:
        attach(parameter, spec)
        if any(piece.name.endswith("down.weight") for piece in spec.pieces):
            parameter.tensor_model_parallel = False  # type: ignore[attr-defined]
        return parameter

    return mock.patch("megatron_lite.layers.linear.attach", unmarked)


def _missing_sum() -> Any:
    """Norm gains under sequence parallel keep each tp rank's part of their gradient."""
    return mock.patch("megatron_lite.training.engine_deepspeed.register_gradient_sums", lambda model, groups: [])


def _loss_per_rank() -> Any:
    """Each dp rank averages over its own targets, and the ranks' means are averaged; what is logged stays right."""
    forward, backward = DeepSpeedEngine.forward, DeepSpeedEngine.backward
    own = 0

    def counted(engine: DeepSpeedEngine, batch: Batch, dropout: DropoutKey | None) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal own
        loss, count = forward(engine, batch, dropout)
        own = int(count)
        return loss, count

    def averaged(engine: DeepSpeedEngine, loss: torch.Tensor, *, last: bool) -> None:
        total = torch.tensor(own)
        torch.distributed.all_reduce(total, group=engine.groups.dp.group)
        backward(engine, loss * (int(total) / own / engine.groups.dp.size), last=last)

    return mock.patch.multiple(DeepSpeedEngine, forward=counted, backward=averaged)


def _doubled_kv() -> Any:
    """The gradient of key and value heads that several tp ranks share is counted twice."""

    def doubled(weight: torch.Tensor, axis: Any) -> torch.Tensor:
        gathered = collectives.gather_rows(weight, axis)
        gathered.register_hook(lambda gradient: 2 * gradient)
        return gathered

    return mock.patch("megatron_lite.layers.attention.gather_rows", doubled)


FAULTS = {
    "missing tp mark": _missing_mark,
    "missing gradient sum": _missing_sum,
    "loss per rank": _loss_per_rank,
    "doubled KV gradient": _doubled_kv,
}
