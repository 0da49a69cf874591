"""Collectives of the forward pass, each with what its backward does. Over an axis of size 1 nothing happens.

| function         | forward                    | backward                                          |
|------------------|----------------------------|---------------------------------------------------|
| copy_to          | nothing                    | all-reduce                                        |
| reduce_from      | all-reduce                 | nothing                                           |
| gather_sequence  | all-gather over dim 1      | reduce-scatter over dim 1                         |
| scatter_sequence | reduce-scatter over dim 1  | all-gather over dim 1                             |
| gather_rows      | all-gather over dim 0      | reduce-scatter over dim 0, summed in fp32         |
| gather_last      | all-gather over the last   | the rank's own block                              |
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.parallel.groups import Axis

# ------------------------------------------------------------------------------------------------ plain collectives


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """The sum of x over the axis, in a new tensor."""
    total = x.clone(memory_format=torch.contiguous_format)
    if axis.size > 1:
        dist.all_reduce(total, group=axis.group)
    return total


def all_gather(x: Tensor, axis: Axis, *, dim: int) -> Tensor:
    """The ranks' blocks one after the other along `dim`, in the order of the axis."""
    if axis.size == 1:
        return x
    dim = dim % x.dim()
    blocks = x.new_empty((axis.size * x.shape[0], *x.shape[1:]))
    dist.all_gather_single(blocks, x.contiguous(), group=axis.group)
    return blocks.unflatten(0, (axis.size, -1)).movedim(0, dim).flatten(dim, dim + 1)


def reduce_scatter(x: Tensor, axis: Axis, *, dim: int) -> Tensor:
    """This rank's block along `dim` of the sum of x over the axis."""
    if axis.size == 1:
        return x
    blocks = x.unflatten(dim, (axis.size, x.shape[dim] // axis.size)).movedim(dim, 0).contiguous()
    mine = torch.empty_like(blocks[0])
    dist.reduce_scatter_single(mine, blocks.flatten(0, 1), group=axis.group)
    return mine


def own_block(x: Tensor, axis: Axis, *, dim: int) -> Tensor:
    """This rank's block of x along `dim`: a view, nothing is communicated."""
    width = x.shape[dim] // axis.size
    return x.narrow(dim, axis.rank * width, width)


# ---------------------------------------------------------------------------------------------------- autograd pairs


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return all_reduce(gradient, ctx.axis), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return all_reduce(x, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return all_gather(x, axis, dim=dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return reduce_scatter(gradient, ctx.axis, dim=ctx.dim), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return reduce_scatter(x, axis, dim=dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return all_gather(gradient, ctx.axis, dim=ctx.dim), None, None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return all_gather(x, axis, dim=0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return reduce_scatter(gradient.float(), ctx.axis, dim=0).to(gradient.dtype), None


class _GatherLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return all_gather(x, axis, dim=-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return own_block(gradient, ctx.axis, dim=gradient.dim() - 1), None


def copy_to(x: Tensor, axis: Axis) -> Tensor:
    """Into a region where each rank uses all of x for its own part: the parts' gradients are summed."""
    return x if axis.size == 1 else _CopyTo.apply(x, axis)


def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """Out of a region where each rank made a partial sum of x."""
    return x if axis.size == 1 else _ReduceFrom.apply(x, axis)


def gather_sequence(x: Tensor, axis: Axis) -> Tensor:
    """[B, S/axis, ...] -> [B, S, ...], into a region where each rank uses all of it for its own part."""
    return x if axis.size == 1 else _Gather.apply(x, axis, 1)


def scatter_sequence(x: Tensor, axis: Axis) -> Tensor:
    """Partial sums [B, S, ...] -> the rank's block of their sum, [B, S/axis, ...]."""
    return x if axis.size == 1 else _Scatter.apply(x, axis, 1)


def gather_rows(weight: Tensor, axis: Axis) -> Tensor:
    """[R/axis, ...] -> [R, ...]: a weight that the axis shares, each rank owning a block of its rows."""
    return weight if axis.size == 1 else _GatherRows.apply(weight, axis)


def gather_last(x: Tensor, axis: Axis) -> Tensor:
    """[..., N/axis] -> [..., N] on every rank, all of which then do the same with it."""
    return x if axis.size == 1 else _GatherLast.apply(x, axis)
