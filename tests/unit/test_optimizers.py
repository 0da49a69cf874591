"""If this fails, weights decay that should not, or clipping scales by the wrong number."""

import math

import pytest
import torch

from data_pipeline.errors import NonFiniteError
from megatron_lite.config import OptimizerConfig
from megatron_lite.model_config import ModelConfig
from megatron_lite.models.build import build_model
from megatron_lite.parallel.groups import ProcessGroups
from megatron_lite.parallel.shard_spec import Piece, ShardSpec, attach
from megatron_lite.training.optimizers import adamw
from megatron_lite.training.stability import clip_factor, global_norm, require_finite


def vector(values: list[float], *, cut: bool = False) -> tuple[ShardSpec, torch.Tensor]:
    return ShardSpec((Piece("w", (len(values),), (0,), (len(values),)),), (len(values),), cut=cut), torch.tensor(values)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("decay_embeddings", [False, True])
def test_B080_every_parameter_is_in_exactly_one_group(tied: bool, decay_embeddings: bool) -> None:
    """B080: norm gains never decay, matrices do, the embedding and the head as asked; nothing is left out or twice in."""
    config = ModelConfig(
        vocab_size=11, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, tie_word_embeddings=tied
    )
    model = build_model(config, ProcessGroups.single(), seed=1)
    groups = adamw.parameter_groups(model.named_parameters(), OptimizerConfig(weight_decay=0.3, decay_embeddings=decay_embeddings))
    rates = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
    assert sum(len(group["params"]) for group in groups) == len(rates) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        plain = name.endswith("norm.weight") or (name in ("embedding.weight", "lm_head.weight") and not decay_embeddings)
        assert rates[id(parameter)] == (0.0 if plain else 0.3), name


def test_mup_groups() -> None:
    """4 times as wide as the base: matrices of the layers learn at a quarter, whatever the schedule; lr * decay is the same for all."""
    config = ModelConfig(vocab_size=11, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, mlp={"bias": True})
    model = build_model(config, ProcessGroups.single(), seed=1)
    optimizer = OptimizerConfig(weight_decay=0.3)
    built = adamw.build_adamw(adamw.parameter_groups(model.named_parameters(), optimizer, width_multiplier=4.0), optimizer)
    adamw.set_lr(built, 0.02)
    rates = {
        id(parameter): (group["lr"], group["lr"] * group["weight_decay"]) for group in built.param_groups for parameter in group["params"]
    }
    assert len(rates) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        if name in ("embedding.weight", "lm_head.weight"):
            wanted = (0.02, 0.006)
        else:
            wanted = (0.005, 0.006) if name.endswith(("qkv.weight", "o.weight", "gate_up.weight", "down.weight")) else (0.02, 0.0)
        assert rates[id(parameter)] == pytest.approx(wanted), name
    plain = adamw.parameter_groups(model.named_parameters(), optimizer)
    assert [sorted(group) for group in plain] == [["params", "weight_decay"]] * 2


def test_adamw_is_the_formula() -> None:
    """Three updates in float64 by Loshchilov and Hutter's algorithm 2."""
    config = OptimizerConfig(lr=0.01, betas=(0.8, 0.9), eps=1e-4, weight_decay=0.1)
    start, gradients = torch.linspace(-1, 1, 12).view(3, 4), [torch.sin(torch.arange(12.0) * k).view(3, 4) for k in (1, 2, 3)]
    weight = torch.nn.Parameter(start.clone())
    attach(weight, ShardSpec((Piece("w", (3, 4), (0, 0), (3, 4)),), (3, 4), cut=False))
    optimizer = adamw.build_adamw(adamw.parameter_groups([("w", weight)], config), config)
    adamw.ensure_state(optimizer, [weight])
    x, m, v = start.double(), torch.zeros(3, 4).double(), torch.zeros(3, 4).double()
    for step, gradient in enumerate(gradients, start=1):
        adamw.set_lr(optimizer, lr := 0.01 * step)
        weight.grad = gradient.clone()
        optimizer.step()
        m, v = 0.8 * m + 0.2 * gradient.double(), 0.9 * v + 0.1 * gradient.double() ** 2
        x = x - lr * 0.1 * x - lr * (m / (1 - 0.8**step)) / ((v / (1 - 0.9**step)).sqrt() + 1e-4)
    assert torch.allclose(weight.detach().double(), x, atol=1e-7, rtol=0)


def test_ensured_state_trains_like_state_made_by_the_first_step() -> None:
    """State exists from the start, so that it can be saved and loaded before any step; the bits must not change by that."""
    results = []
    for ensured in (False, True):
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 37))
        optimizer = torch.optim.AdamW([weight], lr=1e-2, fused=True)
        if ensured:
            adamw.ensure_state(optimizer, [weight])
        for step in range(3):
            weight.grad = torch.cos(weight.detach() * step)
            optimizer.step()
        results.append(weight.detach().clone())
    assert torch.equal(*results)


def test_B088_clip_factor() -> None:
    """B088: a norm of 13 and a limit of 1 give 1/13; a norm below the limit gives exactly 1."""
    assert clip_factor(13.0, 1.0) == pytest.approx(0.0769231, abs=1e-7)
    assert clip_factor(0.5, 1.0) == 1.0
    assert clip_factor(0.0, 1.0) == 1.0
    assert clip_factor(13.0, 0.0) == clip_factor(13.0, None) == 1.0


def test_global_norm_of_one_process() -> None:
    assert float(global_norm([vector([3.0]), vector([0.0, 4.0], cut=True)], ProcessGroups.single())) == 5.0


def test_global_norm_does_not_overflow_in_bf16_or_lose_small_parts() -> None:
    """Squares are summed in float64: one huge gradient and many small ones."""
    spec, _ = vector([0.0])
    gradients = [(spec, torch.tensor([3e20])), (spec, torch.full((1000,), 1e-3, dtype=torch.bfloat16))]
    assert float(global_norm(gradients, ProcessGroups.single())) == pytest.approx(3e20)
    assert float(global_norm(gradients[1:], ProcessGroups.single())) == pytest.approx(math.sqrt(1000) * 1e-3, rel=2e-3)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_B090_non_finite_numbers_stop(value: float) -> None:
    """B090: exit code 6, with what it was and what to do."""
    with pytest.raises(NonFiniteError, match=r"the loss of step 7 is .*lower optimizer\.lr") as caught:
        require_finite(value, what="the loss of step 7")
    assert caught.value.exit_code == 6
    assert require_finite(1.5, what="x") == 1.5
