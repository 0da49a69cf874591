"""If this fails, a token attends to what it must not see, or not to what it should."""

import itertools
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from megatron_lite.layers import gpu_attention
from megatron_lite.layers.document_kernels import KernelChoice, choose_kernel, rank_kernels
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


ROWS = torch.tensor([[0] * 300 + [1] * 350 + [2] * 50, [0] * 700, [*range(100)] + [100] * 600], dtype=torch.int32)


def test_tiles_are_those_that_torch_finds_from_all_pairs() -> None:
    """A tile missing from FlexAttention's list is attention lost; one called full that is not leaks another document."""
    tiles = AttentionMask.of_segments(ROWS, kernel="flex").fused.tiles
    theirs = create_block_mask(tiles.mask_mod, ROWS.shape[0], None, 700, 700, device="cpu")
    for ours, wanted in [(tiles.kv_num_blocks, theirs.kv_num_blocks), (tiles.full_kv_num_blocks, theirs.full_kv_num_blocks)]:
        assert torch.equal(ours[:, 0], wanted[:, 0])
    for numbers, ours, wanted in [
        (tiles.kv_num_blocks, tiles.kv_indices, theirs.kv_indices),
        (tiles.full_kv_num_blocks, tiles.full_kv_indices, theirs.full_kv_indices),
    ]:
        listed = torch.arange(6) < numbers[..., None]
        assert torch.equal(ours[listed], wanted[listed])


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_flex_is_the_pieces_attention(kv_heads: int) -> None:
    """B051: FlexAttention over our tiles, in torch's own unfused form, gives what SDPA gives piece by piece."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, heads, 700, 16, generator=generator) for heads in (4, kv_heads, kv_heads))
    mixed = attention(q, k, v, mask=AttentionMask.of_segments(ROWS, kernel="flex"))
    torch.testing.assert_close(mixed, attention(q, k, v, mask=AttentionMask.of_segments(ROWS)), atol=2e-6, rtol=1e-5)


def flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, begins: torch.Tensor, ends: torch.Tensor, max_q: int, max_k: int, **options: Any
) -> torch.Tensor:
    """What torch documents of varlen_attn, for causal windows."""
    assert options.pop("window_size") == (-1, 0) and options.pop("enable_gqa", True) and not options
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1 and begins.dtype == torch.int32 and torch.equal(begins, ends)
    assert max_q == max_k >= int(begins.diff().max())
    out = []
    for first, last in itertools.pairwise(begins.tolist()):
        piece = (x[first:last].transpose(0, 1)[None] for x in (q, k, v))
        out.append(attention(*piece, mask=AttentionMask())[0].transpose(0, 1))
    return torch.cat(out)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_varlen_gets_the_pieces(kv_heads: int, given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """B051: the rows are laid end to end, cut where documents begin, and put back in their places, with their gradients."""
    monkeypatch.setattr(gpu_attention, "varlen_attn", flash)
    known = {"boundaries": torch.tensor([0, 3, 7, 10, 19, 20], dtype=torch.int32), "longest": 9} if given else {}
    mask = AttentionMask.of_segments(SEGMENTS, kernel="varlen", **known)
    results = []
    for each in (mask, AttentionMask.of_segments(SEGMENTS)):
        q, k, v = (x.requires_grad_() for x in inputs(kv_heads=kv_heads))
        mixed = attention(q, k, v, mask=each)
        mixed.square().sum().backward()
        results.append([mixed.detach(), q.grad, k.grad, v.grad])
    for ours, wanted in zip(*results):
        torch.testing.assert_close(ours, wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("longest", "length", "rounded"), [(1, 10, 1), (9, 10, 10), (9, 4096, 16), (512, 4096, 512), (4096, 4096, 4096)])
def test_longest_piece_takes_few_values(longest: int, length: int, rounded: int) -> None:
    """Compiled code that met every length anew would be compiled for each, then given up."""
    assert gpu_attention.Varlen.of(torch.tensor([0, longest]), longest=longest, length=length).longest == rounded


H200 = {"capability": (9, 0), "dtype": torch.bfloat16, "head_size": 128, "triton": True}


@pytest.mark.parametrize(
    ("asked", "other", "name", "reason"),
    [
        ("auto", {}, "varlen", ""),
        ("auto", {"dtype": torch.float32}, "flex", "not varlen: FlashAttention has no float32"),
        ("auto", {"capability": (7, 5)}, "flex", "not varlen: FlashAttention needs compute capability 8.0, this device has 7.5"),
        ("auto", {"head_size": 100}, "flex", "not varlen: FlashAttention takes head_dim in steps of 8 up to 256, not 100"),
        ("varlen", {"dtype": torch.float32, "triton": False}, "blocks", "not varlen: FlashAttention has no float32; not flex: Triton is not installed"),
        ("auto", {"head_size": 12}, "blocks", "not varlen: FlashAttention takes head_dim in steps of 8 up to 256, not 12; not flex: it takes head_dim from 16 on, not 12"),
        ("flex", {}, "flex", ""),
        ("blocks", {}, "blocks", ""),
    ],
)  # fmt: skip
def test_kernel_and_its_reason(asked: str, other: dict[str, Any], name: str, reason: str) -> None:
    """A fallback that says nothing costs a user half the speed for a month."""
    assert rank_kernels(asked, **H200 | other) == KernelChoice(name, reason)


def test_cpu_goes_by_pieces() -> None:
    """FlashAttention has no CPU kernel and FlexAttention no backward there."""
    chosen = [choose_kernel(asked, device=torch.device("cpu"), dtype=torch.float32, head_size=16) for asked in ("auto", "flex", "blocks")]
    assert [choice.name for choice in chosen] == ["pieces", "pieces", "blocks"] and str(chosen[1]) == "pieces (on CPU flex has no backward)"
