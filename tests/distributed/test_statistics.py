"""If these fail, statistics by layer depend on the layout, or are not of what was trained."""

from __future__ import annotations

import math

import pytest
import torch

from launcher.batches import Batches
from megatron_lite.models.batch import Batch, DropoutKey
from megatron_lite.parallel.groups import Axis
from megatron_lite.sizes import num_parameters
from megatron_lite.training.statistics import watched
from megatron_lite.training.step import train_step
from tests import parity
from tests.parity import BATCH, LR, SEED, Case, SyntheticRows
from tests.parity_models import MODELS
from tests.ranks import Ranks

ALONE = Case(stage=None, model="2017")


def steps(case: Case, dp: Axis, number: int) -> list[list[Batch]]:
    """The micro-batches of a rank in the first steps."""
    batches = Batches(
        SyntheticRows(MODELS[case.model].vocabulary),
        dp=dp,
        global_batch_size=BATCH,
        micro_batch_size=BATCH // case.dp // case.accumulation,
        document_mask=True,
        device=torch.device("cpu"),
        start_sample=0,
    )
    found = [list(next(batches).micro_batches) for _ in range(number)]
    batches.close()
    return found


def records(case: Case) -> list[dict[str, float]]:
    """On a rank: of steps 1 and 3; the second step goes unwatched."""
    engine, found = parity.build(case), []
    for step, micro_batches in enumerate(steps(case, engine.groups.dp, 3), start=1):
        if step == 2:
            train_step(engine, micro_batches, step=step, lr=LR, seed=SEED)
            continue
        with watched(engine, parity.optimizer_config(case)) as statistics:
            result = train_step(engine, micro_batches, step=step, lr=LR, seed=SEED)
        found.append(statistics.record(result.grad_norm) | {"grad_norm": result.grad_norm})
        assert engine.model.watcher is None
    return found


def test_every_layout_finds_the_same(ranks4: Ranks) -> None:
    """tp 2 x dp 2, sequence parallel, in micro-batches, layers computed again in backward: what one process finds."""
    case = Case(tp=2, dp=2, stage=3, sequence_parallel=True, accumulation=2, model="2017", checkpointing="full")
    alone = records(ALONE)
    for rank in ranks4.run(records, case):
        for found, wanted in zip(rank, alone, strict=True):
            assert found.keys() == wanted.keys()
            for key, value in wanted.items():
                assert found[key] == pytest.approx(value, rel=2e-5), key


def test_gradients_by_layer_make_up_the_norm_that_is_logged() -> None:
    counts: dict[str, int] = {}
    for name, parameter in parity.build(ALONE).model.named_parameters():
        part = ".".join(name.split(".")[:2]) if name.startswith("layers.") else name.rpartition(".")[0]
        counts[part] = counts.get(part, 0) + parameter.numel()
    assert sum(counts.values()) == num_parameters(MODELS["2017"])
    for record in records(ALONE):
        assert {key.removeprefix("gradients/") for key in record if key.startswith("gradients/")} == counts.keys()
        squares = sum(record[f"gradients/{part}"] ** 2 * count for part, count in counts.items())
        assert math.sqrt(squares) == pytest.approx(record["grad_norm"], rel=1e-5)


def test_activations_are_those_that_layers_are_given_and_give() -> None:
    engine, seen = parity.build(ALONE), {}
    for number, layer in enumerate(engine.model.layers):

        def look(_: object, inputs: tuple[torch.Tensor, ...], out: torch.Tensor, number: int = number) -> None:
            for way, x in (("in", inputs[0]), ("out", out)):
                seen[f"activations/layers.{number}/{way}"] = x.detach().square().mean().sqrt().item()

        layer.register_forward_hook(look)
    [[batch]] = steps(ALONE, engine.groups.dp, 1)
    engine.forward(batch, DropoutKey(SEED, 1))
    logits = engine.model.logits(batch).detach()[batch.targets >= 0]
    seen["logits/log_z"] = logits.logsumexp(-1).square().mean().sqrt().item()
    first = records(ALONE)[0]
    for key, value in seen.items():
        assert first[key] == pytest.approx(value, rel=1e-5), key
