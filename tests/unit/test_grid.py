"""The rank grid: if this fails, collectives run over the wrong ranks and numbers are silently mixed."""

from itertools import product

import pytest

from megatron_lite.parallel.grid import AXES, RankGrid

SHAPES = [dict(zip(AXES, sizes)) for sizes in product((1, 2), (1, 3), (1, 2), (1, 2), (1, 2, 4))]


@pytest.mark.parametrize("sizes", SHAPES)
@pytest.mark.parametrize("axes", [("tp",), ("dp",), ("pp",), ("pp", "tp"), ("dp", "cp")])
def test_groups_partition_the_world_and_vary_only_along_their_axes(sizes: dict, axes: tuple[str, ...]) -> None:
    """B102: each rank in exactly one group, whose members agree on every other coordinate."""
    grid = RankGrid(**sizes)
    groups = grid.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(grid.world_size))
    for group in groups:
        coordinates = [grid.coordinates(rank) for rank in group]
        for axis in AXES:
            seen = {place[axis] for place in coordinates}
            assert len(seen) == (grid.size(axis) if axis in axes else 1)


def test_tp_ranks_are_neighbours_and_rank_formula_holds() -> None:
    """rank = (((pp*DP + dp)*EP + ep)*CP + cp)*TP + tp, so that tp stays inside a node."""
    grid = RankGrid(pp=2, dp=3, tp=4)
    assert grid.groups("tp")[0] == [0, 1, 2, 3]
    assert grid.groups("dp")[0] == [0, 4, 8]
    assert grid.coordinates(17) == {"pp": 1, "dp": 1, "ep": 0, "cp": 0, "tp": 1}


def test_subgroups_are_runs_of_neighbours() -> None:
    """The ranks that share a KV head are next to each other on tp."""
    assert RankGrid(dp=2, tp=4).subgroups("tp", 2) == [[0, 1], [2, 3], [4, 5], [6, 7]]
