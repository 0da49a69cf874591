"""Attention proper: the one seam where fast code goes in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lite.attention_sizes import Bias, written_out
from megatron_lite.layers.document_kernels import DocumentKernel
from megatron_lite.layers.dropout import PROBABILITIES, DropoutPlace, attention_dropout
from megatron_lite.layers.tiled_attention import boundaries_of, serves, tiled_attention


class FusedMask(Protocol):
    """A mask in the form of a kernel of its own (gpu_attention.py)."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class AttentionMask:
    """Which keys a query may see. All None: causal, the queries being the last of the keys.

    Every query may see at least one key, so that no softmax is over nothing.
    """

    allowed: Tensor | None = None  # bool [B, 1, S, T]
    pieces: tuple[int, ...] | None = None  # lengths of the document pieces, row after row: causal within each
    fused: FusedMask | None = None  # causal within the same pieces, on GPUs
    segments: Tensor | None = None  # [B, S], what pieces or fused was made from
    window: int | None = None  # of what is said above a query sees the last so many keys; `allowed` and `fused` know it already
    bias: Tensor | None = None  # fp32, broadcasting to [B, H, S, T]: added to the scores, -inf where position alone hides a key

    @classmethod
    def of_segments(
        cls,
        segments: Tensor,
        *,
        kernel: DocumentKernel = "pieces",
        boundaries: Tensor | None = None,
        longest: int = 0,
        window: int | None = None,
    ) -> AttentionMask:
        """Causal within runs of equal numbers in [B, S], of those the last `window` keys, for one of the document kernels.

        `boundaries` int32 [N + 1] are the runs' first tokens in the rows laid end to end, then B * S; `longest` is the
        longest run. Where they are not given they are read from the device, which waits for it.
        """
        if kernel == "blocks":
            return cls(allowed=_blocks(segments, window))
        if kernel == "flex":
            from megatron_lite.layers.gpu_attention import Flex  # seconds to load

            return cls(fused=Flex.of(segments, window=window), segments=segments, window=window)
        if boundaries is None:
            boundaries = boundaries_of(segments)
            longest = int(boundaries.diff().max())
        if kernel == "varlen":
            from megatron_lite.layers.gpu_attention import Varlen

            fused = Varlen.of(boundaries, longest=longest, length=segments.shape[1], window=window)
            return cls(fused=fused, segments=segments, window=window)
        return cls(pieces=tuple(boundaries.diff().tolist()), segments=segments, window=window)

    @classmethod
    def of_positions(cls, queries: Tensor, keys: Tensor, *, window: int | None = None) -> AttentionMask:
        """A query at position p sees keys at 0..p, of those the last `window`, for queries [B, S] that are the last of the keys [B, T].

        Keys at negative positions are padding. A query that sees none (padding itself) sees itself.
        """
        allowed = (keys[:, None, :] <= queries[:, :, None]) & (keys >= 0)[:, None, :]
        if window is not None:
            allowed &= keys[:, None, :] > queries[:, :, None] - window
        num_queries, num_keys = queries.shape[1], keys.shape[1]
        itself = torch.ones(num_queries, num_keys, dtype=torch.bool, device=keys.device)
        itself = itself.tril(num_keys - num_queries).triu(num_keys - num_queries)
        return cls(allowed=(allowed | itself)[:, None])

    @classmethod
    def between_segments(cls, queries: Tensor, keys: Tensor) -> AttentionMask:
        """Not causal: a query sees the keys that have its number, for numbers [B, S] and [B, T]. One that would see none, which can
        only be padding, sees all: what it computes means nothing, but it must be a number."""
        allowed = queries[:, :, None] == keys[:, None, :]
        if queries is not keys:
            allowed |= ~allowed.any(dim=-1, keepdim=True)
        return cls(allowed=allowed[:, None])

    def as_blocks(self, num_queries: int, num_keys: int, device: torch.device) -> Tensor:
        """The same as bool, broadcasting to [B, 1, S, T]."""
        if self.allowed is not None:
            return self.allowed
        if self.segments is not None:
            return _blocks(self.segments, self.window)
        return _causal(num_queries, num_keys, device, self.window)

    def with_bias(self, bias: Tensor) -> AttentionMask:
        """The same with fp32 [H, S, S], or [B, H, S, T] where this has `allowed`, added to the scores."""
        num_queries, num_keys = bias.shape[-2:]
        seen = self.allowed if self.allowed is not None else _causal(num_queries, num_keys, bias.device, self.window)
        return replace(self, bias=torch.where(seen, bias, float("-inf")))


