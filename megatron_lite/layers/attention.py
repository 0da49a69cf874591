"""Self-attention with grouped key-value heads, heads cut over tp."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_lite.layers.context import ForwardContext
from megatron_lite.layers.kernels import AttentionDropout, attention
from megatron_lite.layers.linear import RowLinear, cut_rows, enter_tp, parameter_of
from megatron_lite.layers.matmul import linear
from megatron_lite.layers.positions import rotate
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
        self.query_rows, self.kv_rows = queries // groups.tp.size, keys // groups.tp.size

    def forward(self, x: Tensor, *, split: bool) -> Tensor:
        weight: Tensor = self.weight
        if self.sharing.size > 1:
            queries, keys_values = weight.split([self.query_rows, 2 * self.kv_rows])
            weight = torch.cat([queries, _gathered(keys_values, self.sharing)])
        return linear(enter_tp(x, self.tp, split=split), weight)


class KVLinear(nn.Module):
    """Keys and values alone, of an x [B, S, D] that has entered the tp region: -> [B, S, 2 * heads * E]. Shared heads as above."""

    def __init__(self, config: ModelConfig, groups: ProcessGroups, *, name: str) -> None:
        super().__init__()
        self.sharing = groups.subgroup("tp", max(groups.tp.size // config.kv_heads, 1))
        keys = config.kv_heads * config.head_size
        self.weight = parameter_of(cut_rows({f"{name}.k.weight": keys, f"{name}.v.weight": keys}, config.hidden_size, groups.tp))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight if self.sharing.size == 1 else _gathered(self.weight, self.sharing))


def _gathered(keys_values: Tensor, sharing: Axis) -> Tensor:
    """[2 * rows, D], keys then values, of each rank that shares a head -> all of the head's, likewise."""
    rows, size = keys_values.shape[0] // 2, keys_values.shape[1]
    return gather_rows(keys_values, sharing).view(sharing.size, 2, rows, size).transpose(0, 1).reshape(-1, size)


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
        self.o = RowLinear(config.num_attention_heads * config.head_size, config.hidden_size, groups, name=f"{name}.o.weight")

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
        queries_keys = heads[:, :, :num_rotated]
        if context.rotation is not None:
            queries_keys = rotate(queries_keys, context.rotation)
        q, k = queries_keys.transpose(1, 2).split([self.num_heads, self.num_kv_heads], dim=1)
        v = heads[:, :, num_rotated:].transpose(1, 2)
        if context.store is not None:
            k, v = context.store.extend(self.layer, k, v)
        dropout = None
        if context.attention_dropout is not None and self.dropout > 0:
            dropout = AttentionDropout(self.dropout, context.attention_dropout, self.first_head)
        return attention(q, k, v, mask=context.mask, dropout=dropout).transpose(1, 2).flatten(2)
