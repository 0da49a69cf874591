"""If this fails, a run that resumes, on its own layout or another, is no longer the same run (invariant 2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_lite.checkpoint.load import load_into, load_logical
from megatron_lite.checkpoint.slices import model_slices
from megatron_lite.models.build import build_model
from tests import logical, parity
from tests.parity import LIMITS, Case
from tests.parity_models import MODELS
from tests.ranks import pool
from tests.resharding import distance, resume, train_and_save

SAVED_AT, END = 4, 10
LAYOUTS = [
    Case(stage=None, accumulation=4),
    Case(tp=2, stage=1, checkpointing="selective"),
    Case(dp=2, stage=3, accumulation=4),
    Case(tp=4, stage=2, sequence_parallel=True, accumulation=4),
    Case(stage=0),
    Case(tp=2, dp=2, stage=3, sequence_parallel=True, checkpointing="full"),
    Case(dp=2, stage=1, accumulation=4),
    Case(tp=2, stage=3, accumulation=4),
    Case(stage=3, accumulation=4),
    Case(tp=4, stage=0, accumulation=4),
    Case(dp=2, stage=0),
    Case(tp=2, dp=2, stage=1, sequence_parallel=True, accumulation=4),
    Case(dp=2, stage=None),
    Case(tp=4, stage=1, sequence_parallel=True),
    Case(dp=2, stage=2),
    Case(tp=2, dp=2, stage=None, sequence_parallel=True),
    Case(tp=2, stage=0, sequence_parallel=True, accumulation=4),
    Case(tp=2, dp=2, stage=2, sequence_parallel=True, accumulation=4),
    Case(tp=4, stage=3),
    Case(tp=2, stage=2, sequence_parallel=True),
    Case(tp=2, dp=2, stage=0),
]
PAIRS = [  # each once as source and once as target; models and dropout in turn
    (replace(source, **varied), replace(target, **varied))
    for (source, target), varied in zip(
        zip(LAYOUTS, [*LAYOUTS[1:], LAYOUTS[0]]),
        [
            {"model": model, "dropout": dropout}
            for _ in range(5)
            for model, dropout in (("gqa", 0.1), ("mqa", 0.0), ("2017", 0.0), ("scores", 0.0), ("seq2seq", 0.0))
        ],
        strict=False,
    )
]
SAME = [
    Case(tp=2, stage=1),
    Case(dp=2, stage=3, precision="bf16"),
    Case(tp=2, dp=2, stage=1, sequence_parallel=True, dropout=0.1),
    Case(dp=2, stage=1, precision="bf16", dropout=0.1),
    Case(tp=4, stage=2, model="mqa", precision="bf16"),
    Case(dp=2, stage=None, precision="bf16"),
    Case(dp=2, stage=0, model="mqa"),
]


def test_every_layout_is_source_and_target() -> None:
    """The pairs below leave out no layout of the covering set, and none resumes on itself."""
    for side in (0, 1):
        seen = {replace(pair[side], model="gqa", dropout=0.0) for pair in PAIRS}
        assert seen == set(LAYOUTS) and len(PAIRS) == len(LAYOUTS)
    assert all(source != target for source, target in PAIRS)


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=[f"{source}--to--{target}" for source, target in PAIRS])
def test_another_layout_goes_on(source: Case, target: Case, tmp_path: Path) -> None:
    """B033, B104, B110, B111, B112, B114: saved under one layout and engine, resumed under another, a run gives the losses,
    norms, batches and weights of one plain process that never stopped."""
    pool(source.world_size).run(train_and_save, source, tmp_path, saved_at=SAVED_AT, timeout_s=300.0)
    ranks = pool(target.world_size).run(resume, target, tmp_path, end=END, timeout_s=300.0)
    wanted = parity.expected(target.model, target.dropout, steps=END)
    for measure, value in distance(ranks, wanted, saved_at=SAVED_AT).items():
        assert value <= LIMITS[measure], (measure, value)


@pytest.mark.parametrize("case", SAME, ids=str)
def test_the_same_layout_is_bit_equal(case: Case, tmp_path: Path) -> None:
    """A resumed run is the uninterrupted one to the last bit, also in an engine that had trained on something else before."""
    straight = pool(case.world_size).run(train_and_save, case, tmp_path, saved_at=SAVED_AT, end=END, timeout_s=300.0)
    for used in (False, True):
        again = pool(case.world_size).run(resume, case, tmp_path, end=END, used=used, timeout_s=300.0)
        for trace, wanted in zip(again, straight):
            assert (trace.losses, trace.grad_norms, trace.batch_ids) == (wanted.losses, wanted.grad_norms, wanted.batch_ids)
            assert all((one[-1] == other[-1]).all() for one, other in zip(trace.parameters, wanted.parameters, strict=True))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run's checkpoint, of bf16 with fp32 masters."""
    root = tmp_path_factory.mktemp("saved")
    pool(4).run(train_and_save, Case(tp=2, dp=2, stage=3, precision="bf16"), root, saved_at=SAVED_AT, timeout_s=300.0)
    yield root / f"step_{SAVED_AT:08d}"


def _weights(path: Path, tp: int, dtype: torch.dtype) -> logical.Blocks:
    groups = parity.groups_of(tp=tp, dp=1)
    model = build_model(MODELS["gqa"], groups, seed=9, dtype=dtype)
    load_into(path, model_slices(model), groups, weights_only=True)
    return logical.blocks_of(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_alone_into_a_bare_model(saved: Path, dtype: torch.dtype) -> None:
    """Generation and evaluation load the master weights into a model of another tp and dtype, without an engine."""
    whole = dict(load_logical(saved))
    for tp in (2, 4):
        got = logical.assemble(pool(tp).run(_weights, saved, tp, dtype))
        assert got.keys() == whole.keys()
        assert all(torch.equal(got[name], whole[name].to(dtype).float()) for name in whole)
