"""Causal attention on CPU, tile by tile in both directions: torch's own kernel multiplies at a fraction of what its matrix
products reach, and its backward takes twice that. A tile is some queries of all heads that share a key head, against the
keys that any of them sees; its scores stay in a core's cache and are made again in backward (Dao et al. 2022)."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_lite.layers.matmul import multiply_into, times_transposed
from megatron_lite.sizes import LEAST_TILE_SCORES, tile_height, tile_scores

_LEAST_SCORES = LEAST_TILE_SCORES
_MOST_THREADS = 4  # tiles follow one after the other: with many cores torch's kernel, a head a core, wins


@dataclass(frozen=True)
class Tile:
    """Queries start..stop of a row against its keys first_key..stop."""

    row: int
    number: int  # of the tile in its row
    start: int
    stop: int
    first_key: int
    unseen: Tensor | None  # bool [stop - start, stop - unseen_from]: the keys from there on that a query does not see; None: later ones
    unseen_from: int


def serves(q: Tensor, k: Tensor) -> bool:
    """Whether tiles are the faster way: q [B, H, S, E], k [B, K, T, E]."""
    length, sharing = q.shape[2], q.shape[1] // k.shape[1]
    suited = q.device.type == "cpu" and q.dtype in (torch.float32, torch.bfloat16) and length == k.shape[2]
    return suited and tile_scores(sharing, length) >= _LEAST_SCORES and torch.get_num_threads() <= _MOST_THREADS


def tiled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Tensor | None,
    pieces: tuple[int, ...] | None = None,
    *,
    window: int | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(E)) v: q [B, H, S, E], k and v [B, K, S, E] -> [B, H, S, E]; causal within runs of equal numbers in
    segments [B, S] (`pieces` are the runs' lengths, if known), or within the rows; of those keys the last `window`. Scores, softmax
    and its gradient are fp32."""
    return _Tiled.apply(q, k, v, segments, pieces, window)


