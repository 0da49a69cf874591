"""If this fails, a run that resumes, on its own layout or another, is no longer the same run (invariant 2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from launcher.batches import Batches, gather_batch_id
from megatron_lite.checkpoint.find import newest_checkpoint
from megatron_lite.checkpoint.load import load_into, load_logical
from megatron_lite.checkpoint.save import save_checkpoint
from megatron_lite.checkpoint.slices import model_slices
from megatron_lite.models.build import build_model
from megatron_lite.training.engine import Engine, build_engine
from megatron_lite.training.step import train_step
from tests import logical, parity
from tests.checkpoint_fakes import run_state
from tests.parity import BATCH, LIMITS, SEED, Case, SyntheticRows, Trace
from tests.parity_models import MODELS
from tests.ranks import pool

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
            for _ in range(6)
            for model, dropout in (("gqa", 0.1), ("mqa", 0.0), ("2017", 0.0), ("scores", 0.0))
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


def _steps(engine: Engine, case: Case, first: int, last: int) -> Trace:
    trace = Trace()
    batches = Batches(
        SyntheticRows(MODELS[case.model].vocabulary),
        dp=engine.groups.dp,
        global_batch_size=BATCH,
        micro_batch_size=BATCH // case.dp // case.accumulation,
        document_mask=True,
        device=torch.device("cpu"),
        start_sample=(first - 1) * BATCH,
    )
    for step in range(first, last + 1):
        batch = next(batches)
        result = train_step(engine, batch.micro_batches, step=step, lr=case.lr, seed=SEED)
        trace.losses.append(result.loss)
        trace.grad_norms.append(result.grad_norm)
        trace.batch_ids.append(gather_batch_id(batch.digests, engine.groups.dp))
    batches.close()
    trace.parameters = parity.parts(engine, "master")
    return trace


def _train_and_save(case: Case, root: Path, *, go_on: bool = False) -> Trace | None:
    engine = parity.build(case)
    _steps(engine, case, 1, SAVED_AT)
    state = run_state(SAVED_AT, optimizer={"step": engine.optimizer_step})
    save_checkpoint(root, step=SAVED_AT, slices=engine.owned_slices(), groups=engine.groups, attempt=1, state=state)
    return _steps(engine, case, SAVED_AT + 1, END) if go_on else None


def _resume(case: Case, root: Path, *, used: bool = False) -> Trace:
    """Into an engine that began with other weights, or has even trained: nothing of it may be left."""
    groups = parity.groups_of(tp=case.tp, dp=case.dp, sequence_parallel=case.sequence_parallel)
    model, training, optimizer, parallel = parity.configs(case)
    device = torch.device("cpu")
    engine = build_engine(model, training, optimizer, parallel, groups, seed=SEED + 1, device=device, deepspeed_overrides={})
    if used:
        _steps(engine, case, 1, 2)
    choice = newest_checkpoint(root, groups)
    assert choice is not None
    load_into(choice.info.path, engine.owned_slices(), groups)
    engine.refresh()
    engine.set_optimizer_step(int(choice.info.state.optimizer["step"]))
    return _steps(engine, case, choice.info.step + 1, END)


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
    pool(source.world_size).run(_train_and_save, source, tmp_path, timeout_s=300.0)
    ranks = pool(target.world_size).run(_resume, target, tmp_path, timeout_s=300.0)
    wanted = parity.expected(target.model, target.dropout, steps=END)
    assert ranks[0].batch_ids == wanted.batch_ids[SAVED_AT:]  # gathered on the first rank
    for trace in ranks:
        assert trace.losses == pytest.approx(wanted.losses[SAVED_AT:], abs=LIMITS["loss"], rel=0)
        assert trace.grad_norms == pytest.approx(wanted.grad_norms[SAVED_AT:], rel=LIMITS["grad_norm"])
    weights = parity.whole([trace.parameters for trace in ranks])
    worst = max(float((weights[name] - tensor).abs().max()) for name, tensor in wanted.parameters.items())
    assert weights.keys() == wanted.parameters.keys() and worst <= LIMITS["parameter"], worst


@pytest.mark.parametrize("case", SAME, ids=str)
def test_the_same_layout_is_bit_equal(case: Case, tmp_path: Path) -> None:
    """A resumed run is the uninterrupted one to the last bit, also in an engine that had trained on something else before."""
    straight = pool(case.world_size).run(_train_and_save, case, tmp_path, go_on=True, timeout_s=300.0)
    for used in (False, True):
        for trace, wanted in zip(pool(case.world_size).run(_resume, case, tmp_path, used=used, timeout_s=300.0), straight):
            assert (trace.losses, trace.grad_norms, trace.batch_ids) == (wanted.losses, wanted.grad_norms, wanted.batch_ids)
            assert all((one[-1] == other[-1]).all() for one, other in zip(trace.parameters, wanted.parameters, strict=True))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run's checkpoint, of bf16 with fp32 masters."""
    root = tmp_path_factory.mktemp("saved")
    pool(4).run(_train_and_save, Case(tp=2, dp=2, stage=3, precision="bf16"), root, timeout_s=300.0)
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
