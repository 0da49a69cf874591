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

    `blocks` maps logical names to rows. all-gather or nothing over tp in forward, its partner in backward.
    """

    def __init__(self, in_features: int, blocks: Mapping[str, int], groups: ProcessGroups) -> None:
        super().__init__()
        self.tp = groups.tp
        self.weight = parameter_of(cut_rows(blocks, in_features, groups.tp))

    def forward(self, x: Tensor, *, split: bool) -> Tensor:
        return linear(enter_tp(x, self.tp, split=split), self.weight)


class RowLinear(nn.Module):
    """[B, S, in/tp] -> [B, S/tp or S, out]: reduce-scatter or all-reduce over tp in forward, its partner in backward."""

    def __init__(self, in_features: int, out_features: int, groups: ProcessGroups, *, name: str) -> None:
        super().__init__()
        self.tp = groups.tp
        self.weight = parameter_of(cut_columns(name, out_features, in_features, groups.tp))

    def forward(self, x: Tensor, *, split: bool) -> Tensor:
        return leave_tp(linear(x, self.weight), self.tp, split=split)
