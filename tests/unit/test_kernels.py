"""If this fails, a token attends to what it must not see, or not to what it should."""

import pytest
import torch

from megatron_lite.layers.dropout import DropoutPlace
from megatron_lite.layers.kernels import AttentionDropout, AttentionMask, attention
from megatron_lite.parallel.random import DropoutKey, sample_keys


def by_loops(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """The formula, one row and head at a time, in float64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for row in range(q.shape[0]):
        for head in range(q.shape[1]):
            source = head * k.shape[1] // q.shape[1]
            scores = q[row, head].double() @ k[row, source].double().T / q.shape[-1] ** 0.5
            seen = allowed[row if allowed.shape[0] > 1 else 0, 0]
            out[row, head] = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v[row, source].double()
    return out


def inputs(heads: int = 4, kv_heads: int = 2, queries: int = 10, keys: int = 10) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(2, heads, queries, 8, generator=generator),
        torch.randn(2, kv_heads, keys, 8, generator=generator),
        torch.randn(2, kv_heads, keys, 8, generator=generator),
    )


SEGMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2, 2], [0, 0, 0, 0, 0, 0, 0, 0, 0, 1]])


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_documents_by_pieces_blocks_and_by_hand(kv_heads: int) -> None:
    """The three ways to isolate documents give the formula's result."""
    q, k, v = inputs(kv_heads=kv_heads)
    pieces = AttentionMask.of_segments(SEGMENTS)
    assert pieces.pieces == (3, 4, 3, 9, 1)
    allowed = pieces.as_blocks(10, 10, q.device)
    expected = by_loops(q, k, v, allowed)
    place = DropoutPlace(sample_keys(DropoutKey(0, 1), torch.arange(2)))
    for mask, dropout in [
        (pieces, None),
        (AttentionMask(allowed=allowed), None),
        (pieces, AttentionDropout(0.0, place, 0)),
    ]:
        torch.testing.assert_close(attention(q, k, v, mask=mask, dropout=dropout).double(), expected, atol=1e-6, rtol=0)


def test_pieces_have_the_blocks_gradients() -> None:
    """Cutting rows into pieces must not change what backward gives."""
    gradients = []
    for mask in (
        AttentionMask.of_segments(SEGMENTS),
        AttentionMask(allowed=AttentionMask.of_segments(SEGMENTS).as_blocks(10, 10, SEGMENTS.device)),
    ):
        q, k, v = (x.requires_grad_() for x in inputs())
        attention(q, k, v, mask=mask).square().sum().backward()
        gradients.append([x.grad for x in (q, k, v)])
    for ours, theirs in zip(*gradients):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_few_queries_are_the_last() -> None:
    """B047: K = 0, values 1..5: the last query averages all, the two last 1..4 and 1..5."""
    v = torch.arange(1.0, 6.0)[None, None, :, None].expand(1, 1, 5, 4)
    k = torch.zeros(1, 1, 5, 4)
    for queries, expected in [(1, [3.0]), (2, [2.5, 3.0]), (5, [1.0, 1.5, 2.0, 2.5, 3.0])]:
        out = attention(torch.ones(1, 1, queries, 4), k, v, mask=AttentionMask())
        torch.testing.assert_close(out[0, 0, :, 0], torch.tensor(expected))
        positions = torch.arange(5)[None]
        out = attention(torch.ones(1, 1, queries, 4), k, v, mask=AttentionMask.of_positions(positions[:, 5 - queries :], positions))
        torch.testing.assert_close(out[0, 0, :, 0], torch.tensor(expected))


def test_heads_share_their_neighbours_key() -> None:
    """B051: 4 query heads over 2 KV heads read [0, 0, 1, 1], not [0, 1, 0, 1]."""
    v = torch.tensor([1.0, 2.0])[None, :, None, None].expand(1, 2, 3, 4)
    place = DropoutPlace(sample_keys(DropoutKey(0, 1), torch.arange(1)))
    for dropout in (None, AttentionDropout(0.0, place, 0)):
        out = attention(torch.zeros(1, 4, 3, 4), torch.zeros(1, 2, 3, 4), v, mask=AttentionMask(), dropout=dropout)
        assert out[0, :, 0, 0].tolist() == [1.0, 1.0, 2.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_of_padding_is_finite_and_touches_nothing(dtype: torch.dtype) -> None:
    """B048: a row that is all padding gives no NaN, and the other row's output and gradients are as without it."""
    positions = torch.tensor([[-1, -1, -1, -1], [-1, 0, 1, 2]])
    q, k, v = (x[:, :, :4].to(dtype).clone().requires_grad_() for x in inputs())
    out = attention(q, k, v, mask=AttentionMask.of_positions(positions, positions))
    out[1, :, 1:].float().square().sum().backward()
    assert all(torch.isfinite(x).all() for x in (out, q.grad, k.grad, v.grad))
    alone = [x[1:, :, 1:4].to(dtype).clone().requires_grad_() for x in inputs()]
    expected = attention(*alone, mask=AttentionMask())
    expected.float().square().sum().backward()
    tolerance = 1e-6 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(out[1:, :, 1:], expected, atol=tolerance, rtol=0)
    for whole, part in zip((q, k, v), alone):
        torch.testing.assert_close(whole.grad[1:, :, 1:], part.grad, atol=tolerance, rtol=tolerance)


def test_dropout_is_by_global_head() -> None:
    """Half the heads on a second rank draw what the same heads draw on one rank."""
    q, k, v = inputs(kv_heads=4)
    place = DropoutPlace(sample_keys(DropoutKey(0, 1), torch.tensor([5, 9])))
    whole = attention(q, k, v, mask=AttentionMask(), dropout=AttentionDropout(0.3, place, 0))
    half = attention(q[:, 2:], k[:, 2:], v[:, 2:], mask=AttentionMask(), dropout=AttentionDropout(0.3, place, 2))
    torch.testing.assert_close(half, whole[:, 2:])
    assert not torch.allclose(whole, attention(q, k, v, mask=AttentionMask()))
