"""Attention of a decoder to its source, heads cut over tp; keys and values are made of the encoder's output, once in decoding."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_lite.layers.attention import KVLinear
from megatron_lite.layers.context import EncodedSource, ForwardContext
from megatron_lite.layers.dropout import CROSS_PROBABILITIES
from megatron_lite.layers.kernels import AttentionDropout, attention
from megatron_lite.layers.linear import ColumnLinear, RowLinear
from megatron_lite.layers.query_key import Sinks, query_key, scoring_of
from megatron_lite.model_config import ModelConfig
from megatron_lite.parallel.groups import ProcessGroups


class CrossAttention(nn.Module):
    """Queries of x [B, T, D], keys and values of the context's memory [B, S, D] -> [B, T, D], D replicated or T split over tp outside."""

    def __init__(self, config: ModelConfig, groups: ProcessGroups, *, name: str, layer: int, recompute: bool) -> None:
        super().__init__()
        self.layer, self.recompute = layer, recompute
        self.head_size = config.head_size
        self.num_heads = config.num_attention_heads // groups.tp.size
        self.first_head = groups.tp.rank * self.num_heads
        self.dropout = config.attention_dropout
        size = config.num_attention_heads * config.head_size
        self.query_key = query_key(config, groups, name=name)
        self.softcap = config.attention.logit_softcapping
        self.sinks = Sinks(config, groups, name=name) if config.attention.sinks else None
        self.q = ColumnLinear(config.hidden_size, {f"{name}.q.weight": size}, groups, bias=config.attention.qkv_bias)
        self.kv = KVLinear(config, groups, name=name)
        self.o = RowLinear(size, config.hidden_size, groups, name=f"{name}.o.weight", bias=config.attention.o_bias)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        assert context.memory is not None, "a decoder with cross-attention needs a source"
        q = self.q(x, split=context.split)
        k, v = self.keys_values(context.memory)
        if self.recompute and torch.is_grad_enabled():
            mixed = checkpoint(self._core, q, k, v, context, use_reentrant=False, preserve_rng_state=False)
        else:
            mixed = self._core(q, k, v, context)
        return self.o(mixed, split=context.split)

    def keys_values(self, memory: EncodedSource) -> tuple[Tensor, Tensor]:
        """[B, K/tp, S, E] each: those that the memory has of this layer, or made, and put there if it keeps them."""
        if memory.projected is not None and self.layer in memory.projected:
            return memory.projected[self.layer]
        k, v = self.kv(memory.hidden).unflatten(-1, (-1, self.head_size)).chunk(2, dim=2)
        if self.query_key is not None:
            k = self.query_key.of_keys(k)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        if memory.projected is not None:
            memory.projected[self.layer] = k, v
        return k, v

    def _core(self, q: Tensor, k: Tensor, v: Tensor, context: ForwardContext) -> Tensor:
        """[B, T, H/tp * E] -> the same."""
        assert context.memory is not None
        dropout = None
        if context.attention_dropout is not None and self.dropout > 0:
            dropout = AttentionDropout(self.dropout, context.attention_dropout, self.first_head, where=CROSS_PROBABILITIES)
        queries = q.unflatten(-1, (-1, self.head_size))
        if self.query_key is not None:
            queries = self.query_key.of_queries(queries)
        scoring = scoring_of(self.softcap, self.sinks)
        mixed = attention(queries.transpose(1, 2), k, v, mask=context.memory.mask, dropout=dropout, scoring=scoring)
        return mixed.transpose(1, 2).flatten(2)
