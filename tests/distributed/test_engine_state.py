"""If this fails, what an engine holds is not what is saved, loaded or evaluated. On two data-parallel ranks unless said."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from megatron_lite.models.init import local_init
from megatron_lite.parallel.shard_spec import ShardSpec
from megatron_lite.sizes import num_parameters
from megatron_lite.training import engine_deepspeed
from megatron_lite.training.engine import Engine, build_engine
from megatron_lite.training.step import train_step
from tests import parity
from tests.engine_cases import BOTH, batch_of, engine_of, micro_batches, states
from tests.parity import SEED, Case
from tests.parity_models import MODELS
from tests.ranks import Ranks, groups_of

# -------------------------------------------------------------------------------------------------------- partitions


def covered(case: Case) -> list[tuple[str, int, int]]:
    return [(f"{part.parameter_name} {part.state}", *part.writes) for part in engine_of(case).owned_slices()]


@pytest.mark.parametrize(("stage", "precision"), BOTH)
def test_owned_slices_cover_every_element_once(ranks2: Ranks, stage: int | None, precision: str) -> None:
    """What the data-parallel ranks write tiles each parameter, without holes or overlap, in every state."""
    case = Case(dp=2, stage=stage, precision=precision)
    ranges: dict[str, list[tuple[int, int]]] = {}
    for rank in ranks2.run(covered, case):
        for name, first, last in rank:
            ranges.setdefault(name, []).append((first, last))
    sizes = dict(ranks2.run(local_sizes, case)[0])
    assert {name.split()[0] for name in ranges} == set(sizes)
    for name, found in ranges.items():
        found = sorted(part for part in found if part[0] < part[1])
        ends = [0, *(last for _, last in found)]
        assert [first for first, _ in found] == ends[:-1] and ends[-1] == sizes[name.split()[0]], (name, found)


def local_sizes(case: Case) -> list[tuple[str, int]]:
    engine = engine_of(replace(case, stage=None))
    return [(name, parameter.numel()) for name, parameter in engine.model.named_parameters()]


def matches_deepspeeds_own_reading(stage: int, precision: str) -> int:
    """The number of elements that were compared."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    engine = engine_of(Case(dp=2, stage=stage, precision=precision))
    train_step(engine, micro_batches(engine, 1), step=1, lr=3e-3, seed=SEED)
    wrapper: Any = engine._engine.optimizer  # type: ignore[attr-defined]
    if stage < 3:  # it links the states once, after the first group's first step
        wrapper._hp_optimizer_states_linked = False
        wrapper._lazy_init_hp_params_optimizer_state()
    mine = {(part.parameter_name, part.state): part for part in engine.owned_slices()}
    compared = 0
    for name, parameter in engine.model.named_parameters():
        for state in ("master", "exp_avg", "exp_avg_sq"):
            full = safe_get_full_fp32_param(parameter) if state == "master" else safe_get_full_optimizer_state(parameter, state)
            part = mine.get((name, state))
            if part is not None:
                assert torch.equal(full.view(-1)[part.start : part.stop], part.view), (name, state)
                compared += part.stop - part.start
    return compared


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_slices_are_what_deepspeed_gathers(ranks2: Ranks, stage: int, precision: str) -> None:
    """The direct reading of flat partitions agrees bit for bit with DeepSpeed's slow one."""
    compared = ranks2.run(matches_deepspeeds_own_reading, stage, precision)
    assert sum(compared) == 3 * num_parameters(MODELS["gqa"])  # the weight and two moments of every element, once


def carried_over(case: Case) -> tuple[list[float], list[float]]:
    """Losses and norms of steps 3 and 4: straight on, and by an engine that was given the state of step 2."""

    def steps(engine: Engine, numbers: tuple[int, ...]) -> list[float]:
        results = [train_step(engine, micro_batches(engine, step), step=step, lr=3e-3, seed=SEED) for step in numbers]
        return [number for result in results for number in (result.loss, result.grad_norm)]

    straight = engine_of(case)
    steps(straight, (1, 2))
    saved = states(straight)
    other = engine_of(case)
    steps(other, (9,))  # a state of its own, to be overwritten
    for part in other.owned_slices():
        part.view.copy_(saved[f"{part.parameter_name} {part.state}"])
    other.set_optimizer_step(straight.optimizer_step)
    other.refresh()
    return steps(straight, (3, 4)), steps(other, (3, 4))


@pytest.mark.parametrize(("stage", "precision"), BOTH)
def test_state_written_through_the_slices_goes_on_bit_equal(ranks2: Ranks, stage: int | None, precision: str) -> None:
    """What a resume does, without the files: the same layout continues with the same bits."""
    for straight, resumed in ranks2.run(carried_over, Case(dp=2, stage=stage, precision=precision, dropout=0.1)):
        assert straight == resumed


