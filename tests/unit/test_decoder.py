"""If this fails, the model on one process is not the model that the maths describes."""

from typing import Any

import numpy as np
import pytest
import torch

from megatron_lite.layers.norms import RMSNorm
from megatron_lite.layers.positions import rotate, rotation
from megatron_lite.model_config import ModelConfig
from megatron_lite.models.batch import Batch, DropoutKey
from megatron_lite.models.build import build_model
from megatron_lite.models.decoder import Decoder, ForwardOptions
from megatron_lite.parallel.groups import ProcessGroups
from tests import reference
from tests.logical import assemble, assert_recomputing_changes_nothing, blocks_of, gradient
from tests.tiny_model import TINY

STARTS = [[0, 5, 13], [0]]


def build(seed: int = 1, dtype: torch.dtype = torch.float32, checkpointing: Any = "none", **extra: Any) -> Decoder:
    return build_model(ModelConfig(**TINY | extra), ProcessGroups.single(), seed=seed, dtype=dtype, options=ForwardOptions(checkpointing))


def rows(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    inputs, targets = generator.integers(0, 64, (2, 16)), generator.integers(0, 64, (2, 16))
    targets[0, 13:] = -100
    return inputs, targets


def batch_of(inputs: np.ndarray, targets: np.ndarray) -> Batch:
    return Batch.from_rows(inputs, targets, STARTS, [3, 4], document_mask=True)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("extra", [{}, {"tie_word_embeddings": True, "num_key_value_heads": 1}, {"head_dim": 16, "num_key_value_heads": 4}])
def test_equals_the_plain_model(extra: dict[str, Any], dropout: float) -> None:
    """Loss, logits and every logical gradient, dropout included."""
    model = build(hidden_dropout=dropout, attention_dropout=dropout, **extra)
    inputs, targets = rows()
    loss, count = model(batch_of(inputs, targets), DropoutKey(9, 5))
    loss.backward()
    weights = {name: tensor.requires_grad_() for name, tensor in assemble([blocks_of(model)]).items()}
    plain_rows = [reference.Row(inputs[i], targets[i], STARTS[i], sample=3 + i) for i in range(2)]
    plain = sum(reference.row_loss(weights, model.config, row, step=reference.Step(9, 5)) for row in plain_rows)
    assert int(count) == 29
    assert abs(loss.item() - plain.item()) < 1e-4
    expected = dict(zip(weights, torch.autograd.grad(plain, list(weights.values()))))
    for name, mine in assemble([blocks_of(model, gradient)]).items():
        assert (mine - expected[name]).norm() <= 1e-5 * expected[name].norm(), name
    logits = model.logits(batch_of(inputs, targets))
    for i, row in enumerate(plain_rows):
        torch.testing.assert_close(logits[i], reference.row_logits(weights, model.config, row), atol=1e-5, rtol=0)


def test_bf16_is_near_the_plain_bf16_model() -> None:
    """bf16 weights and activations, fp32 inside norms, softmax, rotation and loss: no further off than a bf16 rounding."""
    model = build(dtype=torch.bfloat16)
    inputs, targets = rows()
    loss, _ = model(batch_of(inputs, targets))
    weights = {name: tensor.bfloat16() for name, tensor in assemble([blocks_of(model)]).items()}
    plain = sum(reference.row_loss(weights, model.config, reference.Row(inputs[i], targets[i], STARTS[i])) for i in range(2))
    exact = sum(
        reference.row_loss({n: t.float() for n, t in weights.items()}, model.config, reference.Row(inputs[i], targets[i], STARTS[i]))
        for i in range(2)
    )
    assert abs(loss.item() - exact.item()) < 0.05
    assert abs(loss.item() - plain.item()) < 0.05


def test_recomputing_changes_nothing() -> None:
    """Loss and gradients are bit-equal, dropout included: no generator state is needed to draw the same masks again."""
    assert_recomputing_changes_nothing(
        lambda checkpointing: build(checkpointing=checkpointing, hidden_dropout=0.2, attention_dropout=0.2), batch_of(*rows())
    )


def test_editing_a_document_leaves_the_next_alone() -> None:
    """B029, B071: logits and losses of the other documents of the row are bit-equal, its first token's included."""
    model = build()
    inputs, targets = rows()
    edited = inputs.copy()
    edited[0, :5] = (edited[0, :5] + 1) % 64
    before, after = (model.logits(batch_of(each, targets)) for each in (inputs, edited))
    assert torch.equal(before[0, 5:], after[0, 5:]) and torch.equal(before[1], after[1])
    assert not torch.equal(before[0, :5], after[0, :5])
    before, after = (model.token_losses(batch_of(each, targets)) for each in (inputs, edited))
    assert torch.equal(before[0, 5:], after[0, 5:])


def test_document_in_a_row_has_the_gradients_of_itself_alone() -> None:
    """B029: packed or apart, the same gradients."""
    inputs, targets = rows()
    packed, apart = build(), build()
    packed(batch_of(inputs, targets))[0].backward()
    for start, stop in ((0, 5), (5, 13)):
        piece = Batch.from_rows(inputs[:1, start:stop], targets[:1, start:stop], [[0]], [3], document_mask=True)
        apart(piece)[0].backward()
    apart(Batch.from_rows(inputs[1:], targets[1:], [[0]], [4], document_mask=True))[0].backward()
    theirs = assemble([blocks_of(apart, gradient)])
    for name, mine in assemble([blocks_of(packed, gradient)]).items():
        torch.testing.assert_close(mine, theirs[name], atol=1e-6, rtol=1e-5)


def test_evaluation_has_no_dropout() -> None:
    """B056: without a key, the losses at dropout 0.5 are those at 0, each time; with one they are not, and repeat by the key."""
    quiet, noisy = build(), build(hidden_dropout=0.5, attention_dropout=0.5)
    batch = batch_of(*rows())
    losses = [model(batch)[0].item() for model in (noisy, noisy, quiet)]
    assert losses[0] == losses[1] == losses[2]
    first, again, other = (noisy(batch, key)[0].item() for key in (DropoutKey(1, 1), DropoutKey(1, 1), DropoutKey(1, 2)))
    assert first == again and first != losses[0] and first != other


def test_tied_head_is_the_embedding() -> None:
    """B061: one storage through updates, its gradient the sum of both uses."""
    model = build(tie_word_embeddings=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        model(batch_of(*rows()))[0].backward()
        optimizer.step()
        optimizer.zero_grad()
        assert model.lm_head.weight is model.embedding.weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_of_small_bf16_inputs(dtype: torch.dtype) -> None:
    """B055: epsilon and mean square are taken in fp32: within 1 % at a mean square of 0.0025."""
    norm = RMSNorm(32, name="norm.weight", eps=1e-5)
    torch.nn.init.ones_(norm.weight)
    x = (torch.randn(64, 32, generator=torch.Generator().manual_seed(0)) * 0.05).to(dtype)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert (norm.to(dtype)(x).double() - exact).abs().max() / exact.abs().max() < 0.01


def test_rotation_keeps_lengths_and_depends_on_distance() -> None:
    """RoPE is a rotation, and scores depend on how far apart two tokens are; angles stay exact at long distances in bf16."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 1, 1, 16, generator=generator), torch.randn(1, 1, 1, 16, generator=generator)
    config = ModelConfig().rope

    def score(query_at: int, key_at: int) -> float:
        turned_q = rotate(q, rotation(torch.tensor([[query_at]]), 16, config))
        turned_k = rotate(k, rotation(torch.tensor([[key_at]]), 16, config))
        assert torch.allclose(turned_q.norm(), q.norm())
        return float((turned_q * turned_k).sum())

    assert score(7, 3) == pytest.approx(score(1004, 1000), abs=1e-4)
    assert abs(score(7, 3) - score(9, 3)) > 1e-2
    far = rotation(torch.tensor([[30001]]), 16, config)
    exact = torch.tensor([30001 * 10000 ** (-2 * i / 16) for i in range(8)], dtype=torch.float64)
    assert (far.cos[0, 0, 0].double() - exact.cos()).abs().max() < 5e-3
    x = torch.randn(1, 1, 2, 16, dtype=torch.float64, requires_grad=True, generator=generator)
    assert torch.autograd.gradcheck(lambda x: rotate(x, rotation(torch.tensor([[3]]), 16, config)), (x,), atol=1e-4, eps=1e-4)


@pytest.mark.parametrize(
    "bad", [{"num_key_value_heads": 3}, {"hidden_size": 30}, {"num_attention_heads": 32}, {"head_dim": 7}, {"num_attention_heads": 0}]
)
def test_head_counts_are_checked(bad: dict[str, Any]) -> None:
    """B052: what can't be cut into heads is refused by the config, naming the numbers."""
    with pytest.raises(ValueError, match=r"\d"):
        ModelConfig(**TINY | bad)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*non-leaf Tensor:UserWarning", "ignore::UserWarning:torch")  # the compiler's own
def test_compiled_layers_compute_the_same() -> None:
    """`training.compile` changes speed only: loss and gradients with documents and dropout, one program for all layers."""
    torch._dynamo.reset()
    plain, compiled = (build(hidden_dropout=0.2, attention_dropout=0.2, num_hidden_layers=10) for _ in range(2))
    for layer in compiled.layers:
        layer.compile()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):  # at 8 programs; there are 10 layers
        for step in (1, 2):
            losses = []
            for model in (plain, compiled):
                model.zero_grad()
                loss, _ = model(batch_of(*rows(step)), DropoutKey(1, step))
                loss.backward()
                losses.append(loss.item())
            assert losses[0] == pytest.approx(losses[1], abs=1e-3)
            theirs = assemble([blocks_of(plain, gradient)])
            for name, mine in assemble([blocks_of(compiled, gradient)]).items():
                assert (mine - theirs[name]).norm() <= 1e-5 * theirs[name].norm(), name
        torch._dynamo.reset()
