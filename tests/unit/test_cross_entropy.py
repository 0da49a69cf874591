"""If this fails, the number that training minimises is not the cross-entropy."""

import pytest
import torch
import torch.nn.functional as F

from megatron_lite.config import LossConfig
from megatron_lite.layers.cross_entropy import Logits, vocab_parallel_cross_entropy
from megatron_lite.parallel.groups import Axis


def ours(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, **options: object) -> torch.Tensor:
    settings = {"vocab_start": 0, "num_valid_rows": weight.shape[0]} | options
    return vocab_parallel_cross_entropy(hidden, weight, targets, Axis("tp"), **settings)


def problem(
    num_tokens: int = 37, vocabulary: int = 23, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, 8, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, 8, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, vocabulary, (num_tokens,), generator=generator)
    targets[::5] = -100
    return hidden, weight, targets


@pytest.mark.parametrize("chunk", [1, 7, 37, 1000])
def test_chunks_equal_the_plain_loss(chunk: int) -> None:
    """Value and both gradients, whatever the chunk, under any factor on the loss."""
    hidden, weight, targets = problem()
    loss = ours(hidden, weight, targets, chunk_tokens=chunk)
    gradients = torch.autograd.grad(loss * 0.37, [hidden, weight])
    plain = F.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    torch.testing.assert_close(loss, plain)
    for mine, theirs in zip(gradients, torch.autograd.grad(plain * 0.37, [hidden, weight])):
        torch.testing.assert_close(mine, theirs)
    each = ours(hidden, weight, targets, per_token=True, chunk_tokens=chunk)
    torch.testing.assert_close(each, F.cross_entropy(hidden @ weight.T, targets, reduction="none"))
    with torch.no_grad():
        assert torch.equal(ours(hidden, weight, targets, chunk_tokens=chunk), loss)


@pytest.mark.parametrize("logits", [Logits(), Logits(factor=3.0, cap=4.0), Logits(factor=0.5)])
@pytest.mark.parametrize("extras", [LossConfig(), LossConfig(label_smoothing=0.1), LossConfig(z_loss=0.01, label_smoothing=0.3)])
def test_value_is_nats_and_gradient_is_of_what_is_optimised(logits: Logits, extras: LossConfig) -> None:
    """B076: in chunks, with padding rows, which get no share of the smoothing; by autograd through the formula."""
    hidden, weight, targets = problem()
    padded = torch.cat([weight.detach(), torch.full((3, 8), 100.0)]).requires_grad_()
    options = {"num_valid_rows": 23, "chunk_tokens": 7, "logits": logits, "extras": extras}
    loss = ours(hidden, padded, targets, **options)
    mine = torch.autograd.grad(loss * 0.37, [hidden, padded])
    scores = hidden @ weight.T * logits.factor
    if logits.cap is not None:
        scores = logits.cap * torch.tanh(scores / logits.cap)
    torch.testing.assert_close(loss, F.cross_entropy(scores, targets, reduction="sum"))
    smoothed = F.cross_entropy(scores, targets, reduction="sum", label_smoothing=extras.label_smoothing)
    optimised = smoothed + extras.z_loss * scores[targets != -100].logsumexp(-1).square().sum()
    theirs = torch.autograd.grad(optimised * 0.37, [hidden, weight])
    torch.testing.assert_close(mine[0], theirs[0])
    torch.testing.assert_close(mine[1][:23], theirs[1])
    assert not mine[1][23:].any()
    with torch.no_grad():
        assert torch.equal(ours(hidden, padded, targets, **options), loss)


def test_b072_z_loss() -> None:
    """Four zero logits: the reported loss is log 4 with or without; the gradient is that of log 4 + 1e-4 (log 4)^2 with it and of
    log 4 alone without; masked targets add nothing, logits of 1000 stay finite."""
    targets = torch.tensor([2, -100])
    for start, coefficient in ((0.0, 0.0), (0.0, 1e-4), (1000.0, 1e-4)):
        hidden = torch.full((2, 1), start, requires_grad=True)
        weight = torch.ones(4, 1, requires_grad=True)
        loss = ours(hidden, weight, targets, extras=LossConfig(z_loss=coefficient))
        assert loss.item() == pytest.approx(1.386294, abs=1e-4 if start else 1e-6)
        (of_hidden,) = torch.autograd.grad(loss, [hidden])
        assert of_hidden[:, 0].tolist() == pytest.approx([2 * coefficient * (start + 1.386294), 0.0], rel=1e-3, abs=1e-6)


