"""Attention within documents by FlashAttention and FlexAttention. Nothing here waits for the device.

Loading this loads torch's compiler, which takes seconds: only runs that need it do.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.attention.varlen import varlen_attn

TILE = 128  # queries and keys in a tile of FlexAttention
# Shared heads must be announced from torch 2.13 on; before, they just are.
_SHARED_HEADS: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


@dataclass(frozen=True)
class Varlen:
    """Pieces of documents in B rows of S tokens laid end to end."""

    boundaries: Tensor  # int32 [N + 1]: first token of each piece, then B * S
    longest: int  # no piece is longer, in tokens
    window: int | None = None  # the last so many keys up to the query's own; None: all

    @classmethod
    def of(cls, boundaries: Tensor, *, longest: int, length: int, window: int | None = None) -> Varlen:
        """`longest` is rounded up to a power of two, at most a row's length: compiled code takes it as a constant, and so
        meets few of them."""
        return cls(boundaries, min(1 << (longest - 1).bit_length(), length), window)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal within each piece: q [B, H, S, E], k and v [B, K, S, E] -> [B, H, S, E]."""
        queries, keys, values = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # [B * S, heads, E]
        sizes = (self.boundaries, self.boundaries, self.longest, self.longest)
        before = -1 if self.window is None else self.window - 1
        mixed: Any = varlen_attn(queries, keys, values, *sizes, window_size=(before, 0), **_SHARED_HEADS)
        whole: Tensor = mixed.unflatten(0, (q.shape[0], q.shape[2])).transpose(1, 2)
        return whole


@dataclass(frozen=True)
class Flex:
    """The same by the tiles of S x S that hold a pair."""

    tiles: BlockMask

    @classmethod
    def of(cls, segments: Tensor, *, window: int | None = None) -> Flex:
        """From segments [B, S], numbers that never fall along a row.

        Of query tile i and key tile j <= i: empty where j's last segment comes before i's first; full where all of both is
        one segment and j < i; else partial. With a window the pairs of a tile are up to TILE - 1 nearer or farther than its corners
        are, and those beyond it are nothing. create_block_mask finds the same from all S * S pairs.
        """
        length = segments.shape[1]
        num_tiles = -(-length // TILE)
        padding = segments[:, -1:].expand(-1, num_tiles * TILE - length)
        tiled = torch.cat([segments, padding], dim=1).unflatten(1, (num_tiles, TILE))
        first, last = tiled[..., 0], tiled[..., -1]
        below = torch.ones(num_tiles, num_tiles, dtype=torch.bool, device=segments.device).tril()
        needed = (last[:, None, :] >= first[:, :, None]) & below
        full = (first[:, None, :] == last[:, :, None]) & below.tril(-1)
        if window is not None:
            numbers = torch.arange(num_tiles, device=segments.device) * TILE
            apart = numbers[:, None] - numbers
            needed &= apart - (TILE - 1) < window
            full &= apart + (TILE - 1) < window
        if length % TILE:
            full[:, -1] = False  # a tile that is cut off is never full to torch

        def allowed(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (segments[row, query] == segments[row, key]) & (query >= key)

        def near(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return allowed(row, head, query, key) & (query - key < reach)

        reach = window or 0
        seen = allowed if window is None else near
        tiles = (*_ordered(needed & ~full), *_ordered(full))
        return cls(BlockMask.from_kv_blocks(*tiles, BLOCK_SIZE=TILE, mask_mod=seen, seq_lengths=(length, length)))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As Varlen's."""
        # Without compilation FlexAttention makes all scores and throws most of them away; inside compiled code it is.
        as_it_is = torch.compiler.is_compiling() or q.device.type == "cpu"
        run: Any = flex_attention if as_it_is else _compiled_flex()
        mixed: Tensor = run(q, k, v, block_mask=self.tiles, enable_gqa=q.shape[1] != k.shape[1])
        return mixed


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)


def _ordered(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """bool [B, I, J] -> how many of J, int32 [B, 1, I], and their numbers first of all J's, int32 [B, 1, I, J]."""
    numbers = torch.argsort(tiles, dim=-1, descending=True, stable=True)
    return tiles.sum(-1, dtype=torch.int32)[:, None], numbers.to(torch.int32)[:, None]