@dataclass(frozen=True)
class Scoring:
    """What is done to a layer's scores beside the mask."""

    softcap: float | None = None  # s -> softcap * tanh(s / softcap), before the bias
    sinks: Tensor | None = None  # [H]: a score that each head's softmax counts and nothing comes of


PLAIN = Scoring()


@dataclass(frozen=True)
class AttentionDropout:
    """Dropout of a layer's attention probabilities; `first_head` is the global number of this rank's first head."""

    probability: float
    place: DropoutPlace
    first_head: int
    where: int = PROBABILITIES


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask, dropout: AttentionDropout | None = None, scoring: Scoring = PLAIN
) -> Tensor:
    """softmax(q k^T / sqrt(E)) v: q [B, H, S, E], k and v [B, K, T, E] -> [B, H, S, E]; query head h reads head h // (H/K)."""
    if _written_out(q, mask, dropout, scoring):
        by_pieces = dropout is None and mask.pieces is not None and not torch.compiler.is_compiling() and not _learns(mask)
        return _by_pieces(q, k, v, mask, scoring) if by_pieces else _by_hand(q, k, v, mask, dropout, scoring)
    if mask.fused is not None:
        return mask.fused.attend(q, k, v)
    if mask.segments is not None:
        return _within_pieces(q, k, v, mask)
    allowed, num_queries, num_keys = mask.allowed, q.shape[2], k.shape[2]
    if mask.bias is not None:
        allowed = mask.bias if mask.bias.dim() == 4 else mask.bias[None]
        allowed = allowed.to(torch.promote_types(allowed.dtype, q.dtype))  # SDPA takes the bytes of an fp32 bias for float64's
    if allowed is None and serves(q, k):
        return tiled_attention(q, k, v, None, window=mask.window)
    cut_short = mask.window is not None and mask.window < num_keys
    causal = allowed is None and num_queries == num_keys and not cut_short
    if allowed is None and (cut_short or 1 < num_queries < num_keys):  # SDPA's own causal flag would align the triangle top-left
        allowed = _causal(num_queries, num_keys, q.device, mask.window)
    shared = q.shape[1] != k.shape[1]
    if shared and num_queries == 1:  # decoding: heads that share a key become its queries, and nothing of the cache is repeated
        together = q.unflatten(1, (k.shape[1], -1)).squeeze(3)  # [B, K, H/K, E]
        if mask.bias is not None and allowed is not None:
            allowed = allowed.unflatten(1, (k.shape[1], -1)).squeeze(3)
        return F.scaled_dot_product_attention(together, k, v, attn_mask=allowed).flatten(1, 2).unsqueeze(2)
    if shared and q.is_cuda and (allowed is not None or q.dtype == torch.float32):
        # Of the kernels that don't hold all S * T scores only FlashAttention shares heads, and it takes neither of these.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        shared = False
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, is_causal=causal, enable_gqa=shared)


def _written_out(q: Tensor, mask: AttentionMask, dropout: AttentionDropout | None, scoring: Scoring) -> bool:
    bias: Bias = "none" if mask.bias is None else "learned" if _learns(mask) else "fixed"
    dropped, changed, compiled = dropout is not None, scoring is not PLAIN, torch.compiler.is_compiling()
    return written_out(dropout=dropped, changed=changed, bias=bias, on_cpu=not q.is_cuda, compiled=compiled)


