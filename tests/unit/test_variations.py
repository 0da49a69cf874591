"""If this fails, a variation of the model is not the model that its formula describes."""

from typing import Any

import numpy as np
import pytest
import torch

from megatron_lite.inference.kv_cache import KVCache
from megatron_lite.models.batch import Batch, DropoutKey
from megatron_lite.models.build import build_model
from megatron_lite.parallel.groups import ProcessGroups
from megatron_lite.sizes import largest_local_parameter, num_local_parameters, num_parameters
from tests import reference
from tests.logical import assemble, blocks_of, gradient
from tests.variations import VARIATIONS, config_of

STARTS = [[0, 5, 13], [0]]


def rows(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    inputs, targets = generator.integers(0, 61, (2, 16)), generator.integers(0, 61, (2, 16))
    targets[0, 13:] = -100
    return inputs, targets


def batch_of(inputs: np.ndarray, targets: np.ndarray, starts: Any = STARTS) -> Batch:
    return Batch.from_rows(inputs, targets, starts, [3, 4], document_mask=True)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("name", VARIATIONS)
def test_equals_the_plain_model(name: str, dropout: float) -> None:
    """Loss, logits and every logical gradient, in rows of documents."""
    config = config_of(name, hidden_dropout=dropout, attention_dropout=dropout)
    model = build_model(config, ProcessGroups.single(), seed=1)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            if parameter.dim() == 1:  # what begins as all ones or zeros could stand for anything else that does
                parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
    inputs, targets = rows()
    loss, _ = model(batch_of(inputs, targets), DropoutKey(9, 5))
    loss.backward()
    weights = {name: tensor.requires_grad_() for name, tensor in assemble([blocks_of(model)]).items()}
    plain_rows = [reference.Row(inputs[i], targets[i], STARTS[i], sample=3 + i) for i in range(2)]
    plain = sum(reference.row_loss(weights, config, row, step=reference.Step(9, 5)) for row in plain_rows)
    assert loss.item() == pytest.approx(plain.item(), rel=1e-5)
    expected = dict(zip(weights, torch.autograd.grad(plain, list(weights.values()))))
    mine = assemble([blocks_of(model, gradient)])
    assert mine.keys() == expected.keys()
    for each, tensor in mine.items():
        assert (tensor - expected[each]).norm() <= 2e-5 * expected[each].norm(), each
    if not dropout:
        logits = model.logits(batch_of(inputs, targets))
        for i, row in enumerate(plain_rows):
            torch.testing.assert_close(logits[i], reference.row_logits(weights, config, row), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", VARIATIONS)
def test_a_document_neither_sees_nor_counts_the_others(name: str) -> None:
    """B029, invariant 5: editing the first document leaves the others' logits bit-equal, which are those of the document alone."""
    model = build_model(config_of(name), ProcessGroups.single(), seed=1)
    inputs, targets = rows()
    edited = inputs.copy()
    edited[0, :5] = (edited[0, :5] + 1) % 61
    before, after = (model.logits(batch_of(each, targets)) for each in (inputs, edited))
    assert torch.equal(before[0, 5:], after[0, 5:]) and torch.equal(before[1], after[1])
    assert not torch.equal(before[0, :5], after[0, :5])
    alone = model.logits(Batch.from_rows(inputs[:1, 5:13], targets[:1, 5:13], [[0]], [3], document_mask=True))
    torch.testing.assert_close(before[0, 5:13], alone[0], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", VARIATIONS)
def test_cached_decoding_is_the_full_forward(name: str) -> None:
    """Invariant 6, token by token and in parts, the second row padded on the left."""
    model = build_model(config_of(name), ProcessGroups.single(), seed=1)
    ids = torch.from_numpy(rows()[0])
    positions = torch.stack([torch.arange(16), torch.arange(16) - 3])
    ids[1] = torch.cat([torch.zeros(3, dtype=torch.int64), ids[1, :13]])
    parts, cache = [], KVCache(16)
    with torch.no_grad():
        for first, last in ((0, 5), (5, 6), (6, 7), (7, 11), *((at, at + 1) for at in range(11, 16))):
            part = ids[:, first:last]
            batch = Batch(part, torch.full_like(part, -100), positions[:, first:last], None, torch.zeros(2, dtype=torch.int64))
            parts.append(model.logits(batch, store=cache))
        found = torch.cat(parts, dim=1)
        for row, padding in enumerate((0, 3)):
            text = ids[row : row + 1, padding:].numpy()
            whole = model.logits(Batch.from_rows(text, text, [[0]], [0], document_mask=True))
            torch.testing.assert_close(found[row, padding:], whole[0], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", VARIATIONS)
def test_parameters_are_counted(name: str) -> None:
    """`mlite plan` counts this model, not the default."""
    config = config_of(name)
    sizes = [parameter.numel() for parameter in build_model(config, ProcessGroups.single(), seed=0, materialise=False).parameters()]
    assert num_parameters(config) == num_local_parameters(config, 1) == sum(sizes)
    assert largest_local_parameter(config, 1) == max(sizes)
