"""Matrices cut over tp. Weights are [out, in]; a cut of the rows is *column parallel*, of the columns *row parallel*
(Shoeybi et al. 2019). With `split` the activations outside are split along S (Korthikanti et al. 2022)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from megatron_lite.layers.matmul import linear
from megatron_lite.parallel.collectives import copy_to, gather_sequence, reduce_from, scatter_sequence
from megatron_lite.parallel.groups import Axis, ProcessGroups
from megatron_lite.parallel.shard_spec import Piece, ShardSpec, attach


def cut_rows(blocks: Mapping[str, int], num_columns: int, tp: Axis) -> ShardSpec:
    """Logical [rows, num_columns] matrices by name, each cut into tp equal runs of rows; the rank's runs one after the other."""
    pieces, offset = [], 0
    for name, rows in blocks.items():
        assert rows % tp.size == 0, f"{name}: {rows} rows over tp {tp.size}"
        mine = rows // tp.size
        pieces.append(Piece(name, (rows, num_columns), (tp.rank * mine, 0), (mine, num_columns), offset))
        offset += mine * num_columns
    return ShardSpec(tuple(pieces), (offset // num_columns, num_columns), cut=tp.size > 1)


def cut_columns(name: str, num_rows: int, num_columns: int, tp: Axis) -> ShardSpec:
    """A logical [num_rows, num_columns] matrix cut into tp equal runs of columns."""
    assert num_columns % tp.size == 0, f"{name}: {num_columns} columns over tp {tp.size}"
    mine = num_columns // tp.size
    return ShardSpec((Piece(name, (num_rows, num_columns), (0, tp.rank * mine), (num_rows, mine)),), (num_rows, mine), cut=tp.size > 1)


def cut_vectors(blocks: Mapping[str, int], tp: Axis) -> ShardSpec:
    """Logical vectors by name, cut and laid out as cut_rows does with the rows of matrices: their biases."""
    pieces, offset = [], 0
    for name, size in blocks.items():
        assert size % tp.size == 0, f"{name}: {size} elements over tp {tp.size}"
        mine = size // tp.size
        pieces.append(Piece(name, (size,), (tp.rank * mine,), (mine,), offset))
        offset += mine
    return ShardSpec(tuple(pieces), (offset,), cut=tp.size > 1)


def replicated_vector(name: str, size: int) -> ShardSpec:
    """A logical vector that every tp rank holds whole and applies to activations that may be split along S."""
    return ShardSpec((Piece(name, (size,), (0,), (size,)),), (size,), cut=False, gradient="partial_under_sp")


def bias_of(weight: str) -> str:
    """The logical name of the bias that goes with a matrix of this name: o.weight -> o.bias."""
    return f"{weight.removesuffix('.weight')}.bias"


def parameter_of(spec: ShardSpec) -> nn.Parameter:
    """An uninitialised parameter of the spec's local shape, on the current default device."""
    return attach(nn.Parameter(torch.empty(spec.local_shape)), spec)


def enter_tp(x: Tensor, tp: Axis, *, split: bool) -> Tensor:
    """Into a region where every rank needs all of x: [B, S/tp or S, D] -> [B, S, D]."""
    return gather_sequence(x, tp) if split else copy_to(x, tp)


def leave_tp(x: Tensor, tp: Axis, *, split: bool) -> Tensor:
    """Out of it, where every rank has a partial sum: [B, S, D] -> [B, S/tp or S, D]."""
    return scatter_sequence(x, tp) if split else reduce_from(x, tp)


class ColumnLinear(nn.Module):
    """Several matrices that share their input, as one product: [B, S/tp or S, in] -> [B, S, sum(rows)/tp].

    `blocks` maps logical names to rows; with `bias` each matrix has one, cut with its rows. all-gather or nothing over tp in
    forward, its partner in backward.
    """

    def __init__(self, in_features: int, blocks: Mapping[str, int], groups: ProcessGroups, *, bias: bool = False) -> None:
        super().__init__()
        self.tp = groups.tp
        self.weight = parameter_of(cut_rows(blocks, in_features, groups.tp))
        biases = {bias_of(name): rows for name, rows in blocks.items()}
        self.bias = parameter_of(cut_vectors(biases, groups.tp)) if bias else None

    def forward(self, x: Tensor, *, split: bool) -> Tensor:
        return linear(enter_tp(x, self.tp, split=split), self.weight, self.bias)


class RowLinear(nn.Module):
    """[B, S, in/tp] -> [B, S/tp or S, out]: reduce-scatter or all-reduce over tp in forward, its partner in backward.

    The bias is the same on every rank and added once, to the sum.
    """

    def __init__(self, in_features: int, out_features: int, groups: ProcessGroups, *, name: str, bias: bool = False) -> None:
        super().__init__()
        self.tp = groups.tp
        self.weight = parameter_of(cut_columns(name, out_features, in_features, groups.tp))
        self.bias = parameter_of(replicated_vector(bias_of(name), out_features)) if bias else None

    def forward(self, x: Tensor, *, split: bool) -> Tensor:
        if self.tp.size == 1:
            return linear(x, self.weight, self.bias)
        out = leave_tp(linear(x, self.weight), self.tp, split=split)
        return out if self.bias is None else out + self.bias
