"""Held-out loss, the same for every layout and batch size."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from data_pipeline.loader import NO_TARGET
from launcher.batches import to_batch
from launcher.datasets import AnyRow, AnyRows
from launcher.metrics import perplexity
from megatron_lite.models.batch import Batch
from megatron_lite.parallel.groups import ProcessGroups

Forward = Callable[[Batch], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Evaluation:
    """Sums over all held-out targets that were scored."""

    loss_sum: float  # nats
    num_targets: int
    num_bytes: int  # UTF-8 bytes of the targets' text
    num_sequences: int

    @property
    def loss(self) -> float:
        """Mean over targets, nats."""
        return self.loss_sum / max(self.num_targets, 1)

    @property
    def perplexity(self) -> float:
        return perplexity(self.loss)

    @property
    def bits_per_byte(self) -> float:
        """Loss per byte of text: comparable between tokenizers."""
        return self.loss_sum / math.log(2) / self.num_bytes if self.num_bytes else math.nan

    def record(self) -> dict[str, float | int]:
        return {
            "eval/loss": self.loss,
            "eval/perplexity": self.perplexity,
            "eval/bits_per_byte": self.bits_per_byte,
            "eval/tokens": self.num_targets,
            "eval/sequences": self.num_sequences,
        }


def evaluate(
    forward: Forward,
    rows: AnyRows,
    *,
    groups: ProcessGroups,
    micro_batch_size: int,
    max_sequences: int | None,
    document_mask: bool,
    device: torch.device,
    stop: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Score at most `max_sequences` rows, spread evenly over all of them. None where a rank was asked to stop meanwhile.

    Every dp rank makes the same number of forward passes of the same shape, missing rows having no targets: unequal numbers
    hang ZeRO stage 3. Communicates (stop) over the world for each pass and the sums over dp at the end.
    """
    chosen = choose_rows(len(rows), max_sequences)
    dp = groups.dp
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for at in range(0, len(chosen), dp.size * micro_batch_size):
        if agree(stop(), groups, device):
            return None
        first = at + dp.rank * micro_batch_size
        found = [rows[number] for number in chosen[first : first + micro_batch_size]]
        filler = _empty(found[0] if found else rows[chosen[0]])
        padded = found + [filler] * (micro_batch_size - len(found))
        loss_sum, count = forward(to_batch(padded, range(micro_batch_size), document_mask=document_mask, device=device))
        num_bytes = sum(row.target_bytes for row in found)
        sums += torch.stack([loss_sum.double(), count.double(), torch.tensor(float(num_bytes), device=device, dtype=torch.float64)])
    if dp.group is not None:
        dist.all_reduce(sums, group=dp.group)
    loss, targets, num_bytes = sums.tolist()
    return Evaluation(loss_sum=loss, num_targets=int(targets), num_bytes=int(num_bytes), num_sequences=len(chosen))


def choose_rows(available: int, wanted: int | None) -> list[int]:
    """Row numbers at even distances: all of them, or `wanted`."""
    count = available if wanted is None else min(available, wanted)
    return [number * available // count for number in range(count)]


def agree(flag: bool, groups: ProcessGroups, device: torch.device) -> bool:
    """Whether the flag is set on any rank of the world. Collective."""
    if groups.world.group is None:
        return flag
    value = torch.tensor(int(flag), device=device)
    dist.all_reduce(value, group=groups.world.group)
    return int(value) > 0


def _empty(row: AnyRow) -> AnyRow:
    return replace(row, targets=np.full_like(row.targets, NO_TARGET), num_targets=0, target_bytes=0)
