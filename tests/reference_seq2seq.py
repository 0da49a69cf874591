"""The encoder-decoder in obvious maths: one row at a time, none of megatron_lite's code."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_lite.model_config import ModelConfig
from tests.reference import Row, Step, Weights, _rms_norm, _rotated, _wide, dropout_factor


def row_logits(weights: Weights, config: ModelConfig, row: Row, *, step: Step | None = None) -> Tensor:
    """[T, V] in the weights' dtype, for the row's targets."""
    assert row.source is not None
    to_source, to_target = _pieces(row.source_starts, len(row.source)), _pieces(row.segment_starts, len(row.inputs))
    of_source = "embedding.weight" if config.encoder.share_embedding else "encoder.embedding.weight"
    x = weights[of_source][torch.as_tensor(row.source).long()]
    x = _dropped(x, config, row, step, "encoder embedding")
    for layer in range(config.encoder.num_hidden_layers or config.num_hidden_layers):
        name = f"encoder.layers.{layer}"
        h = _rms_norm(x, weights[f"{name}.attention_norm.weight"], config.rms_norm_eps)
        seen = to_source[:, None] == to_source[None, :]
        mixed = _attention(weights, f"{name}.attention", config, h, h, seen, row, step, f"{name} probabilities", _places(to_source))
        x = x + _dropped(mixed, config, row, step, f"{name} attention")
        x = x + _dropped(_mlp(weights, name, config, x), config, row, step, f"{name} mlp")
    memory = _rms_norm(x, weights["encoder.final_norm.weight"], config.rms_norm_eps)

    x = _dropped(weights["embedding.weight"][torch.as_tensor(row.inputs).long()], config, row, step, "embedding")
    for layer in range(config.num_hidden_layers):
        name = f"layers.{layer}"
        h = _rms_norm(x, weights[f"{name}.attention_norm.weight"], config.rms_norm_eps)
        order = torch.arange(len(row.inputs))
        seen = (to_target[:, None] == to_target[None, :]) & (order[None, :] <= order[:, None])
        mixed = _attention(weights, f"{name}.attention", config, h, h, seen, row, step, f"{name} probabilities", _places(to_target))
        x = x + _dropped(mixed, config, row, step, f"{name} attention")
        h = _rms_norm(x, weights[f"{name}.cross_attention_norm.weight"], config.rms_norm_eps)
        seen = to_target[:, None] == to_source[None, :]
        seen = seen | ~seen.any(1, keepdim=True)  # padding without padding on the other side
        mixed = _attention(weights, f"{name}.cross_attention", config, h, memory, seen, row, step, f"{name} cross_probabilities", None)
        x = x + _dropped(mixed, config, row, step, f"{name} cross_attention")
        x = x + _dropped(_mlp(weights, name, config, x), config, row, step, f"{name} mlp")
    head = weights["embedding.weight" if config.tie_word_embeddings else "lm_head.weight"]
    return _rms_norm(x, weights["final_norm.weight"], config.rms_norm_eps) @ head.T


def _pieces(starts: Sequence[int], length: int) -> Tensor:
    return torch.from_numpy(np.searchsorted(np.asarray(starts), np.arange(length), side="right"))


def _places(pieces: Tensor) -> Tensor:
    return torch.arange(len(pieces)) - torch.searchsorted(pieces, pieces)  # where its piece begins


def _dropped(x: Tensor, config: ModelConfig, row: Row, step: Step | None, site: str) -> Tensor:
    if step is None or config.hidden_dropout == 0:
        return x
    return (x * dropout_factor(config.hidden_dropout, step, row.sample, site, [x.shape[0]], x.shape[1])).to(x.dtype)


def _mlp(weights: Weights, name: str, config: ModelConfig, x: Tensor) -> Tensor:
    h = _rms_norm(x, weights[f"{name}.mlp_norm.weight"], config.rms_norm_eps)
    gate = h @ weights[f"{name}.mlp.gate.weight"].T
    return (gate * torch.sigmoid(gate) * (h @ weights[f"{name}.mlp.up.weight"].T)) @ weights[f"{name}.mlp.down.weight"].T


def _attention(
    weights: Weights,
    name: str,
    config: ModelConfig,
    queries: Tensor,
    keys: Tensor,
    seen: Tensor,
    row: Row,
    step: Step | None,
    site: str,
    positions: Tensor | None,
) -> Tensor:
    """queries [T, D] look at keys [S, D] where seen [T, S]; rotated where there are positions."""
    q, k, v = (
        (x @ weights[f"{name}.{part}.weight"].T).view(len(x), -1, config.head_size)
        for part, x in (("q", queries), ("k", keys), ("v", keys))
    )
    if positions is not None:
        q, k = _rotated(q, positions, config.rope.theta), _rotated(k, positions, config.rope.theta)
    factor = None
    if step is not None and config.attention_dropout > 0:
        factor = dropout_factor(config.attention_dropout, step, row.sample, site, [q.shape[1], len(queries)], len(keys))
    heads = []
    for head in range(q.shape[1]):
        shared = head // (q.shape[1] // k.shape[1])
        scores = _wide(q[:, head]) @ _wide(k[:, shared]).T / math.sqrt(config.head_size)
        probabilities = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        if factor is not None:
            probabilities = probabilities * factor[head]
        heads.append((probabilities @ _wide(v[:, shared])).to(queries.dtype))
    return torch.cat(heads, -1) @ weights[f"{name}.o.weight"].T
