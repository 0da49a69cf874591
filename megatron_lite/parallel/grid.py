"""Which ranks form which group: pure arithmetic, no process group."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

AXES = ("pp", "dp", "ep", "cp", "tp")  # outermost first: tp ranks are neighbours, so they share a node


@dataclass(frozen=True)
class RankGrid:
    """Every rank of the world at its place on the mesh axes."""

    pp: int = 1
    dp: int = 1
    ep: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.ep * self.cp * self.tp

    def size(self, axis: str) -> int:
        assert axis in AXES, axis
        return int(getattr(self, axis))

    def ranks(self) -> np.ndarray:
        """int[pp, dp, ep, cp, tp]: the rank at each coordinate."""
        return np.arange(self.world_size).reshape([self.size(axis) for axis in AXES])

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where the rank stands on each axis."""
        return {axis: int(place) for axis, place in zip(AXES, np.unravel_index(rank, self.ranks().shape))}

    def groups(self, *axes: str) -> list[list[int]]:
        """The groups that span these axes: in each, all other coordinates are equal. Every rank is in exactly one."""
        kept = [AXES.index(axis) for axis in sorted(axes, key=AXES.index)]
        others = [place for place in range(len(AXES)) if place not in kept]
        grid = self.ranks().transpose(others + kept)
        width = int(np.prod([self.size(AXES[place]) for place in kept], dtype=int))
        return [[int(rank) for rank in row] for row in grid.reshape(-1, width)]

    def subgroups(self, axis: str, size: int) -> list[list[int]]:
        """Each group of the axis cut into runs of `size` neighbours."""
        assert self.size(axis) % size == 0, (axis, self.size(axis), size)
        return [group[start : start + size] for group in self.groups(axis) for start in range(0, len(group), size)]
