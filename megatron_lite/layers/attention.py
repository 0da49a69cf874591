"""Self-attention with grouped key-value heads, heads cut over tp."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_lite.layers.context import ForwardContext
from megatron_lite.layers.kernels import AttentionDropout, attention
from megatron_lite.layers.linear import RowLinear, bias_of, cut_rows, cut_vectors, enter_tp, parameter_of
from megatron_lite.layers.matmul import linear
from megatron_lite.layers.positions import rotate
from megatron_lite.layers.query_key import Sinks, query_key, scoring_of
from megatron_lite.model_config import ModelConfig
from megatron_lite.parallel.collectives import gather_rows
from megatron_lite.parallel.groups import Axis, ProcessGroups


class QKVLinear(nn.Module):
    """Queries, keys and values as one product: [B, S/tp or S, D] -> [B, S, (H/tp + 2 * heads) * E], heads = max(K/tp, 1).

    With tp > K, r = tp/K ranks share a head: each owns E/r rows of its key and value matrices, which are all-gathered
    among them in forward; their gradient is reduce-scattered.
    """

    def __init__(self, config: ModelConfig, groups: ProcessGroups, *, name: str) -> None:
        super().__init__()
        self.tp = groups.tp
        self.sharing = groups.subgroup("tp", max(groups.tp.size // config.kv_heads, 1))
        queries, keys = config.num_attention_heads * config.head_size, config.kv_heads * config.head_size
        blocks = {f"{name}.q.weight": queries, f"{name}.k.weight": keys, f"{name}.v.weight": keys}
        self.weight = parameter_of(cut_rows(blocks, config.hidden_size, groups.tp))
        biases = {bias_of(name): rows for name, rows in blocks.items()}
        self.bias = parameter_of(cut_vectors(biases, groups.tp)) if config.attention.qkv_bias else None
        self.query_rows, self.kv_rows = queries // groups.tp.size, keys // groups.tp.size

    def forward(self, x: Tensor, *, split: bool) -> Tensor:
        weight, bias = self._whole(self.weight), None if self.bias is None else self._whole(self.bias)
        return linear(enter_tp(x, self.tp, split=split), weight, bias)

    def _whole(self, weight: Tensor) -> Tensor:
        """With the other ranks' rows of the key and value heads that this rank shares."""
        if self.sharing.size == 1:
            return weight
        queries, keys_values = weight.split([self.query_rows, 2 * self.kv_rows])
        return torch.cat([queries, _gathered(keys_values, self.sharing)])


class KVLinear(nn.Module):
    """Keys and values alone, of an x [B, S, D] that has entered the tp region: -> [B, S, 2 * heads * E]. Shared heads as above."""

    def __init__(self, config: ModelConfig, groups: ProcessGroups, *, name: str) -> None:
        super().__init__()
        self.sharing = groups.subgroup("tp", max(groups.tp.size // config.kv_heads, 1))
        keys = config.kv_heads * config.head_size
        blocks = {f"{name}.k.weight": keys, f"{name}.v.weight": keys}
        self.weight = parameter_of(cut_rows(blocks, config.hidden_size, groups.tp))
        biases = {bias_of(name): rows for name, rows in blocks.items()}
        self.bias = parameter_of(cut_vectors(biases, groups.tp)) if config.attention.qkv_bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self._whole(self.weight), None if self.bias is None else self._whole(self.bias))

    def _whole(self, weight: Tensor) -> Tensor:
        return weight if self.sharing.size == 1 else _gathered(weight, self.sharing)


def _gathered(keys_values: Tensor, sharing: Axis) -> Tensor:
    """[2 * rows, ...], keys then values, of each rank that shares a head -> all of the head's, likewise."""
    parts = gather_rows(keys_values, sharing).unflatten(0, (sharing.size, 2, -1))
    return parts.transpose(0, 1).flatten(0, 2)


class Attention(nn.Module):
    """Self-attention: [B, S, D] -> [B, S, D], D replicated or S split over tp outside; who sees whom is the context's mask."""

    def __init__(self, config: ModelConfig, groups: ProcessGroups, *, name: str, layer: int, recompute: bool) -> None:
        super().__init__()
        self.layer, self.recompute = layer, recompute
        self.head_size = config.head_size
        self.num_heads = config.num_attention_heads // groups.tp.size
        self.num_kv_heads = max(config.kv_heads // groups.tp.size, 1)
        self.first_head = groups.tp.rank * self.num_heads
        self.dropout = config.attention_dropout
        self.qkv = QKVLinear(config, groups, name=name)
        self.query_key = query_key(config, groups, name=name)
        self.window, self.softcap = config.attention.window_of(layer), config.attention.logit_softcapping
        self.sinks = Sinks(config, groups, name=name) if config.attention.sinks else None
        size, bias = config.num_attention_heads * config.head_size, config.attention.o_bias
        self.o = RowLinear(size, config.hidden_size, groups, name=f"{name}.o.weight", bias=bias)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        qkv = self.qkv(x, split=context.split)
        if self.recompute and torch.is_grad_enabled():
            mixed = checkpoint(self._core, qkv, context, use_reentrant=False, preserve_rng_state=False)
        else:
            mixed = self._core(qkv, context)
        return self.o(mixed, split=context.split)

    def _core(self, qkv: Tensor, context: ForwardContext) -> Tensor:
        """[B, S, (H + 2K)/tp * E] -> [B, S, H/tp * E]."""
        heads = qkv.unflatten(-1, (-1, self.head_size))
        num_rotated = self.num_heads + self.num_kv_heads
        if self.query_key is None:
            queries_keys = heads[:, :, :num_rotated]
        else:
            queries, keys = heads[:, :, : self.num_heads], heads[:, :, self.num_heads : num_rotated]
            queries_keys = torch.cat([self.query_key.of_queries(queries), self.query_key.of_keys(keys)], dim=2)
        if context.rotation is not None:
            queries_keys = rotate(queries_keys, context.rotation)
        q, k = queries_keys.transpose(1, 2).split([self.num_heads, self.num_kv_heads], dim=1)
        v = heads[:, :, num_rotated:].transpose(1, 2)
        if context.store is not None:
            k, v = context.store.extend(self.layer, k, v)
        dropout = None
        if context.attention_dropout is not None and self.dropout > 0:
            dropout = AttentionDropout(self.dropout, context.attention_dropout, self.first_head)
        scoring = scoring_of(self.softcap, self.sinks)
        return attention(q, k, v, mask=context.masks[self.window], dropout=dropout, scoring=scoring).transpose(1, 2).flatten(2)
