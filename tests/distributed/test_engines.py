"""If this fails, an engine updates weights otherwise than the optimizer section says. On two data-parallel ranks unless said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from data_pipeline.errors import NonFiniteError
from megatron_lite.sizes import num_parameters
from megatron_lite.training.step import train_step
from tests.engine_cases import BOTH, STAGES, applied, batch_of, engine_of, micro_batches, norm_over_ranks, states
from tests.parity import SEED, Case
from tests.parity_models import MODELS
from tests.ranks import Ranks

# -------------------------------------------------------------------------------------------------------------- decay


def decayed(stage: int | None, precision: str) -> int:
    """The number of elements that were looked at."""
    engine = engine_of(Case(dp=2, stage=stage, precision=precision), lr=0.1, weight_decay=0.5)
    for part in engine.owned_slices():
        if part.state == "master":
            part.view.fill_(1.0)
    engine.refresh()
    loss, _ = engine.forward(micro_batches(engine, 1)[0], None)
    engine.backward(loss * 0.0, last=True)
    assert engine.step(0.1) == 0.0
    seen = 0
    for part in engine.owned_slices():
        wanted = 1.0 if part.parameter_name.endswith("norm.weight") else 0.95
        if part.state == "master":
            assert torch.equal(part.view, torch.full_like(part.view, wanted)), part.parameter_name
            seen += part.stop - part.start
    return seen


@pytest.mark.parametrize(("stage", "precision"), BOTH)
def test_B080_matrices_decay_and_norms_do_not(ranks2: Ranks, stage: int | None, precision: str) -> None:
    """B080: ones, gradients 0, lr 0.1, decay 0.5: matrices become 0.95, norm gains stay exactly 1."""
    copies = 1 if stage else 2  # unsharded, each rank has the whole
    assert sum(ranks2.run(decayed, stage, precision)) == copies * num_parameters(MODELS["gqa"])


# ----------------------------------------------------------------------------------------------------------- clipping


def clipped(stage: int | None, precision: str) -> list[float]:
    """For both limits: the norm of what was applied, over the norm before clipping."""
    case = Case(dp=2, stage=stage, precision=precision)
    free = engine_of(case, max_grad_norm=None, betas=(0.0, 0.95))
    raw_norm = train_step(free, micro_batches(free, 1), step=1, lr=0.0, seed=SEED).grad_norm
    raw = applied(free)
    assert norm_over_ranks(raw) == pytest.approx(raw_norm, rel=1e-6), "not clipped: what is applied has the norm that is logged"
    left = []
    for limit, factor in ((raw_norm / 13, 1 / 13), (2 * raw_norm, 1.0)):
        engine = engine_of(case, max_grad_norm=limit, betas=(0.0, 0.95))
        logged = train_step(engine, micro_batches(engine, 1), step=1, lr=0.0, seed=SEED).grad_norm
        assert logged == pytest.approx(raw_norm, rel=1e-7), "the logged norm is the one before clipping"
        error = (applied(engine) - raw * factor).abs().max() / raw.abs().max()
        assert error < 3e-6, float(error)
        norm = norm_over_ranks(applied(engine))
        assert norm <= limit + 1e-6
        left.append(norm / raw_norm)
    return left


@pytest.mark.parametrize(("stage", "precision"), BOTH)
def test_B088_B089_clipping_scales_all_by_one_factor(ranks2: Ranks, stage: int | None, precision: str) -> None:
    """B088, B089: a norm 13 times the limit scales every gradient by 1/13, one below the limit by nothing; logged is before."""
    for left in ranks2.run(clipped, stage, precision):
        assert left == pytest.approx([1 / 13, 1.0], rel=1e-5)


# ------------------------------------------------------------------------------------------------- stop on non-finite


def poisoned(stage: int | None, precision: str, what: str) -> tuple[str, int]:
    engine = engine_of(Case(dp=2, stage=stage, precision=precision))
    for step in (1, 2):
        train_step(engine, micro_batches(engine, step), step=step, lr=3e-3, seed=SEED)
    before = states(engine)
    handle = None
    if engine.groups.dp.rank == 0 and what == "gradient":
        weight = dict(engine.model.named_parameters())["layers.1.mlp.gate_up.weight"]
        handle = weight.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([3]), float("nan")))
    if what == "loss":
        forward = engine.model.forward
        scale = float("inf") if engine.groups.dp.rank == 0 else 1.0
        engine.model.forward = lambda *args: (forward(*args)[0] * scale, forward(*args)[1])
    with pytest.raises(NonFiniteError) as caught:
        train_step(engine, micro_batches(engine, 3), step=3, lr=3e-3, seed=SEED)
    if handle is not None:
        handle.remove()
    assert all(torch.equal(old, new) for old, new in zip(before.values(), states(engine).values())), "state was touched"
    if what == "gradient":  # the gradients were dropped: the step made again is the step
        train_step(engine, micro_batches(engine, 3), step=3, lr=3e-3, seed=SEED)
        clean = engine_of(Case(dp=2, stage=stage, precision=precision))
        for step in (1, 2, 3):
            train_step(clean, micro_batches(clean, step), step=step, lr=3e-3, seed=SEED)
        assert all(torch.equal(old, new) for old, new in zip(states(clean).values(), states(engine).values()))
    return str(caught.value), engine.optimizer_step


@pytest.mark.parametrize(("stage", "precision"), BOTH)
def test_B090_B086_one_nan_gradient_stops_all_ranks_before_any_weight(ranks2: Ranks, stage: int | None, precision: str) -> None:
    """B090, B086: a NaN on one rank: both raise alike, masters, moments and counters are bit-equal, nothing advanced."""
    (first, updates), (second, _) = ranks2.run(poisoned, stage, precision, "gradient")
    assert first == second and "gradient norm of update 3" in first
    assert updates == 3


@pytest.mark.parametrize("stage", [None, 1, 3])
def test_infinite_loss_stops_all_ranks_before_any_weight(ranks2: Ranks, stage: int | None) -> None:
    """An infinite loss on one rank is known to all before the update."""
    (first, updates), (second, _) = ranks2.run(poisoned, stage, "fp32", "loss")
    assert first == second and "the loss of step 3" in first and updates == 2


# ---------------------------------------------------------------------------------------------------- targets and rows


def one_rank_without_targets(stage: int | None) -> tuple[float, float]:
    engine = engine_of(Case(dp=2, stage=stage))
    batches = micro_batches(engine, 1)
    if engine.groups.dp.rank == 1:
        batches = [replace(batch, targets=torch.full_like(batch.targets, -100)) for batch in batches]
    result = train_step(engine, batches, step=1, lr=3e-3, seed=SEED)
    alone, count = engine_of(Case(dp=2, stage=stage)).eval_forward(batches[0])
    assert all(bool(view.isfinite().all()) for view in states(engine).values())
    return result.loss, float(alone) / max(int(count), 1)


@pytest.mark.parametrize("stage", STAGES)
def test_B070_a_rank_without_targets_weighs_nothing(ranks2: Ranks, stage: int | None) -> None:
    """B070: rank 1 has only padding: the loss is rank 0's, nothing is NaN, the step counts."""
    (loss, alone), (other, nothing) = ranks2.run(one_rank_without_targets, stage)
    assert loss == other == pytest.approx(alone, rel=1e-6)
    assert nothing == 0.0


