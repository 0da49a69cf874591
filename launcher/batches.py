"""The global batch of a step, as this rank's micro-batches."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, tee

import numpy as np
import torch

from data_pipeline.loader import Prefetcher, batch_id
from data_pipeline.pair_loader import PairRow
from launcher.datasets import AnyRow, AnyRows
from megatron_lite.checkpoint.agree import gather_bytes
from megatron_lite.models.batch import Batch
from megatron_lite.parallel.groups import Axis

PREFETCHED = 2


@dataclass(frozen=True)
class GlobalBatch:
    """This data-parallel rank's share of a global batch, and what of it all ranks need to name the whole."""

    micro_batches: list[Batch]
    digests: list[bytes]  # of this rank's rows
    wait_s: float  # how long the training loop waited for the rows


class Batches(Iterator[GlobalBatch]):
    """Global batches from sample `start_sample` on. Sample numbers alone decide the rows: of each global batch, data-parallel
    rank d takes the d-th run of global_batch_size / dp samples; all ranks of its tp group take the same."""

    def __init__(
        self,
        rows: AnyRows,
        *,
        dp: Axis,
        global_batch_size: int,
        micro_batch_size: int,
        document_mask: bool,
        device: torch.device,
        start_sample: int,
    ) -> None:
        share = global_batch_size // dp.size
        assert share * dp.size == global_batch_size and share % micro_batch_size == 0, (global_batch_size, dp.size, micro_batch_size)
        self._micro_batch_size, self._document_mask, self._device = micro_batch_size, document_mask, device
        to_read, self._samples = tee(range(first, first + share) for first in count(start_sample + dp.rank * share, global_batch_size))
        self._prefetcher: Prefetcher[AnyRow] = Prefetcher(rows, to_read, depth=PREFETCHED, num_threads=rows.num_threads)

    def __next__(self) -> GlobalBatch:
        began = time.perf_counter()
        rows = next(self._prefetcher)
        wait_s = time.perf_counter() - began
        samples, size = next(self._samples), self._micro_batch_size
        return GlobalBatch(
            micro_batches=[
                to_batch(rows[at : at + size], samples[at : at + size], document_mask=self._document_mask, device=self._device)
                for at in range(0, len(rows), size)
            ],
            digests=[row.digest() for row in rows],
            wait_s=wait_s,
        )

    def close(self) -> None:
        self._prefetcher.close()


def to_batch(rows: Sequence[AnyRow], samples: Sequence[int], *, document_mask: bool, device: torch.device) -> Batch:
    """Rows as tensors on the device; pairs are always kept apart."""
    batch = Batch.from_rows(
        np.stack([row.inputs for row in rows]),
        np.stack([row.targets for row in rows]),
        [row.segment_starts for row in rows],
        list(samples),
        document_mask=document_mask,
        device=device,
    )
    pairs = [row for row in rows if isinstance(row, PairRow)]
    return batch.with_source(np.stack([row.source for row in pairs]), [row.source_starts for row in pairs]) if pairs else batch


def gather_batch_id(digests: Sequence[bytes], dp: Axis) -> str:
    """The name of the global batch, on dp rank 0 (empty on others). Communicates over dp."""
    parts = gather_bytes(b"".join(digests), dp)
    joined = b"".join(parts)
    return batch_id([joined[at : at + 32] for at in range(0, len(joined), 32)]) if parts else ""
