"""If these fail, which rows a step sees depends on the layout, or on where a run was stopped."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from data_pipeline.loader import RowSource, batch_id
from launcher.batches import Batches, gather_batch_id
from launcher.micro_batch import AUTO_TOKENS, resolve_micro_batch
from megatron_lite.parallel.groups import Axis
from tests.data_fixtures import tiny_dataset


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> RowSource:
    dataset = tiny_dataset(tmp_path_factory.mktemp("data"))
    return RowSource.open([(dataset, 1.0, None)], sequence_length=32, packing="best_fit", seed=1)


def batches(rows: RowSource, *, dp: int = 1, rank: int = 0, size: int = 4, micro: int = 1, start: int = 0) -> Batches:
    return Batches(
        rows,
        dp=Axis("dp", dp, rank),
        global_batch_size=size,
        micro_batch_size=micro,
        document_mask=True,
        device=torch.device("cpu"),
        start_sample=start,
    )


@pytest.mark.parametrize(("dp", "micro"), [(1, 1), (1, 4), (2, 2), (2, 1), (4, 1)])
def test_the_same_rows_for_every_layout(rows: RowSource, dp: int, micro: int) -> None:
    """Step k is samples 4k to 4k+3 however they are shared out (B039), also from a start in the middle (B033, B037, B044)."""
    for start in (0, 12):
        streams = [batches(rows, dp=dp, rank=rank, micro=micro, start=start) for rank in range(dp)]
        for step in range(3):
            parts = [next(stream) for stream in streams]
            first = start + 4 * step
            samples = [int(sample) for part in parts for batch in part.micro_batches for sample in batch.samples]
            assert samples == list(range(first, first + 4))
            inputs = torch.cat([batch.inputs for part in parts for batch in part.micro_batches])
            assert inputs.tolist() == [rows[sample].inputs.tolist() for sample in samples]
            digests = [digest for part in parts for digest in part.digests]
            assert batch_id(digests) == batch_id([rows[sample].digest() for sample in samples])
            assert {batch.num_rows for part in parts for batch in part.micro_batches} == {micro}
        for stream in streams:
            stream.close()


def test_epochs_go_on_after_a_start_in_the_middle_of_one(rows: RowSource) -> None:
    """Each later epoch has every row once (B036), also where the start is an epoch's end (B035)."""
    epoch = len(rows)
    for start in (epoch // 2, epoch, epoch + 3):
        stream = batches(rows, size=1, start=start)
        until_next = -start % epoch
        list(islice(stream, until_next))
        for _ in range(2):
            seen = [batch.digests[0] for batch in islice(stream, epoch)]
            assert sorted(seen) == sorted(rows[sample].digest() for sample in range(epoch))
        stream.close()


def test_name_of_the_global_batch(rows: RowSource) -> None:
    digests = [rows[sample].digest() for sample in range(3)]
    assert gather_batch_id(digests, Axis("dp")) == batch_id(digests)


@pytest.mark.parametrize(
    ("asked", "share", "length", "size"),
    [
        (3, 6, 64, 3),
        ("auto", 6, AUTO_TOKENS["cpu"] // 4, 3),
        ("auto", 7, AUTO_TOKENS["cpu"] // 4, 1),
        ("auto", 8, 10 * AUTO_TOKENS["cpu"], 1),
        ("auto", 8, 1, 8),
    ],
)
def test_auto_is_the_largest_divisor_that_fits(asked: int | str, share: int, length: int, size: int) -> None:
    found = resolve_micro_batch(asked, global_batch_size=share * 2, dp=2, sequence_length=length, device_type="cpu")  # type: ignore[arg-type]
    assert found == size
