"""If this fails, positions or document pieces of a row are off by one."""

import numpy as np
import torch

from megatron_lite.layers.kernels import AttentionMask
from megatron_lite.models.batch import Batch


def test_pieces_and_positions() -> None:
    """B030, B031: [7 8 E | 9 9 E | 5] has positions 0 1 2 0 1 2 0 and three triangular blocks, from stored starts."""
    row = np.array([[7, 8, 0, 9, 9, 0, 5]])
    batch = Batch.from_rows(row, row, [[0, 3, 6]], [11], document_mask=True)
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 2, 0]]
    assert batch.segments is not None
    allowed = AttentionMask.of_segments(batch.segments).as_blocks(7, 7, torch.device("cpu"))[0, 0]
    expected = torch.block_diag(torch.ones(3, 3), torch.ones(3, 3), torch.ones(1, 1)).tril().bool()
    assert torch.equal(allowed, expected)
    assert batch.samples.tolist() == [11] and batch.num_rows == 1 and batch.length == 7


def test_without_the_mask_a_row_is_one_text() -> None:
    """B029: with isolation off, nothing restarts; one document a row needs no mask at all."""
    row = np.array([[7, 8, 0, 9]])
    for batch in (
        Batch.from_rows(row, row, [[0, 3]], [0], document_mask=False),
        Batch.from_rows(row, row, [[0]], [0], document_mask=True),
    ):
        assert batch.segments is None
        assert batch.positions.tolist() == [[0, 1, 2, 3]]


def test_inputs_may_be_narrow_and_read_only() -> None:
    """Loaders hand out int32 views of memory maps: the model gets int64 of its own."""
    row = np.array([[1, 2, -100]], dtype=np.int32)
    row.flags.writeable = False
    batch = Batch.from_rows(row, row, [[0]], np.array([3], dtype=np.int32), document_mask=True)
    assert batch.inputs.dtype is torch.int64 and batch.targets[0, 2] == -100