def _learns(mask: AttentionMask) -> bool:
    return mask.bias is not None and mask.bias.requires_grad


def _within_pieces(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
    if mask.bias is not None:
        return _by_pieces(q, k, v, mask, PLAIN)
    if torch.compiler.is_compiling():  # it must not see the lengths: code would be compiled for each batch's anew
        if serves(q, k):
            return tiled_attention(q, k, v, mask.segments, window=mask.window)
        return attention(q, k, v, mask=AttentionMask(allowed=mask.as_blocks(q.shape[2], k.shape[2], q.device)))
    assert mask.pieces is not None
    if serves(q, k):
        return tiled_attention(q, k, v, mask.segments, mask.pieces, window=mask.window)
    return _by_pieces(q, k, v, mask, PLAIN)


def _by_pieces(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scoring: Scoring) -> Tensor:
    """Causal attention within each piece, rows laid end to end; cut by one split and joined by one cat, so that backward is
    a cat and a split and not a full-sized gradient for every piece."""
    assert mask.pieces is not None
    queries, keys, values = (x.transpose(1, 2).flatten(0, 1).split(mask.pieces) for x in (q, k, v))  # [n, heads, E] each
    mixed = [
        attention(*(x.transpose(0, 1)[None] for x in piece), mask=_of_piece(mask, len(piece[0])), scoring=scoring)[0].transpose(0, 1)
        for piece in zip(queries, keys, values)
    ]
    whole = torch.cat(mixed)  # [B * S, H, E]
    return whole.unflatten(0, (q.shape[0], q.shape[2])).transpose(1, 2)


def _of_piece(mask: AttentionMask, length: int) -> AttentionMask:
    """Of a piece of so many tokens: a bias by distance is the same in each."""
    return AttentionMask(window=mask.window, bias=None if mask.bias is None else mask.bias[..., :length, :length])


def _by_hand(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, dropout: AttentionDropout | None, scoring: Scoring = PLAIN) -> Tensor:
    """The formula written out, in fp32: the only way to drop probabilities by their logical coordinates, or to change scores."""
    num_queries, num_keys, head_size = q.shape[2], k.shape[2], q.shape[3]
    allowed = mask.as_blocks(num_queries, num_keys, q.device)
    grouped = q.unflatten(1, (k.shape[1], -1)).float()  # [B, K, H/K, S, E]
    scores = (torch.matmul(grouped, k.float().unsqueeze(2).transpose(-1, -2)) * head_size**-0.5).flatten(1, 2)
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    if mask.bias is not None:
        scores = scores + mask.bias
    scores = scores.masked_fill(~allowed, float("-inf"))
    if scoring.sinks is not None:
        sinks = scoring.sinks.float()[:, None, None].expand(*scores.shape[:3], 1)
        probabilities = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        probabilities = scores.softmax(dim=-1)
    if dropout is not None:
        first, where = dropout.first_head, dropout.where
        probabilities = attention_dropout(probabilities, dropout.probability, dropout.place, first_head=first, where=where)
    kept = probabilities.unflatten(1, (k.shape[1], -1))
    return torch.matmul(kept, v.float().unsqueeze(2)).flatten(1, 2).to(q.dtype)


def _blocks(segments: Tensor, window: int | None = None) -> Tensor:
    """bool [B, 1, S, S]: causal within equal numbers, of those the last `window`."""
    together = (segments[:, :, None] == segments[:, None, :]).tril_()
    return (together if window is None else together.triu_(1 - window))[:, None]


def _causal(num_queries: int, num_keys: int, device: torch.device, window: int | None = None) -> Tensor:
    """bool [S, T]: the queries are the last of the keys, and see the last `window` up to themselves."""
    offset = num_keys - num_queries
    seen = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(offset)
    return seen if window is None else seen.triu(offset + 1 - window)
