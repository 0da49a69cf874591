"""If this fails, cutting a variation of the model over tp changes it."""

from __future__ import annotations

import numpy as np
import torch

from megatron_lite.models.batch import Batch, DropoutKey
from megatron_lite.models.build import build_model
from megatron_lite.parallel.replicated import register_gradient_sums
from megatron_lite.sizes import num_local_parameters
from tests import reference
from tests.logical import Blocks, assemble, blocks_of, gradient
from tests.ranks import Ranks, groups_of
from tests.variations import VARIATIONS, config_of

STARTS = [[0, 5, 13], [0]]
DROPOUT = {"hidden_dropout": 0.2}


def rows() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    return generator.integers(0, 61, (2, 16)), generator.integers(0, 61, (2, 16))


def forward_backward(name: str, tp: int, split: bool) -> tuple[float, Blocks, Blocks]:
    """On a rank: loss, gradients, weights."""
    config, groups = config_of(name, **DROPOUT), groups_of(tp=tp, sequence_parallel=split)
    model = build_model(config, groups, seed=1)
    assert sum(parameter.numel() for parameter in model.parameters()) == num_local_parameters(config, tp)
    register_gradient_sums(model, groups)
    loss, _ = model(Batch.from_rows(*rows(), STARTS, [3, 4], document_mask=True), DropoutKey(9, 5))
    loss.backward()
    return loss.item(), blocks_of(model, gradient), blocks_of(model)


def of_all(tp: int, split: bool) -> dict[str, tuple[float, Blocks, Blocks]]:
    return {name: forward_backward(name, tp, split) for name in VARIATIONS}


def assert_equals_the_plain_twin(results: list[dict[str, tuple[float, Blocks, Blocks]]]) -> None:
    """With tests/reference.py: loss and every gradient; what several ranks hold is bit-equal."""
    inputs, targets = rows()
    for name in VARIATIONS:
        ranks = [result[name] for result in results]
        weights = {key: tensor.requires_grad_() for key, tensor in assemble(blocks for _, _, blocks in ranks).items()}
        plain = [reference.Row(inputs[i], targets[i], STARTS[i], sample=3 + i) for i in range(2)]
        loss = sum(reference.row_loss(weights, config_of(name, **DROPOUT), row, step=reference.Step(9, 5)) for row in plain)
        expected = dict(zip(weights, torch.autograd.grad(loss, list(weights.values()))))
        assert {rank[0] for rank in ranks} == {ranks[0][0]} and abs(ranks[0][0] - loss.item()) < 2e-5 * loss.item(), name
        for key, mine in assemble(blocks for _, blocks, _ in ranks).items():
            assert (mine - expected[key]).norm() <= 2e-5 * expected[key].norm(), (name, key)


def test_cut_in_two_with_sequence_parallel(ranks2: Ranks) -> None:
    assert_equals_the_plain_twin(ranks2.run(of_all, 2, True))


def test_two_ranks_share_a_key_head(ranks4: Ranks) -> None:
    assert_equals_the_plain_twin(ranks4.run(of_all, 4, False))