def accumulated(stage: int | None, sizes: tuple[int, ...]) -> list[tuple[float, float, torch.Tensor]]:
    found = []
    for size in sizes:
        engine = engine_of(Case(dp=2, stage=stage), max_grad_norm=None, betas=(0.0, 0.95))
        result = train_step(engine, micro_batches(engine, 1, size=size), step=1, lr=0.0, seed=SEED)
        found.append((result.loss, result.grad_norm, applied(engine)))
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_B065_B154_accumulation_divides_neither_gradient_nor_loss(ranks2: Ranks, stage: int | None) -> None:
    """B065, B154: 1, 2 or 4 micro-batches of unequal targets: the same gradient and the same logged loss."""
    for (loss, norm, gradient), *others in ranks2.run(accumulated, stage, (4, 2, 1)):
        for other_loss, other_norm, other in others:
            assert other_loss == pytest.approx(loss, abs=1e-6) and other_norm == pytest.approx(norm, rel=1e-6)
            assert float((other - gradient).norm() / gradient.norm()) < 1e-6


def summed(stage: int | None, precision: str, alone: int, counts: tuple[int, ...]) -> tuple[float, list[float]]:
    """Micro-gradients added by the engine: of `alone` of them the relative error against the float64 sum of each alone, and of so many
    as `counts` says the norms."""
    engine = engine_of(Case(dp=2, stage=stage, precision=precision), max_grad_norm=None, betas=(0.0, 0.95))

    def step(numbers: range) -> torch.Tensor:
        for number in numbers:
            loss, _ = engine.forward(
                batch_of(engine, range(2 * number + engine.groups.dp.rank, 2 * number + engine.groups.dp.rank + 1)), None
            )
            engine.backward(loss * (1.0 if number == 0 else 2.0**-9), last=number == numbers[-1])  # a bf16 sum drops the small ones
        engine.step(0.0)
        return applied(engine)

    exact = sum((step(range(number, number + 1)) for number in range(alone)), start=torch.zeros(()))
    assert isinstance(exact, torch.Tensor)
    sums = {count: step(range(count)) for count in counts}
    return norm_over_ranks(sums[alone] - exact) / norm_over_ranks(exact), [norm_over_ranks(sums[count]) for count in counts]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_B095_unequal_micro_gradients_add_up_in_fp32(ranks2: Ranks, precision: str) -> None:
    """B095: accumulation in bf16 would be wrong by 6e-2 here. The norm shows whether the sum over dp is in fp32 too. 33 of them on
    every engine; 129, which take their time, on the torch engine and ZeRO-1."""
    error, plain = ranks2.run(summed, None, precision, 129, (33, 129))[0]
    assert error < 1e-6, error
    for stage in [stage for stage, other in BOTH if other == precision and stage is not None]:
        error, norms = ranks2.run(summed, stage, precision, 33, (33, 129) if stage == 1 else (33,))[0]
        assert error < 1e-6, (stage, error)
        assert norms == pytest.approx(plain[: len(norms)], rel=1e-7), stage


