"""Process groups of the mesh axes, made once and passed to whoever communicates: there is no global state here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch.distributed as dist

from megatron_lite.parallel.grid import RankGrid


@dataclass(frozen=True)
class Axis:
    """This rank's group along a mesh axis (or several). `group` is None when the size is 1: nothing is communicated."""

    name: str
    size: int = 1
    rank: int = 0  # this process's place in the group
    group: dist.ProcessGroup | None = None
    ranks: tuple[int, ...] = (0,)  # global ranks of the group, in order


@dataclass(frozen=True)
class ProcessGroups:
    """All groups of this rank. Collective to build: every rank of the world makes the same calls in the same order."""

    grid: RankGrid
    rank: int
    tp: Axis
    dp: Axis
    pp: Axis
    cp: Axis
    ep: Axis
    model: Axis  # pp x tp: the ranks that hold one replica of the model
    world: Axis
    sequence_parallel: bool = False
    _subgroups: dict[tuple[str, int], Axis] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def single(cls) -> ProcessGroups:
        """One process, no torch.distributed."""
        return cls(
            grid=RankGrid(),
            rank=0,
            tp=Axis("tp"),
            dp=Axis("dp"),
            pp=Axis("pp"),
            cp=Axis("cp"),
            ep=Axis("ep"),
            model=Axis("model"),
            world=Axis("world"),
        )

    @classmethod
    def create(cls, grid: RankGrid, *, sequence_parallel: bool = False) -> ProcessGroups:
        """Make the groups over the initialised default group."""
        if grid.world_size == 1 and not dist.is_initialized():
            return cls.single()
        assert dist.get_world_size() == grid.world_size, (dist.get_world_size(), grid)
        rank = dist.get_rank()
        ranks = tuple(range(grid.world_size))
        return cls(
            grid=grid,
            rank=rank,
            tp=_make("tp", rank, grid.groups("tp")),
            dp=_make("dp", rank, grid.groups("dp")),
            pp=_make("pp", rank, grid.groups("pp")),
            cp=_make("cp", rank, grid.groups("cp")),
            ep=_make("ep", rank, grid.groups("ep")),
            model=_make("model", rank, grid.groups("pp", "tp")),
            world=Axis("world", len(ranks), rank, dist.group.WORLD if len(ranks) > 1 else None, ranks),
            sequence_parallel=sequence_parallel,
        )

    def subgroup(self, axis: str, size: int) -> Axis:
        """This rank's run of `size` neighbours on the axis. Collective on first use: all ranks ask in the same order."""
        if size == 1:
            return Axis(f"{axis}/{size}", ranks=(self.rank,))
        if (axis, size) not in self._subgroups:
            self._subgroups[axis, size] = _make(f"{axis}/{size}", self.rank, self.grid.subgroups(axis, size))
        return self._subgroups[axis, size]


def _make(name: str, rank: int, groups: list[list[int]]) -> Axis:
    mine = Axis(name)
    for ranks in groups:
        group = new_group(ranks) if len(ranks) > 1 else None
        if rank in ranks:
            mine = Axis(name, len(ranks), ranks.index(rank), group, tuple(ranks))
    return mine


def new_group(ranks: Sequence[int], **settings: Any) -> dist.ProcessGroup:
    """torch's own `new_group`, whose declared type differs between versions of torch."""
    group: Any = dist.new_group(list(ranks), **settings)
    return cast("dist.ProcessGroup", group)
