"""Gradients of replicated parameters that each tp rank has only a part of: summed as they come out of backward."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megatron_lite.parallel.groups import Axis, ProcessGroups
from megatron_lite.parallel.shard_spec import spec_of


def register_gradient_sums(model: nn.Module, groups: ProcessGroups) -> list[RemovableHandle]:
    """Hook every parameter whose spec says so: its gradient is summed over tp, in fp32, once for each backward.

    A tensor hook runs before any engine sees the gradient, so this holds under every ZeRO stage.
    """
    if groups.tp.size == 1:
        return []
    return [
        parameter.register_hook(_summed_over(groups.tp))
        for parameter in model.parameters()
        if spec_of(parameter).sums_over_tp(sequence_parallel=groups.sequence_parallel)
    ]


def _summed_over(axis: Axis) -> Callable[[Tensor], Tensor]:
    def hook(gradient: Tensor) -> Tensor:
        total = gradient.float() if gradient.dtype.itemsize < 4 else gradient.clone()
        dist.all_reduce(total, group=axis.group)
        return total.to(gradient.dtype)

    return hook
