"""If these fail, the held-out loss depends on how it was computed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from data_pipeline.loader import NO_TARGET, Dataset, RowSource
from launcher.evaluation.heldout import Evaluation, choose_rows, evaluate
from megatron_lite.models.batch import Batch
from megatron_lite.parallel.grid import RankGrid
from megatron_lite.parallel.groups import Axis, ProcessGroups
from tests.data_fixtures import tiny_dataset, tiny_texts

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> RowSource:
    """20 held-out documents of varied length."""
    dataset: Dataset = tiny_dataset(tmp_path_factory.mktemp("data"), tiny_texts(30, seed=5), num_validation=20)
    return RowSource.open([(dataset, 1.0, None)], sequence_length=32, packing="best_fit", seed=1, split="validation")


def fake_loss(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss of each target that depends on its id and place; rows differ widely."""
    valid = batch.targets != NO_TARGET
    losses = (batch.targets % 7 + batch.positions * 0.01 + batch.inputs.double().mean(dim=1, keepdim=True)) * valid
    return losses.sum().float(), valid.sum()


def groups_of(dp: int, rank: int) -> ProcessGroups:
    """One rank's view of dp ranks without communication: each gives the sums of its own part."""
    single = ProcessGroups.single()
    return ProcessGroups(
        RankGrid(dp=dp), rank, single.tp, Axis("dp", dp, rank), single.pp, single.cp, single.ep, single.model, single.world
    )


def parts(rows: Any, dp: int, micro_batch_size: int, max_sequences: int | None = None, forward: Any = fake_loss) -> Sequence[Evaluation]:
    found = [
        evaluate(
            forward,
            rows,
            groups=groups_of(dp, rank),
            micro_batch_size=micro_batch_size,
            max_sequences=max_sequences,
            document_mask=True,
            device=CPU,
        )
        for rank in range(dp)
    ]
    return [part for part in found if part is not None]


@pytest.mark.parametrize("dp", [1, 2, 3])
@pytest.mark.parametrize("micro_batch_size", [1, 3, 8])
def test_one_value_for_every_batch_size_and_dp(rows: RowSource, dp: int, micro_batch_size: int) -> None:
    """The sum of all token losses over their number (B077, B078), whatever the layout."""
    expected = [fake_loss_of(rows, number) for number in range(len(rows))]
    total, count = sum(loss for loss, _ in expected), sum(targets for _, targets in expected)
    found = parts(rows, dp, micro_batch_size)
    assert sum(part.num_targets for part in found) == count == sum(row.num_targets for row in rows)
    assert sum(part.loss_sum for part in found) / count == pytest.approx(total / count, rel=1e-6)
    assert sum(part.num_bytes for part in found) == sum(row.target_bytes for row in rows)
    assert {part.num_sequences for part in found} == {len(rows)}


def fake_loss_of(rows: RowSource, number: int) -> tuple[float, int]:
    row = rows[number]
    kept = [place for place in range(row.targets.size) if row.targets[place] != NO_TARGET]
    return sum(float(row.targets[place] % 7) + int(row.positions[place]) * 0.01 + float(row.inputs.mean()) for place in kept), len(kept)


def test_every_rank_makes_the_same_number_of_passes(rows: RowSource) -> None:
    """Unequal numbers of forwards hang ZeRO stage 3 (B042)."""
    for dp, size, limit in ((2, 3, 7), (3, 2, 4), (4, 1, 5)):
        passes = []
        for rank in range(dp):
            calls: list[int] = []

            def forward(batch: Batch, calls: list[int] = calls) -> tuple[torch.Tensor, torch.Tensor]:
                calls.append(batch.num_rows)
                return fake_loss(batch)

            evaluate(forward, rows, groups=groups_of(dp, rank), micro_batch_size=size, max_sequences=limit, document_mask=True, device=CPU)
            passes.append(calls)
        assert len({tuple(calls) for calls in passes}) == 1 and set(passes[0]) == {size}


def test_a_limit_takes_rows_from_everywhere() -> None:
    assert choose_rows(10, 5) == [0, 2, 4, 6, 8]
    assert choose_rows(10, 100) == choose_rows(10, None) == list(range(10))
    assert len(set(choose_rows(1000, 320))) == 320


def test_a_stop_ends_it_at_once(rows: RowSource) -> None:
    """B144."""
    answers = iter([False, True, False])
    asked = evaluate(
        fake_loss,
        rows,
        groups=ProcessGroups.single(),
        micro_batch_size=1,
        max_sequences=None,
        document_mask=True,
        device=CPU,
        stop=lambda: next(answers),
    )
    assert asked is None and next(answers) is False


def test_numbers_derived_from_the_sums() -> None:
    found = Evaluation(loss_sum=200 * math.log(2), num_targets=100, num_bytes=50, num_sequences=3)
    assert (
        found.loss == pytest.approx(2 * math.log(2))
        and found.perplexity == pytest.approx(4.0)
        and found.bits_per_byte == pytest.approx(4.0)
    )
    assert math.log(found.record()["eval/perplexity"]) == pytest.approx(found.record()["eval/loss"], abs=1e-9)  # B079
