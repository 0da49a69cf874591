"""Attention proper: the one seam where fast code goes in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

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

    @classmethod
    def of_segments(
        cls, segments: Tensor, *, kernel: DocumentKernel = "pieces", boundaries: Tensor | None = None, longest: int = 0
    ) -> AttentionMask:
        """Causal within runs of equal numbers in [B, S], for one of the document kernels.

        `boundaries` int32 [N + 1] are the runs' first tokens in the rows laid end to end, then B * S; `longest` is the
        longest run. Where they are not given they are read from the device, which waits for it.
        """
        if kernel == "blocks":
            return cls(allowed=_blocks(segments))
        if kernel == "flex":
            from megatron_lite.layers.gpu_attention import Flex  # seconds to load

            return cls(fused=Flex.of(segments), segments=segments)
        if boundaries is None:
            boundaries = boundaries_of(segments)
            longest = int(boundaries.diff().max())
        if kernel == "varlen":
            from megatron_lite.layers.gpu_attention import Varlen

            return cls(fused=Varlen.of(boundaries, longest=longest, length=segments.shape[1]), segments=segments)
        return cls(pieces=tuple(boundaries.diff().tolist()), segments=segments)

    @classmethod
    def of_positions(cls, queries: Tensor, keys: Tensor) -> AttentionMask:
        """A query at position p sees keys at 0..p, for queries [B, S] that are the last of the keys [B, T].

        Keys at negative positions are padding. A query that sees none (padding itself) sees itself.
        """
        allowed = (keys[:, None, :] <= queries[:, :, None]) & (keys >= 0)[:, None, :]
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
        return _blocks(self.segments) if self.segments is not None else _causal(num_queries, num_keys, device)


@dataclass(frozen=True)
class AttentionDropout:
    """Dropout of a layer's attention probabilities; `first_head` is the global number of this rank's first head."""

    probability: float
    place: DropoutPlace
    first_head: int
    where: int = PROBABILITIES


def attention(q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask, dropout: AttentionDropout | None = None) -> Tensor:
    """softmax(q k^T / sqrt(E)) v: q [B, H, S, E], k and v [B, K, T, E] -> [B, H, S, E]; query head h reads head h // (H/K)."""
    if dropout is not None:
        return _by_hand(q, k, v, mask, dropout)
    if mask.fused is not None:
        return mask.fused.attend(q, k, v)
    if mask.segments is not None:
        return _within_pieces(q, k, v, mask)
    if mask.allowed is None and serves(q, k):
        return tiled_attention(q, k, v, None)
    allowed, num_queries, num_keys = mask.allowed, q.shape[2], k.shape[2]
    causal = allowed is None and num_queries == num_keys
    if allowed is None and 1 < num_queries < num_keys:  # SDPA's own causal flag would align the triangle top-left
        allowed = _causal(num_queries, num_keys, q.device)
    shared = q.shape[1] != k.shape[1]
    if shared and num_queries == 1:  # decoding: heads that share a key become its queries, and nothing of the cache is repeated
        together = q.unflatten(1, (k.shape[1], -1)).squeeze(3)  # [B, K, H/K, E]
        return F.scaled_dot_product_attention(together, k, v, attn_mask=allowed).flatten(1, 2).unsqueeze(2)
    if shared and q.is_cuda and (allowed is not None or q.dtype == torch.float32):
        # Of the kernels that don't hold all S * T scores only FlashAttention shares heads, and it takes neither of these.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        shared = False
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, is_causal=causal, enable_gqa=shared)


def _within_pieces(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
    if torch.compiler.is_compiling():  # it must not see the lengths: code would be compiled for each batch's anew
        if serves(q, k):
            return tiled_attention(q, k, v, mask.segments)
        return attention(q, k, v, mask=AttentionMask(allowed=mask.as_blocks(q.shape[2], k.shape[2], q.device)))
    assert mask.pieces is not None
    return tiled_attention(q, k, v, mask.segments, mask.pieces) if serves(q, k) else _by_pieces(q, k, v, mask.pieces)


def _by_pieces(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Causal attention within each piece, rows laid end to end; cut by one split and joined by one cat, so that backward is
    a cat and a split and not a full-sized gradient for every piece."""
    queries, keys, values = (x.transpose(1, 2).flatten(0, 1).split(lengths) for x in (q, k, v))  # [n, heads, E] each
    mixed = [
        attention(*(x.transpose(0, 1)[None] for x in piece), mask=AttentionMask())[0].transpose(0, 1)
        for piece in zip(queries, keys, values)
    ]
    whole = torch.cat(mixed)  # [B * S, H, E]
    return whole.unflatten(0, (q.shape[0], q.shape[2])).transpose(1, 2)


def _by_hand(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, dropout: AttentionDropout) -> Tensor:
    """The formula written out, in fp32: the only way to drop probabilities by their logical coordinates."""
    num_queries, num_keys, head_size = q.shape[2], k.shape[2], q.shape[3]
    allowed = mask.as_blocks(num_queries, num_keys, q.device)
    grouped = q.unflatten(1, (k.shape[1], -1)).float()  # [B, K, H/K, S, E]
    scores = torch.matmul(grouped, k.float().unsqueeze(2).transpose(-1, -2)) * head_size**-0.5
    probabilities = scores.flatten(1, 2).masked_fill(~allowed, float("-inf")).softmax(dim=-1)
    kept = attention_dropout(
        probabilities, dropout.probability, dropout.place, first_head=dropout.first_head, where=dropout.where
    ).unflatten(1, (k.shape[1], -1))
    return torch.matmul(kept, v.float().unsqueeze(2)).flatten(1, 2).to(q.dtype)


def _blocks(segments: Tensor) -> Tensor:
    """bool [B, 1, S, S]: causal within equal numbers."""
    return (segments[:, :, None] == segments[:, None, :]).tril_()[:, None]


def _causal(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """bool [S, T]: the queries are the last of the keys."""
    return torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_queries)