def starts_exact(stage: int | None) -> int:
    """The number of elements that were compared."""
    engine = engine_of(Case(dp=2, stage=stage, precision="bf16"))
    compared = 0
    for part in engine.owned_slices():
        if part.state == "master":
            exact = local_init(part.spec, engine.model.config, SEED, start=part.start, stop=part.stop)
            assert torch.equal(part.view, exact), part.parameter_name
            compared += part.stop - part.start
    return compared


@pytest.mark.parametrize("stage", [None, 1, 2, 3])
def test_bf16_masters_start_at_the_exact_initial_weights(ranks2: Ranks, stage: int | None) -> None:
    """DeepSpeed starts its masters from weights rounded to bf16: another run than the config's seed means."""
    compared = ranks2.run(starts_exact, stage)
    copies = 1 if stage else 2  # unsharded, each rank has the whole
    assert sum(compared) == copies * num_parameters(MODELS["gqa"])


# ------------------------------------------------------------------------------------------- building, evaluating, compiling


def partitioned_as_it_comes() -> list[int]:
    """Elements of the model that stand unpartitioned whenever a parameter of it has just been made."""
    standing = []

    def watched(spec: ShardSpec, *args: Any, **kwargs: Any) -> torch.Tensor:
        standing.append(sum(weight.numel() for weight in models[0].parameters() if weight.device.type != "meta"))
        return local_init(spec, *args, **kwargs)

    models: list[torch.nn.Module] = []
    materialise = engine_deepspeed.materialise

    def remembered(model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        models.append(model)
        materialise(model, *args, **kwargs)

    with (
        mock.patch.object(engine_deepspeed, "materialise", remembered),
        mock.patch("megatron_lite.models.init.local_init", watched),
    ):
        engine_of(Case(dp=2, stage=3))
    return standing


def test_stage_3_never_holds_the_whole_model(ranks2: Ranks) -> None:
    """Each module is partitioned before the next is made: a model that fits only in pieces can be built."""
    for standing in ranks2.run(partitioned_as_it_comes):
        assert len(standing) > 5 and max(standing) == 0


def evaluated(stage: int | None, precision: str) -> tuple[float, list[float], list[float]]:
    def losses(engine: Engine, steps: tuple[int, ...], between: bool) -> list[float]:
        found = []
        for step in steps:
            found.append(train_step(engine, micro_batches(engine, step), step=step, lr=3e-3, seed=SEED).loss)
            if between:
                engine.eval_forward(micro_batches(engine, 9)[0])
        return found

    case = Case(dp=2, stage=stage, precision=precision, dropout=0.1)
    plain, watched = engine_of(case), engine_of(case)
    straight, interrupted = losses(plain, (1, 2, 3), False), losses(watched, (1, 2, 3), True)
    batch = batch_of(watched, range(100, 104))
    loss, count = watched.eval_forward(batch)
    assert not loss.requires_grad and watched.eval_forward(batch)[0] == loss, "evaluation has no dropout and no gradient"
    return float(loss) / int(count), straight, interrupted


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_evaluation_changes_nothing_and_is_the_same_everywhere(ranks2: Ranks, precision: str) -> None:
    """Training with evaluations between the steps has the bits of training without; the held-out loss knows no stage."""
    found = {stage: ranks2.run(evaluated, stage, precision)[0] for stage, other in BOTH if other == precision}
    for stage, (loss, straight, interrupted) in found.items():
        assert straight == interrupted, stage
        assert loss == pytest.approx(found[None][0], abs=1e-5 if precision == "fp32" else 5e-3), stage


def compiled(case: Case) -> list[float]:
    model, training, optimizer, parallel = parity.configs(case)
    numbers = []
    for compile_it in (False, True):
        chosen = training.model_copy(update={"compile": compile_it})
        engine = build_engine(model, chosen, optimizer, parallel, groups_of(tp=case.tp), seed=SEED, device=torch.device("cpu"))
        for step in (1, 2):
            numbers.append(train_step(engine, micro_batches(engine, step), step=step, lr=3e-3, seed=SEED).loss)
    return numbers


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on CPU")
def test_compiled_layers_train_the_same(ranks2: Ranks) -> None:
    """training.compile changes speed alone."""
    eager, compiled_losses = np.split(np.array(ranks2.run(compiled, Case(tp=2, stage=1), timeout_s=300.0)[0]), 2)
    assert compiled_losses == pytest.approx(eager, abs=1e-5)
