"""If this fails, a checkpoint puts a weight's elements in the wrong places."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from megatron_lite.checkpoint.slices import Block, OwnedSlice, logical_slices, overlap, padding, window
from megatron_lite.parallel.shard_spec import Piece, ShardSpec
from tests.checkpoint_fakes import SHAPES, specs


def _places(block: Block, first: int, last: int) -> np.ndarray:
    """Flat positions in the logical tensor of a flat range of the block, by indexing."""
    numbers = np.arange(int(np.prod(block.global_shape, dtype=int))).reshape(block.global_shape)
    return numbers[tuple(slice(start, start + size) for start, size in zip(block.start, block.shape))].reshape(-1)[first:last]


def _random_block(dice: random.Random, shape: tuple[int, ...]) -> tuple[Block, int, int]:
    start = tuple(dice.randrange(size) if dim < 2 else 0 for dim, size in enumerate(shape))
    size = tuple(dice.randint(1, full - at) if dim < 2 else full for dim, (full, at) in enumerate(zip(shape, start)))
    block = Block("x", shape, start, size)
    first = dice.randrange(block.numel)
    return block, first, dice.randint(first + 1, block.numel)


@pytest.mark.parametrize("shape", [(), (1,), (37,), (5, 7), (6, 4, 3), (3, 4, 2, 2), (1, 9), (9, 1)])
def test_flat_ranges_are_rectangles(shape: tuple[int, ...]) -> None:
    """A flat range is at most three disjoint rectangles that hold exactly the elements which indexing gives."""
    dice = random.Random(repr(shape))
    for _ in range(200):
        block, first, last = _random_block(dice, shape)
        columns = int(np.prod(shape[1:], dtype=int)) if len(shape) > 1 else int(np.prod(shape, dtype=int))
        matrix = np.arange(int(np.prod(shape, dtype=int))).reshape(-1, columns)
        rectangles = block.rectangles(first, last)
        assert len(rectangles) <= 3
        got = np.concatenate([matrix[top:bottom, left:right].reshape(-1) for top, bottom, left, right in rectangles])
        assert got.tolist() == _places(block, first, last).tolist()


@pytest.mark.parametrize("shape", [(), (37,), (5, 7), (6, 4, 3)])
def test_copies_between_ragged_ranges(shape: tuple[int, ...]) -> None:
    """Copying the overlaps of any two ragged ranges moves exactly the elements that both hold, each once."""
    dice = random.Random(repr(shape))
    for _ in range(200):
        (source, first, last), (target, begin, end) = _random_block(dice, shape), _random_block(dice, shape)
        held = torch.from_numpy(_places(source, first, last)).float()
        wanted = torch.full((end - begin + 2,), -1.0)[1:-1]  # a view into something larger
        moved = 0
        for rectangle in overlap(source.rectangles(first, last), target.rectangles(begin, end)):
            window(wanted, target, begin, rectangle).copy_(window(held, source, first, rectangle))
            moved += (rectangle[1] - rectangle[0]) * (rectangle[3] - rectangle[2])
        places = _places(target, begin, end)
        known = np.isin(places, _places(source, first, last))
        assert wanted.tolist() == np.where(known, places, -1).tolist()
        assert moved == known.sum()


def test_padding_and_pieces_cover_a_parameter() -> None:
    """Pieces and padding together are the whole local parameter, also where a rank has padding only."""
    spec = ShardSpec((Piece("embedding.weight", (5, 2), (3, 0), (2, 2)),), (4, 2), cut=True)
    view = torch.arange(8.0)
    owned = OwnedSlice("embedding.weight", spec, "master", 0, 8, view, 3, 6)
    assert [part.view.tolist() for part in logical_slices(owned, to_write=False)] == [[0, 1, 2, 3]]
    assert [(part.first, part.last) for part in logical_slices(owned, to_write=True)] == [(3, 4)]
    assert [part.tolist() for part in padding(owned)] == [[4, 5, 6, 7]]
    nothing = ShardSpec((Piece("embedding.weight", (5, 2), (5, 0), (0, 2)),), (4, 2), cut=True)
    assert list(logical_slices(OwnedSlice("e", nothing, "master", 2, 6, torch.ones(4)), to_write=True)) == []


def test_fakes_cover_their_tensors() -> None:
    """The fake layouts of the other tests are themselves complete, at every tp size."""
    for tp in (1, 2, 4):
        counts = {name: np.zeros(shape) for name, shape in SHAPES.items()}
        for rank in range(tp):
            for spec in specs(tp, rank).values():
                for piece in spec.pieces if spec.cut or rank == 0 else ():
                    counts[piece.name][tuple(slice(at, at + size) for at, size in zip(piece.start, piece.shape))] += 1
        assert all((count == 1).all() for count in counts.values())
