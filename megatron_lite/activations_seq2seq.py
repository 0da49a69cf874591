"""What a forward of an encoder-decoder keeps for its backward on one rank, in bytes, of pieces of activations.py."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_lite.activations import FP32, RankShape, backward_of_layer, saved_by_layer, saved_by_residuals, saved_outside_layers


@dataclass(frozen=True)
class Sides:
    """The shapes that the decoder and the encoder work with."""

    target: RankShape
    source: RankShape

    @classmethod
    def of(cls, shape: RankShape, source_length: int) -> Sides:
        """`shape` is the decoder's. On CPU pairs are kept apart by masks, not piece by piece."""
        return cls(replace(shape, pieces=False, masked=True), replace(shape, pieces=False, masked=True, sequence_length=source_length))


def saved_by_cross_attention(sides: Sides, checkpointing: str) -> dict[str, int]:
    """Bytes of one layer's cross-attention with its norm."""
    target, source = sides.target, sides.source
    if checkpointing == "full":
        return {}
    item, head, heads, kv, size = target.itemsize, target.model.head_size, target.heads, target.kv_heads, target.model.hidden_size
    by_hand = target.written_out
    saved = {name: count // 2 for name, count in saved_by_residuals(target).items()}  # a branch like the two that these are
    saved["queries"] = 0 if by_hand and checkpointing == "none" else target.tokens * item * heads * head
    saved["keys and values"] = 0 if by_hand and checkpointing == "none" else source.tokens * item * 2 * kv * head
    saved["attention's output"] = target.tokens * item * heads * head
    if target.tp > target.model.kv_heads:
        saved["kv weight, gathered"] = item * 2 * head * size
    if target.model.hidden_dropout > 0:
        saved["dropout mask"] = target.tokens // target.split * size
    if checkpointing == "none" and by_hand:
        pairs = target.tokens * source.sequence_length * heads
        saved |= {"q, k and v in fp32": (target.tokens + 2 * source.tokens) * FP32 * heads * head}
        dropped, how = target.model.attention_dropout > 0, target.model.attention
        saved["probabilities"] = FP32 * (pairs * (2 if dropped else 1) + (target.tokens * heads if how.sinks else 0))
        saved["dropout mask of probabilities"] = pairs if dropped else 0
        saved["capped scores"] = FP32 * pairs if how.logit_softcapping is not None else 0
    elif checkpointing == "none":
        saved |= {"log-sum-exp": target.tokens * FP32 * heads, "mask": target.tokens * source.sequence_length * item}
    return saved


def saved_by_decoder_layer(sides: Sides, checkpointing: str) -> int:
    """Bytes of one layer with cross-attention."""
    return sum(saved_by_layer(sides.target, checkpointing).values()) + sum(saved_by_cross_attention(sides, checkpointing).values())


def saved_by_layers(sides: Sides, checkpointing: str) -> int:
    """Bytes of all layers of both sides."""
    model = sides.target.model
    decoder = saved_by_decoder_layer(sides, checkpointing)
    return model.num_hidden_layers * decoder + model.encoder_layers * sum(saved_by_layer(sides.source, checkpointing).values())


def saved_outside(sides: Sides) -> dict[str, int]:
    """Bytes kept once a micro-batch: what stands outside the layers on both sides, the memory, and who sees whom."""
    target, source = sides.target, sides.source
    saved = {f"{name}, targets": count for name, count in saved_outside_layers(target).items()}
    saved |= {f"{name}, sources": count for name, count in saved_outside_layers(source).items()}
    saved["memory"] = source.tokens * source.model.hidden_size * source.itemsize
    if target.written_out:  # else each layer keeps its own in another form
        saved["masks"] = source.tokens * source.sequence_length + target.tokens * (target.sequence_length + source.sequence_length)
    return saved


def most_in_flight(sides: Sides) -> int:
    """Bytes of gradients in flight while a layer's backward runs, of the side that has more; and of the memory's gradient."""
    return max(backward_of_layer(side) for side in (sides.target, sides.source)) + saved_outside(sides)["memory"]
