"""Attention by tiles computes something else than attention does, or lets a document see another."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lite.layers import kernels, tiled_attention
from megatron_lite.layers.kernels import AttentionMask, attention
from megatron_lite.layers.tiled_attention import tiles_of


def heads(batch: int, number: int, length: int, *, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """[batch, number, length, 16] as a layer has it: a view of [batch, length, number, 16]."""
    values = torch.randn(batch, length, number, 16, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype).transpose(1, 2)


def both(q: Tensor, k: Tensor, v: Tensor, pieces: tuple[int, ...] | None, allowed: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Output and gradients by tiles in the inputs' dtype, and by torch in float64."""
    found = []
    upstream = torch.randn(q.shape, generator=torch.Generator().manual_seed(9))
    for dtype in (q.dtype, torch.float64):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        if dtype is torch.float64:
            out = F.scaled_dot_product_attention(*leaves, attn_mask=allowed, enable_gqa=True)
        else:
            out = tiled_attention.tiled_attention(*leaves, None, pieces)
        out.backward(upstream.to(dtype))
        gradients = [leaf.grad for leaf in leaves]
        found.append([x.double() for x in (out.detach(), *gradients) if x is not None])
    return found[0], found[1]


CASES = {
    "one document a row": (2, 6, 2, 700, None),
    "no shared heads, a short last tile": (1, 2, 2, 401, None),
    "documents": (2, 4, 2, 500, (37, 300, 163, 1, 499)),
    "a document that fills a tile, one that begins with it": (1, 4, 1, 288, (96, 96, 90, 6)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_and_gradients_are_those_of_the_formula(case: str, dtype: torch.dtype) -> None:
    batch, num_heads, num_kv_heads, length, pieces = CASES[case]
    q, k, v = (
        heads(batch, number, length, seed=number + at, dtype=dtype) for at, number in enumerate((num_heads, num_kv_heads, num_kv_heads))
    )
    segments = torch.repeat_interleave(torch.arange(len(pieces or ())), torch.tensor(pieces or (), dtype=torch.int64)).view(batch, -1)
    allowed = torch.ones(length, length, dtype=torch.bool).tril() if pieces is None else kernels._blocks(segments)
    ours, exact = both(q, k, v, pieces, allowed)
    for mine, true in zip(ours, exact, strict=True):
        assert (mine - true).norm() / true.norm() < (1e-6 if dtype is torch.float32 else 6e-3)


def test_editing_one_document_leaves_the_others_bits_alone() -> None:
    pieces = (200, 250, 62)
    q, k, v = (heads(1, 4, 512, seed=seed) for seed in range(3))
    before = tiled_attention.tiled_attention(q, k, v, None, pieces)
    for x in (q, k, v):
        x[:, :, 200:450] = 7.0
    after = tiled_attention.tiled_attention(q, k, v, None, pieces)
    assert torch.equal(before[:, :, :200], after[:, :, :200]) and torch.equal(before[:, :, 450:], after[:, :, 450:])


def test_tiles_skip_what_no_query_sees() -> None:
    tiles = tiles_of((300, 212), 512, 128)
    assert [(tile.start, tile.stop, tile.first_key) for tile in tiles] == [(0, 128, 0), (128, 256, 0), (256, 384, 0), (384, 512, 300)]
    assert [tile.unseen_from for tile in tiles] == [0, 128, 0, 384]


def test_the_seam_takes_tiles_for_large_cpu_attention_only() -> None:
    def taken(num_heads: int, length: int, dtype: torch.dtype = torch.float32) -> bool:
        return tiled_attention.serves(heads(1, num_heads, length, seed=1, dtype=dtype), heads(1, 2, length, seed=2, dtype=dtype))

    assert taken(6, 512) and taken(6, 512, torch.bfloat16)
    assert not taken(2, 64) and not taken(6, 512, torch.float64)
    q, k, v = (heads(2, number, 512, seed=number) for number in (6, 2, 2))
    segments = (torch.arange(1024) >= 100).view(2, 512).int()
    assert torch.equal(attention(q, k, v, mask=AttentionMask()), tiled_attention.tiled_attention(q, k, v, None))
    assert torch.equal(
        attention(q, k, v, mask=AttentionMask.of_segments(segments)), tiled_attention.tiled_attention(q, k, v, None, (100, 412, 512))
    )


def test_the_operators_that_compilers_see_are_sound() -> None:
    q, k, v = (heads(1, number, 64, seed=number).contiguous().requires_grad_() for number in (4, 2, 2))
    segments = torch.arange(64).div(40, rounding_mode="floor")[None]
    assert tiled_attention.run_lengths(segments) == (40, 24)
    for given in (None, segments):
        torch.library.opcheck(tiled_attention._whole_forward, (q.detach(), k.detach(), v.detach(), given))
        out = tiled_attention._whole_forward(q.detach(), k.detach(), v.detach(), given)
        torch.library.opcheck(tiled_attention._whole_backward, (torch.randn_like(out), q.detach(), k.detach(), v.detach(), out, given))
