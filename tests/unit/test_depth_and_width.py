"""If these fail, a step size is no step of an Euler method, or muP does not hold activations where they are as models get wider."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from megatron_lite.config import OptimizerConfig, ParallelConfig, TrainingConfig
from megatron_lite.model_config import ModelConfig
from megatron_lite.models.batch import Batch
from megatron_lite.models.build import build_model
from megatron_lite.parallel.groups import ProcessGroups
from megatron_lite.parallel.shard_spec import spec_of
from megatron_lite.training.engine import build_engine
from megatron_lite.training.statistics import watched
from megatron_lite.training.step import train_step
from tests.logical import assemble, blocks_of, load_logical

# --------------------------------------------------------------------------------------------------- depth as time


def batch_of(vocabulary: int, num_rows: int, length: int) -> Batch:
    ids = np.random.default_rng(0).integers(0, vocabulary, (num_rows, length + 1))
    return Batch.from_rows(ids[:, :-1], ids[:, 1:], [[0]] * num_rows, range(num_rows), document_mask=True)


def hidden_at_time_one(num_layers: int, one_layer: dict[str, torch.Tensor]) -> torch.Tensor:
    """What comes out of the last of so many equal layers, each a step of 1 / num_layers, in float64."""
    config = ModelConfig(
        vocab_size=31,
        hidden_size=16,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        intermediate_size=24,
        residual={"step_size": 1.0 / num_layers},
    )
    model = build_model(config, ProcessGroups.single(), seed=1, dtype=torch.float64)
    names = {piece.name for parameter in model.parameters() for piece in spec_of(parameter).pieces}
    load_logical(model, {name: one_layer[".".join(["layers.0", *name.split(".")[2:]]) if "layers." in name else name] for name in names})
    model.final_norm = None
    with torch.no_grad():
        return model.hidden(batch_of(31, 2, 8), None, store=None, split=False)


def test_halving_the_step_and_doubling_the_layers_converges_at_first_order() -> None:
    """x <- x + h f(x) is Euler's method for dx/dt = f(x), and attention and MLP in turn its splitting (Lie): the error at t = 1 halves
    with h."""
    init = {"std": 0.2, "embedding_std": 1.0}
    draw = ModelConfig(vocab_size=31, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, init=init)
    one_layer = assemble([blocks_of(build_model(draw, ProcessGroups.single(), seed=1))])
    found = {layers: hidden_at_time_one(layers, one_layer) for layers in (16, 32, 64, 128)}
    changes = [(found[2 * layers] - found[layers]).norm().item() for layers in (16, 32, 64)]
    start = one_layer["embedding.weight"][batch_of(31, 2, 8).inputs]
    assert (found[128] - start).norm() > 0.3 * start.norm(), "the layers do something"
    orders = [math.log2(before / after) for before, after in pairwise(changes)]
    assert all(abs(order - 1.0) < 0.1 for order in orders), orders


# ------------------------------------------------------------------------------------------------------------- width

WIDTHS = (64, 128, 256, 512)


def coordinates(width: int, *, num_heads: int | None = None, **model: Any) -> dict[str, float]:
    """rms after three updates on one batch: of activations by key, and of how far the logits have moved."""
    config = ModelConfig(
        vocab_size=64,
        hidden_size=width,
        num_hidden_layers=2,
        num_attention_heads=num_heads or width // 16,
        intermediate_size=2 * width,
        **model,
    )
    optimizer = OptimizerConfig(lr=0.01, max_grad_norm=None, weight_decay=0.0)
    training = TrainingConfig(steps=4, sequence_length=16, engine="torch")
    groups, device = ProcessGroups.single(), torch.device("cpu")
    engine = build_engine(config, training, optimizer, ParallelConfig(zero_stage=0), groups, seed=1, device=device)
    batch = batch_of(64, 2, 16)
    with torch.no_grad():
        before = engine.model.logits(batch)
        for step in range(1, 4):
            with torch.enable_grad():
                train_step(engine, [batch], step=step, lr=0.01, seed=1)
        moved = engine.model.logits(batch) - before
    with watched(engine, optimizer) as statistics:
        result = train_step(engine, [batch], step=4, lr=0.0, seed=1)
    seen = {key: value for key, value in statistics.record(result.grad_norm).items() if key.startswith("activations/")}
    return {**seen, "logits' change": moved.square().mean().sqrt().item()}


def slope(values: list[float]) -> float:
    """Of log value over log width: 0 where it stays, 0.5 where it grows with the root of the width."""
    return float(np.polyfit(np.log(WIDTHS), np.log(values), 1)[0])


def test_coordinate_check() -> None:
    """Yang et al. 2022, appendix D.1: a few updates at one learning rate. Under muP activations and logits have the same size at every
    width; as usually parametrised the same models' grow."""
    plain = {"scaled_residual": False}
    with_mup = [coordinates(width, mup={"base_hidden_size": 64}, init={"std": 1 / 8, **plain}) for width in WIDTHS]
    usual = [coordinates(width, init={"std": width**-0.5, **plain}) for width in WIDTHS]
    held = {key: slope([each[key] for each in with_mup]) for key in usual[0]}
    grown = {key: slope([each[key] for each in usual]) for key in usual[0]}
    assert all(abs(found) < 0.1 for key, found in held.items() if key != "logits' change"), held
    assert -0.3 < held["logits' change"] < 0.1, held  # what the head's initial weights add to it falls with the root of the width
    assert grown["activations/layers.1/out"] > 0.4 and grown["logits' change"] > 0.2, grown
    assert with_mup[0] == usual[0], "at the base's width they are one model"
    mup = {"base_hidden_size": 64, "base_head_dim": 16}
    wider_heads = [coordinates(width, num_heads=4, mup=mup, init={"std": 1 / 8, **plain}) for width in WIDTHS]
    held = {key: slope([each[key] for each in wider_heads]) for key in usual[0]}
    assert all(abs(found) < 0.1 for key, found in held.items() if key != "logits' change"), held
    assert wider_heads[0] == usual[0]