def test_bf16_is_near_and_in_fp32() -> None:
    """Logits' sums are fp32: the loss of bf16 inputs is that of the same numbers in fp32 but for the products' rounding."""
    hidden, weight, targets = problem(num_tokens=512, vocabulary=1000, dtype=torch.bfloat16)
    loss = ours(hidden, weight, targets, chunk_tokens=100)
    assert loss.dtype is torch.float32
    exact = F.cross_entropy(hidden.float() @ weight.float().T, targets, reduction="sum")
    assert abs(loss / exact - 1) < 1e-3
    mine = torch.autograd.grad(loss, [hidden, weight])
    for ours_, theirs in zip(mine, torch.autograd.grad(exact, [hidden, weight])):
        assert ours_.dtype is torch.bfloat16
        assert (ours_.float() - theirs).norm() / theirs.norm() < 1e-2


def test_padding_rows_are_no_words() -> None:
    """Rows past the vocabulary, whatever they hold, change nothing and get a gradient of exactly 0."""
    hidden, weight, targets = problem()
    padded = torch.cat([weight.detach(), torch.full((3, 8), 100.0)]).requires_grad_()
    loss = ours(hidden, padded, targets, num_valid_rows=23)
    assert torch.equal(loss, ours(hidden, weight, targets))
    loss.backward()
    assert not padded.grad[23:].any() and padded.grad[:23].any()


def test_right_logits_cost_nothing() -> None:
    """B067: logits of +20 on the target and -20 elsewhere: 0, where a second shift would give 40 a token."""
    tokens = torch.tensor([0, 1, 2, 3])
    hidden = (torch.eye(4)[tokens] * 40.0) - 20.0
    assert float(ours(hidden, torch.eye(4), tokens)) == 0.0
    assert float(ours(hidden, torch.eye(4), tokens.roll(-1))) == pytest.approx(160.0)


def test_rows_do_not_leak() -> None:
    """B068: another first token in row 2 leaves row 1's losses bit-equal, and all stored targets count."""
    hidden, weight, _ = problem(num_tokens=12)
    targets = torch.arange(12)
    changed = targets.clone()
    changed[6] = 20
    before, after = (ours(hidden, weight, each, per_token=True) for each in (targets, changed))
    assert torch.equal(before[:6], after[:6]) and before[6] != after[6]
    assert (before > 0).all()


def test_end_of_document_counts_though_it_pads() -> None:
    """B069: what is no target is said by -100, not by an id: the end-of-document id that also fills padding is learnt."""
    hidden, weight, _ = problem(num_tokens=4)
    end = 5
    each = ours(hidden, weight, torch.tensor([8, end, -100, -100]), per_token=True)
    assert (each > 0).tolist() == [True, True, False, False]


def test_no_targets_at_all() -> None:
    """B070: a rank whose targets are all masked gives a sum of 0 and zero gradients, never 0/0."""
    hidden, weight, targets = problem()
    loss = ours(hidden, weight, torch.full_like(targets, -100))
    loss.backward()
    assert loss.item() == 0.0 and not hidden.grad.any() and not weight.grad.any()


def test_uniform_is_log_of_the_vocabulary() -> None:
    """B073 on one rank: ln 64 a token for equal logits."""
    each = ours(torch.ones(3, 8), torch.ones(64, 8), torch.tensor([0, 33, 63]), per_token=True)
    torch.testing.assert_close(each, torch.full((3,), 4.158883))


def test_large_logits_do_not_overflow() -> None:
    """The maximum is taken off before the exponential."""
    hidden = torch.tensor([[1e4]])
    weight = torch.tensor([[1.0], [-1.0]])
    assert float(ours(hidden, weight, torch.tensor([0]))) == 0.0
    assert float(ours(hidden, weight, torch.tensor([1]))) == 2e4