def _tiles(q: Tensor, k: Tensor, segments: Tensor | None, pieces: tuple[int, ...] | None, window: int | None) -> tuple[Tile, ...]:
    if pieces is None:
        pieces = (q.shape[2],) * q.shape[0] if segments is None else run_lengths(segments)
    return tiles_of(pieces, q.shape[2], tile_height(q.shape[1] // k.shape[1]), window)


def run_lengths(segments: Tensor) -> tuple[int, ...]:
    """Of the runs of equal numbers in [B, S], row after row."""
    return tuple(boundaries_of(segments).diff().tolist())


def boundaries_of(segments: Tensor) -> Tensor:
    """int32 [N + 1]: where runs of equal numbers start in the rows [B, S] laid end to end, then B * S."""
    starts = torch.ones_like(segments, dtype=torch.bool)
    starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
    places = starts.flatten().nonzero()[:, 0]
    return torch.cat([places, places.new_full((1,), segments.numel())]).to(torch.int32)


@functools.lru_cache(maxsize=4)  # every layer and the backward pass ask for the same
def tiles_of(pieces: tuple[int, ...], length: int, height: int, window: int | None = None) -> tuple[Tile, ...]:
    """The tiles of all rows of this length."""
    tiles: list[Tile] = []
    begins = torch.tensor([0, *pieces]).cumsum(0)  # over the rows end to end
    first_seen = torch.repeat_interleave(begins[:-1], torch.tensor(pieces)).view(-1, length)
    first_seen = first_seen - torch.arange(first_seen.shape[0])[:, None] * length  # [B, S]: the first key that a query sees
    if window is not None:
        first_seen = torch.maximum(first_seen, torch.arange(length) - (window - 1))
    for row, firsts in enumerate(first_seen):
        for number, start in enumerate(range(0, length, height)):
            stop = min(start + height, length)
            first_key = int(firsts[start])
            if int(firsts[stop - 1]) == first_key:  # all see the same first: only keys among its own queries can be unseen
                tiles.append(Tile(row, number, start, stop, first_key, None, start))
                continue
            keys, queries = torch.arange(first_key, stop), torch.arange(start, stop)
            unseen = (keys > queries[:, None]) | (keys < firsts[start:stop, None])
            tiles.append(Tile(row, number, start, stop, first_key, unseen, first_key))
    return tuple(tiles)


@functools.lru_cache(maxsize=4)
def _later(num_queries: int, sharing: int) -> Tensor:
    """fp32 [num_queries * sharing, num_queries]: -inf at a query's later keys, else 0. Adding it is faster than a fill by bools."""
    return torch.full((num_queries, num_queries), float("-inf")).triu(1).repeat_interleave(sharing, dim=0)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, pieces: tuple[int, ...] | None, window: int | None
    ) -> Tensor:
        k, v = k.contiguous(), v.contiguous()  # so that every tile's keys lie without gaps
        compiling = torch.compiler.is_compiling()
        out = _whole_forward(q, k, v, segments, window) if compiling else _forward(q, k, v, _tiles(q, k, segments, pieces, window))
        ctx.save_for_backward(q, k, v, out, *([] if segments is None else [segments]))
        ctx.pieces, ctx.window = None if compiling else pieces, window
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:  # type: ignore[override]
        q, k, v, out, *rest = ctx.saved_tensors
        segments = rest[0] if rest else None
        if torch.compiler.is_compiling():
            q_gradient, k_gradient, v_gradient = _whole_backward(gradient, q, k, v, out, segments, ctx.window)
        else:
            tiles = _tiles(q, k, segments, ctx.pieces, ctx.window)
            q_gradient, k_gradient, v_gradient = _backward(gradient, q, k, v, out, tiles)
        return q_gradient, k_gradient, v_gradient, None, None, None


def _forward(q: Tensor, k: Tensor, v: Tensor, tiles: tuple[Tile, ...]) -> Tensor:
    num_kv_heads, sharing = k.shape[1], q.shape[1] // k.shape[1]
    queries = _grouped(q, k).float() * q.shape[3] ** -0.5
    out = torch.empty_like(queries, dtype=q.dtype)
    queries_of, out_of = _by_tile(queries), _by_tile(out)
    keys_of, values_of = _by_head(k.float()), _by_head(v)
    for tile in tiles:
        for at in range(tile.row * num_kv_heads, (tile.row + 1) * num_kv_heads):
            probabilities = _probabilities(queries_of[tile.number][at], keys_of[at][tile.first_key : tile.stop], tile, sharing)
            multiply_into(out_of[tile.number][at], probabilities.to(q.dtype), values_of[at][tile.first_key : tile.stop].t())
    return _like_queries(q).copy_(_ungrouped(out))


def _backward(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, tiles: tuple[Tile, ...]) -> tuple[Tensor, Tensor, Tensor]:
    num_kv_heads, sharing, scale = k.shape[1], q.shape[1] // k.shape[1], q.shape[3] ** -0.5
    queries, above = _grouped(q, k), _grouped(gradient, k)
    exact_above = above.float()
    along = (exact_above * _grouped(out, k)).sum(dim=-1, keepdim=True)
    q_gradient = torch.empty_like(queries)
    k_gradient, v_gradient = (torch.zeros(x.shape, dtype=torch.float32) for x in (k, v))
    by_tile = [_by_tile(x) for x in (queries, queries.float() * scale, above, exact_above, along, q_gradient)]
    by_head = [_by_head(x) for x in (k, k.float(), v.float(), k_gradient, v_gradient)]
    for tile in tiles:
        for at in range(tile.row * num_kv_heads, (tile.row + 1) * num_kv_heads):
            mine, exact, over, exact_over, over_along, mine_gradient = (x[tile.number][at] for x in by_tile)
            keys, exact_keys, exact_values, keys_gradient, values_gradient = (x[at][tile.first_key : tile.stop] for x in by_head)
            probabilities = _probabilities(exact, exact_keys, tile, sharing)
            values_gradient.add_(times_transposed(probabilities.to(q.dtype).t(), over.t()))
            scores_gradient = times_transposed(exact_over, exact_values).sub_(over_along).mul_(probabilities).to(q.dtype)
            multiply_into(mine_gradient, scores_gradient, keys.t())
            keys_gradient.add_(times_transposed(scores_gradient.t(), mine.t()))
    q_gradient = torch.mul(_ungrouped(q_gradient), scale, out=_like_queries(q))
    return q_gradient, k_gradient.mul_(scale).to(k.dtype), v_gradient.to(v.dtype)


# Views for all tiles at once: made one by one in the loop they would cost as much as a small product.


def _by_tile(x: Tensor) -> list[tuple[Tensor, ...]]:
    """[B, K, S, H/K, E] -> by tile of a row, then by row * K + head: [queries * heads, E]."""
    sharing = x.shape[3]
    return [part.unbind(0) for part in x.flatten(0, 1).flatten(1, 2).split(tile_height(sharing) * sharing, dim=1)]


def _by_head(x: Tensor) -> tuple[Tensor, ...]:
    """[B, K, S, E] -> by row * K + head: [S, E]."""
    return x.flatten(0, 1).unbind(0)


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """[B, H, S, E] -> [B, K, S, H/K, E] in memory: a tile's queries of all heads that share a key head lie together."""
    return x.unflatten(1, (k.shape[1], -1)).transpose(2, 3).contiguous()


def _ungrouped(x: Tensor) -> Tensor:
    return x.transpose(2, 3).flatten(1, 2)


def _like_queries(q: Tensor) -> Tensor:
    """Uninitialised [B, H, S, E], in memory [B, S, H, E] as the layers around attention have it."""
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], q.shape[3]).transpose(1, 2)


# The same as operators: a compiler leaves them whole, and does not see the documents' lengths, which change with each batch.


@torch.library.custom_op(
    "megatron_lite::tiled_attention", mutates_args=(), schema="(Tensor q, Tensor k, Tensor v, Tensor? segments, int? window=None) -> Tensor"
)
def _whole_forward(q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, window: int | None = None) -> Tensor:
    return _forward(q, k, v, _tiles(q, k, segments, None, window))


@_whole_forward.register_fake
def _shape_forward(q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, window: int | None = None) -> Tensor:
    return _like_queries(q)


@torch.library.custom_op(
    "megatron_lite::tiled_attention_backward",
    mutates_args=(),
    schema="(Tensor gradient, Tensor q, Tensor k, Tensor v, Tensor out, Tensor? segments, int? window=None) -> (Tensor, Tensor, Tensor)",
)
def _whole_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, segments: Tensor | None, window: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    return _backward(gradient, q, k, v, out, _tiles(q, k, segments, None, window))


@_whole_backward.register_fake
def _shapes_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, segments: Tensor | None, window: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    return _like_queries(q), torch.empty_like(k), torch.empty_like(v)


def _probabilities(queries: Tensor, keys: Tensor, tile: Tile, sharing: int) -> Tensor:
    """softmax over what each query sees, fp32 [queries * heads, keys], of queries already scaled."""
    scores = times_transposed(queries, keys)
    unseen_from = tile.unseen_from - tile.first_key
    if tile.unseen is None:
        scores[:, unseen_from:].add_(_later(tile.stop - tile.start, sharing))
    else:
        scores.view(-1, sharing, scores.shape[1])[:, :, unseen_from:].masked_fill_(tile.unseen[:, None], float("-inf"))
    return scores.softmax(dim=1)