# ------------------------------------------------------------------------------------------------- ZeRO's own switches


def with_overrides(stage: int, precision: str, zero: dict[str, Any]) -> list[float]:
    engine = engine_of(Case(dp=2, stage=stage, precision=precision), overrides={"zero_optimization": zero} if zero else None)
    numbers = []
    for step in (1, 2, 3):
        result = train_step(engine, micro_batches(engine, step, size=2), step=step, lr=3e-3, seed=SEED)
        numbers += [result.loss, result.grad_norm]
    return numbers


SWITCHES: list[dict[str, Any]] = [
    {"overlap_comm": True},
    {"overlap_comm": False, "contiguous_gradients": False},
    {"reduce_bucket_size": 1000, "allgather_bucket_size": 1000},  # smaller than most parameters
    {"sub_group_size": 5000, "stage3_param_persistence_threshold": 100},  # stage 3: many sub-groups, few persistent parameters
]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_B096_switches_of_zero_do_not_change_the_result(ranks2: Ranks, stage: int, precision: str) -> None:
    """B096: overlap, buckets smaller than a parameter, sub-groups: the same losses and norms as without."""
    plain = ranks2.run(with_overrides, stage, precision, {})[0]
    for zero in SWITCHES:
        if stage == 3 or "sub_group_size" not in zero:
            assert ranks2.run(with_overrides, stage, precision, zero)[0] == pytest.approx(
                plain, rel=1e-6 if precision == "fp32" else 2e-3
            ), zero


# --------------------------------------------------------------------------------------------------- cut parameters


def norm_of_one_kind(stage: int | None, name: str) -> tuple[float, float]:
    case = Case(tp=2, stage=stage)
    engine = engine_of(case, max_grad_norm=None, betas=(0.0, 0.95))
    for other, parameter in engine.model.named_parameters():
        if not other.endswith(name):
            parameter.register_hook(torch.zeros_like)
    norm = train_step(engine, micro_batches(engine, 1, size=8), step=1, lr=0.0, seed=SEED).grad_norm
    return norm, norm_over_ranks(applied(engine))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ["embedding.weight", "qkv.weight", "o.weight", "gate_up.weight", "down.weight", "lm_head.weight"])
def test_B093_every_kind_of_cut_parameter_counts_on_all_tp_ranks(ranks2: Ranks, stage: int | None, name: str) -> None:
    """B093: with gradients in one kind of parameter alone, the norm on tp 2 is that of both ranks' blocks together."""
    (first, wanted), (second, _) = ranks2.run(norm_of_one_kind, stage, name)
    assert first == second == pytest.approx(wanted, rel=1e-6) and first > 0
