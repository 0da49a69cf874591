"""Causal attention on CPU, tile by tile in both directions: torch's own kernel multiplies at a fraction of what its matrix
products reach, and its backward takes twice that. A tile is some queries of all heads that share a key head, against the
keys that any of them sees; its scores stay in a core's cache and are made again in backward (Dao et al. 2022)."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_lite.layers.matmul import times_transposed
from megatron_lite.sizes import LEAST_TILE_SCORES, tile_height, tile_scores

_LEAST_SCORES = LEAST_TILE_SCORES
_MOST_THREADS = 4  # tiles follow one after the other: with many cores torch's kernel, a head a core, wins


@dataclass(frozen=True)
class Tile:
    """Queries start..stop of a row against its keys first_key..stop."""

    row: int
    start: int
    stop: int
    first_key: int
    unseen: Tensor  # bool [stop - start, stop - unseen_from]: the keys from there on that a query does not see
    unseen_from: int


def serves(q: Tensor, k: Tensor) -> bool:
    """Whether tiles are the faster way: q [B, H, S, E], k [B, K, T, E]."""
    length, sharing = q.shape[2], q.shape[1] // k.shape[1]
    suited = q.device.type == "cpu" and q.dtype in (torch.float32, torch.bfloat16) and length == k.shape[2]
    return suited and tile_scores(sharing, length) >= _LEAST_SCORES and torch.get_num_threads() <= _MOST_THREADS


def tiled_attention(q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, pieces: tuple[int, ...] | None = None) -> Tensor:
    """softmax(q k^T / sqrt(E)) v: q [B, H, S, E], k and v [B, K, S, E] -> [B, H, S, E]; causal within runs of equal numbers in
    segments [B, S] (`pieces` are the runs' lengths, if known), or within the rows. Scores, softmax and its gradient are fp32."""
    return _Tiled.apply(q, k, v, segments, pieces)


def _tiles(q: Tensor, k: Tensor, segments: Tensor | None, pieces: tuple[int, ...] | None) -> tuple[Tile, ...]:
    if pieces is None:
        pieces = (q.shape[2],) * q.shape[0] if segments is None else run_lengths(segments)
    return tiles_of(pieces, q.shape[2], tile_height(q.shape[1] // k.shape[1]))


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
def tiles_of(pieces: tuple[int, ...], length: int, height: int) -> tuple[Tile, ...]:
    """The tiles of all rows of this length."""
    tiles: list[Tile] = []
    begins = torch.tensor([0, *pieces]).cumsum(0)  # over the rows end to end
    first_seen = torch.repeat_interleave(begins[:-1], torch.tensor(pieces)).view(-1, length)
    first_seen = first_seen - torch.arange(first_seen.shape[0])[:, None] * length  # [B, S]: the first key that a query sees
    for row, firsts in enumerate(first_seen):
        for start in range(0, length, height):
            stop = min(start + height, length)
            first_key = int(firsts[start])
            # Where one document fills the tile, only the keys among its own queries need a mask.
            mask_from = start if int(firsts[stop - 1]) == first_key else first_key
            keys, queries = torch.arange(mask_from, stop), torch.arange(start, stop)
            unseen = (keys > queries[:, None]) | (keys < firsts[start:stop, None])
            tiles.append(Tile(row, start, stop, first_key, unseen, mask_from))
    return tuple(tiles)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, pieces: tuple[int, ...] | None) -> Tensor:
        k, v = k.contiguous(), v.contiguous()  # so that every tile's keys lie without gaps
        compiling = torch.compiler.is_compiling()
        out = _whole_forward(q, k, v, segments) if compiling else _forward(q, k, v, _tiles(q, k, segments, pieces))
        ctx.save_for_backward(q, k, v, out, *([] if segments is None else [segments]))
        ctx.pieces = None if compiling else pieces
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:  # type: ignore[override]
        q, k, v, out, *rest = ctx.saved_tensors
        segments = rest[0] if rest else None
        if torch.compiler.is_compiling():
            q_gradient, k_gradient, v_gradient = _whole_backward(gradient, q, k, v, out, segments)
        else:
            q_gradient, k_gradient, v_gradient = _backward(gradient, q, k, v, out, _tiles(q, k, segments, ctx.pieces))
        return q_gradient, k_gradient, v_gradient, None, None


def _forward(q: Tensor, k: Tensor, v: Tensor, tiles: tuple[Tile, ...]) -> Tensor:
    queries, exact_k, sharing = _grouped(q, k).float() * q.shape[3] ** -0.5, k.float(), q.shape[1] // k.shape[1]
    out = torch.empty_like(queries, dtype=q.dtype)
    for tile in tiles:
        for head in range(k.shape[1]):
            at, keys = (tile.row, head, slice(tile.start, tile.stop)), (tile.row, head, slice(tile.first_key, tile.stop))
            probabilities = _probabilities(queries[at].flatten(0, 1), exact_k[keys], tile, sharing)
            out[at] = times_transposed(probabilities.to(q.dtype), v[keys].t()).view(-1, sharing, q.shape[3])
    return _like_queries(q).copy_(_ungrouped(out))


def _backward(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, tiles: tuple[Tile, ...]) -> tuple[Tensor, Tensor, Tensor]:
    scale, sharing = q.shape[3] ** -0.5, q.shape[1] // k.shape[1]
    queries, above, exact_k, exact_v = _grouped(q, k), _grouped(gradient, k), k.float(), v.float()
    exact_queries, exact_above = queries.float() * scale, above.float()
    along = (exact_above * _grouped(out, k)).sum(dim=-1, keepdim=True)
    q_gradient = torch.empty_like(queries)
    k_gradient, v_gradient = (torch.zeros(x.shape, dtype=torch.float32) for x in (k, v))
    for tile in tiles:
        for head in range(k.shape[1]):
            at, keys = (tile.row, head, slice(tile.start, tile.stop)), (tile.row, head, slice(tile.first_key, tile.stop))
            probabilities = _probabilities(exact_queries[at].flatten(0, 1), exact_k[keys], tile, sharing)
            v_gradient[keys] += times_transposed(probabilities.to(q.dtype).t(), above[at].flatten(0, 1).t())
            scores_gradient = times_transposed(exact_above[at].flatten(0, 1), exact_v[keys])
            scores_gradient = scores_gradient.sub_(along[at].flatten(0, 1)).mul_(probabilities).to(q.dtype)
            q_gradient[at] = times_transposed(scores_gradient, k[keys].t()).view(-1, sharing, q.shape[3])
            k_gradient[keys] += times_transposed(scores_gradient.t(), queries[at].flatten(0, 1).t())
    q_gradient = torch.mul(_ungrouped(q_gradient), scale, out=_like_queries(q))
    return q_gradient, k_gradient.mul_(scale).to(k.dtype), v_gradient.to(v.dtype)


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
    "megatron_lite::tiled_attention", mutates_args=(), schema="(Tensor q, Tensor k, Tensor v, Tensor? segments) -> Tensor"
)
def _whole_forward(q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None) -> Tensor:
    return _forward(q, k, v, _tiles(q, k, segments, None))


@_whole_forward.register_fake
def _shape_forward(q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None) -> Tensor:
    return _like_queries(q)


@torch.library.custom_op(
    "megatron_lite::tiled_attention_backward",
    mutates_args=(),
    schema="(Tensor gradient, Tensor q, Tensor k, Tensor v, Tensor out, Tensor? segments) -> (Tensor, Tensor, Tensor)",
)
def _whole_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, segments: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    return _backward(gradient, q, k, v, out, _tiles(q, k, segments, None))


@_whole_backward.register_fake
def _shapes_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, segments: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    return _like_queries(q), torch.empty_like(k), torch.empty_like(v)


def _probabilities(queries: Tensor, keys: Tensor, tile: Tile, sharing: int) -> Tensor:
    """softmax over what each query sees, fp32 [queries * heads, keys], of queries already scaled."""
    scores = times_transposed(queries, keys)
    masked = scores.view(-1, sharing, scores.shape[1])[:, :, tile.unseen_from - tile.first_key :]
    masked.masked_fill_(tile.unseen[:, None], float("-inf"))
    return scores.softmax(dim=1)
