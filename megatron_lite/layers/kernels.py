"""Attention proper: the one seam where fast code goes in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lite.layers.dropout import DropoutPlace, attention_dropout


@dataclass(frozen=True)
class AttentionMask:
    """Which keys a query may see. None: causal, the queries being the last of the keys. Else bool [B, 1, S, T].

    Every query may see at least one key, so that no softmax is over nothing.
    """

    allowed: Tensor | None = None

    @classmethod
    def of_segments(cls, segments: Tensor) -> AttentionMask:
        """Causal within equal numbers of segments [B, S]."""
        same = segments[:, :, None] == segments[:, None, :]
        return cls(same.tril_()[:, None])

    @classmethod
    def of_positions(cls, queries: Tensor, keys: Tensor) -> AttentionMask:
        """A query at position p sees keys at 0..p, for queries [B, S] that are the last of the keys [B, T].

        Keys at negative positions are padding. A query that sees none (padding itself) sees itself.
        """
        allowed = (keys[:, None, :] <= queries[:, :, None]) & (keys >= 0)[:, None, :]
        num_queries, num_keys = queries.shape[1], keys.shape[1]
        itself = torch.ones(num_queries, num_keys, dtype=torch.bool, device=keys.device)
        itself = itself.tril(num_keys - num_queries).triu(num_keys - num_queries)
        return cls((allowed | itself)[:, None])


@dataclass(frozen=True)
class AttentionDropout:
    """Dropout of attention probabilities at one site; `first_head` is the global number of this rank's first head."""

    probability: float
    place: DropoutPlace
    site: str
    first_head: int


def attention(q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask, dropout: AttentionDropout | None = None) -> Tensor:
    """softmax(q k^T / sqrt(E)) v: q [B, H, S, E], k and v [B, K, T, E] -> [B, H, S, E]; query head h reads head h // (H/K)."""
    if dropout is not None:
        return _by_hand(q, k, v, mask, dropout)
    allowed, num_queries, num_keys = mask.allowed, q.shape[2], k.shape[2]
    causal = allowed is None and num_queries == num_keys
    if allowed is None and 1 < num_queries < num_keys:  # SDPA's own causal flag would align the triangle top-left
        allowed = _causal(num_queries, num_keys, q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def _by_hand(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, dropout: AttentionDropout) -> Tensor:
    """The formula written out, in fp32: the only way to drop probabilities by their logical coordinates."""
    num_queries, num_keys, head_size = q.shape[2], k.shape[2], q.shape[3]
    allowed = mask.allowed if mask.allowed is not None else _causal(num_queries, num_keys, q.device)
    grouped = q.unflatten(1, (k.shape[1], -1)).float()  # [B, K, H/K, S, E]
    scores = torch.matmul(grouped, k.float().unsqueeze(2).transpose(-1, -2)) * head_size**-0.5
    probabilities = scores.flatten(1, 2).masked_fill(~allowed, float("-inf")).softmax(dim=-1)
    kept = attention_dropout(probabilities, dropout.probability, dropout.place, site=dropout.site, first_head=dropout.first_head).unflatten(
        1, (k.shape[1], -1)
    )
    return torch.matmul(kept, v.float().unsqueeze(2)).flatten(1, 2).to(q.dtype)


def _causal(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """bool [S, T]: the queries are the last of the keys."""
    return torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_queries)
