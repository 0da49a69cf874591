"""What a local parameter is of the logical model: the one truth that init, checkpoints, gradient sums and tests derive from.

A *logical* tensor is named as the maths names it (q, k, v apart; vocabulary unpadded). A local parameter holds, one after
the other in row-major order, blocks of one or more logical tensors, and perhaps padding that belongs to none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

# How a parameter's gradient on one tp rank relates to the true one:
#   full              the same on every tp rank (replicated), or the rank's own block (cut): nothing to sum
#   partial           each tp rank has a part, always: sum over tp
#   partial_under_sp  each tp rank has a part when activations are split along the sequence: sum over tp then
GradientKind = Literal["full", "partial", "partial_under_sp"]


@dataclass(frozen=True)
class Piece:
    """A block of a logical tensor, lying contiguously in the local parameter."""

    name: str  # logical name
    global_shape: tuple[int, ...]
    start: tuple[int, ...]  # the block's first index in the logical tensor
    shape: tuple[int, ...]  # the block's shape; of the same number of dims
    offset: int = 0  # elements of the local parameter (row-major) before the block

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class ShardSpec:
    """One local parameter: its blocks of logical tensors, and how its gradient is made whole."""

    pieces: tuple[Piece, ...]
    local_shape: tuple[int, ...]
    cut: bool  # differs between tp ranks; else every tp rank holds the same
    gradient: GradientKind = "full"

    def __post_init__(self) -> None:
        assert not (self.cut and self.gradient != "full"), "a cut parameter's gradient is its own"
        end = 0
        for piece in sorted(self.pieces, key=lambda piece: piece.offset):
            assert piece.offset >= end, f"{piece.name} overlaps its neighbour"
            end = piece.offset + piece.numel
        assert end <= math.prod(self.local_shape), (self.pieces, self.local_shape)

    def sums_over_tp(self, *, sequence_parallel: bool) -> bool:
        """Whether the gradient must be summed over tp after backward."""
        return self.gradient == "partial" or (self.gradient == "partial_under_sp" and sequence_parallel)


def attach(parameter: torch.nn.Parameter, spec: ShardSpec) -> torch.nn.Parameter:
    """Put the spec on the parameter, with the mark by which DeepSpeed counts a cut parameter on every tp rank."""
    assert tuple(parameter.shape) == spec.local_shape, (tuple(parameter.shape), spec)
    parameter.shard_spec = spec  # type: ignore[attr-defined]
    parameter.tensor_model_parallel = spec.cut  # type: ignore[attr-defined]
    return parameter


def spec_of(parameter: torch.Tensor) -> ShardSpec:
    """The parameter's spec; every parameter of a model has one."""
    spec = getattr(parameter, "shard_spec", None)
    assert isinstance(spec, ShardSpec), "a parameter without a shard_spec"
    return spec
