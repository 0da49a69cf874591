"""The encoder-decoder in obvious maths: one row at a time, none of megatron_lite's code. See tests/reference.py."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_lite.model_config import ModelConfig
from tests import reference_attention, reference_blocks
from tests.reference import Row, Step, Weights, dropout_factor


def row_logits(weights: Weights, config: ModelConfig, row: Row, *, step: Step | None = None) -> Tensor:
    """[T, V] in the weights' dtype, for the row's targets."""
    assert row.source is not None
    to_source, to_target = _pieces(row.source_starts, len(row.source)), _pieces(row.segment_starts, len(row.inputs))
    encoder = {name.removeprefix("encoder."): tensor for name, tensor in weights.items() if name.startswith("encoder.")}
    if config.encoder.share_embedding:
        encoder["embedding.weight"] = weights["embedding.weight"]
    own_piece = to_source[:, None] == to_source[None, :]
    memory = _side(encoder, config, row.source, to_source, own_piece, row, step, "encoder ", "encoder.", _num_encoder_layers(config))
    order = torch.arange(len(row.inputs))
    earlier = (to_target[:, None] == to_target[None, :]) & (order[None, :] <= order[:, None])
    paired = to_target[:, None] == to_source[None, :]
    paired = paired | ~paired.any(1, keepdim=True)  # padding without padding on the other side
    num_layers = config.num_hidden_layers
    x = _side(weights, config, row.inputs, to_target, earlier, row, step, "", "", num_layers, memory=memory, paired=paired)
    return reference_blocks.logits(x @ weights["embedding.weight" if config.tie_word_embeddings else "lm_head.weight"].T, config)


def _num_encoder_layers(config: ModelConfig) -> int:
    return config.encoder.num_hidden_layers or config.num_hidden_layers


def _pieces(starts: Sequence[int], length: int) -> Tensor:
    return torch.from_numpy(np.searchsorted(np.asarray(starts), np.arange(length), side="right"))


def _side(
    weights: Weights,
    config: ModelConfig,
    ids: np.ndarray,
    pieces: Tensor,
    visible: Tensor,
    row: Row,
    step: Step | None,
    outside: str,
    within: str,
    num_layers: int,
    *,
    memory: Tensor | None = None,
    paired: Tensor | None = None,
) -> Tensor:
    """The encoder's or the decoder's last hidden states; sites of dropout begin with `outside`, or `within` and the layer."""
    length = len(ids)
    positions = torch.arange(length) - torch.searchsorted(pieces, pieces)  # where its piece begins

    def dropped(x: Tensor, site: str) -> Tensor:
        if step is None or config.hidden_dropout == 0:
            return x
        return (x * dropout_factor(config.hidden_dropout, step, row.sample, site, [length], x.shape[-1])).to(x.dtype)

    def factor(site: str, num_keys: int) -> Tensor | None:
        if step is None or config.attention_dropout == 0:
            return None
        sizes = [config.num_attention_heads, length]
        return dropout_factor(config.attention_dropout, step, row.sample, site, sizes, num_keys)

    x = weights["embedding.weight"][torch.from_numpy(ids.astype(np.int64))] * reference_blocks.embedding_multiplier(config)
    x = dropped(x + reference_attention.position_embedding(weights, config, positions).to(x.dtype), f"{outside}embedding")
    for layer in range(num_layers):
        name = f"{within}layers.{layer}"
        w = {key.removeprefix(f"layers.{layer}."): tensor for key, tensor in weights.items() if key.startswith(f"layers.{layer}.")}
        w |= {key: weights[key] for key in ("position_bias.weight",) if key in weights}

        def attention(h: Tensor, w: Weights = w, name: str = name) -> Tensor:
            factors = factor(f"{name} probabilities", length)
            return reference_attention.attention(w, config, h, positions, visible, factors, bidirectional=memory is None)

        def cross_attention(h: Tensor, w: Weights = w, name: str = name) -> Tensor:
            assert memory is not None and paired is not None
            factors = factor(f"{name} cross_probabilities", len(memory))
            return reference_attention.attention(w, config, h, positions, paired, factors, memory=memory)

        def mlp(h: Tensor, w: Weights = w) -> Tensor:
            return reference_blocks.mlp(h, w, config)

        branches = {"attention": attention, "cross_attention": cross_attention, "mlp": mlp}
        if memory is None:
            del branches["cross_attention"]
        x = reference_blocks.layer(
            x, w, config, branches, lambda out, site, name=name: dropped(out, f"{name} {site}"), num_layers=num_layers
        )
    return x if config.norm.placement == "post" else reference_blocks.norm(x, weights, "final_norm", config)
