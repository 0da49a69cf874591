"""Rows of a tensor in blocks: several passes over a block in turn find it in the processor's cache, over the whole tensor they
would each fetch it from memory."""

from __future__ import annotations

from torch import Tensor

_NUMBERS = 1 << 18  # fp32: 1 MiB
FEW = 1 << 14  # numbers, as decoding has them: calls cost more than passes over memory, so blocks gain nothing


def row_blocks(x: Tensor) -> list[slice]:
    """Of x [rows, ...]: blocks of about 1 MiB in fp32 on CPU, one block elsewhere."""
    num_rows = x.shape[0]
    height = max(_NUMBERS * num_rows // max(x.numel(), 1), 1) if x.device.type == "cpu" else max(num_rows, 1)
    return [slice(start, start + height) for start in range(0, num_rows, height)]
