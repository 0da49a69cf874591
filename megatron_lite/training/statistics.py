"""Root mean squares of one step by layer: activations into and out of it, gradients of its parameters. Alike on any layout.

Gradients are read off Adam's second moment, v' = b v + (1 - b) g^2: its sums before and after the update give that of g^2 under
every engine and ZeRO stage, without a copy and without a gradient being gathered.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator

import torch
import torch.distributed as dist

from megatron_lite.checkpoint.slices import logical_slices
from megatron_lite.config import OptimizerConfig
from megatron_lite.layers.watcher import Watcher
from megatron_lite.training.engine import Engine
from megatron_lite.training.stability import clip_factor


class Statistics:
    """Of the step made while it was open. All ranks of the world make the same calls."""

    def __init__(self, engine: Engine, optimizer: OptimizerConfig) -> None:
        self._engine, self._optimizer = engine, optimizer
        self.watcher = Watcher()
        self._before = _second_moments(engine)

    def record(self, grad_norm: float) -> dict[str, float]:
        """{key: rms} over the global batch: activations/LAYER/in and out, logits/log_z (of log sum exp at the targets), gradients/PART
        of the mean loss before clipping, whose norm is `grad_norm`; a PART is a layer, or a parameter beside them."""
        before, after, watcher, world = self._before, _second_moments(self._engine), self.watcher, self._engine.groups.world
        seen, parts = list(watcher.squares), list(after)
        sums = [watcher.squares[key] for key in seen] + [watcher.counts[key] for key in seen]
        sums += [total for part in parts for total in (after[part][0], before[part][0], after[part][1])]
        numbers = torch.stack(sums)
        if world.group is not None:
            dist.all_reduce(numbers, group=world.group)
        found = numbers.tolist()
        record = {key: math.sqrt(found[at] / found[at + len(seen)]) for at, key in enumerate(seen) if found[at + len(seen)]}
        decay, clip = self._optimizer.betas[1], clip_factor(grad_norm, self._optimizer.max_grad_norm)
        for part, at in zip(parts, range(2 * len(seen), len(found), 3), strict=True):
            new, old, count = found[at : at + 3]
            record[f"gradients/{part}"] = math.sqrt(max(new - decay * old, 0.0) / (1.0 - decay) / count) / clip
        return record


@contextlib.contextmanager
def watched(engine: Engine, optimizer: OptimizerConfig) -> Iterator[Statistics]:
    """Look at the one train_step that is made within; its record is asked for afterwards."""
    statistics = Statistics(engine, optimizer)
    engine.model.watcher = statistics.watcher
    try:
        yield statistics
    finally:
        engine.model.watcher = None


def _second_moments(engine: Engine) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """{part of the model: (sum of the second moment, number of elements)} over what this rank alone writes in a checkpoint; the
    same parts in the same order on every rank."""
    named = dict(engine.model.named_parameters())
    zero = torch.zeros((), dtype=torch.float64, device=next(iter(named.values())).device)
    sums = {_part(name): (zero, zero) for name in named}
    for owned in engine.owned_slices():
        if owned.state == "exp_avg_sq" and (owned.spec.cut or engine.groups.tp.rank == 0):
            total, count = sums[_part(owned.parameter_name)]
            for piece in logical_slices(owned, to_write=True):
                total, count = total + piece.view.sum(dtype=torch.float64), count + piece.view.numel()
            sums[_part(owned.parameter_name)] = (total, count)
    return sums


def _part(parameter_name: str) -> str:
    """layers.3.mlp.down.weight -> layers.3; encoder.final_norm.bias -> encoder.final_norm."""
    layer = re.match(r"(.*\.)?layers\.\d+", parameter_name)
    return layer[0] if layer else parameter_name.rpartition(".")[0]
