"""What a forward keeps for its backward on one rank, and what the loss and a layer's backward need beside it; in bytes.

The one place to correct when a layer changes: tests/unit/test_memory.py compares these lists with autograd's own.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.attention_sizes import why_written_out
from megatron_lite.config import NO_EXTRAS, ParallelConfig, TrainingConfig
from megatron_lite.model_config import ModelConfig
from megatron_lite.sizes import LEAST_TILE_SCORES, loss_chunk_tokens, tile_scores, vocabulary_rows

FP32 = 4


@dataclass(frozen=True)
class RankShape:
    """Sizes that one rank works with: local heads and widths, tokens of a micro-batch, bytes of an element."""

    model: ModelConfig
    tp: int
    split: int  # activations outside the tp regions are split over so many ranks
    itemsize: int
    micro_batch_size: int
    sequence_length: int
    pieces: bool = False  # attention goes document by document
    masked: bool = False  # attention takes a mask of all pairs of tokens
    on_cpu: bool = True
    plain_loss: bool = True  # logits are products as they are, and nothing is optimised besides

    @property
    def tokens(self) -> int:
        return self.micro_batch_size * self.sequence_length

    @property
    def tiled(self) -> bool:
        """Whether attention goes tile by tile: layers/tiled_attention.py, on few threads."""
        scores = tile_scores(self.heads // self.kv_heads, self.sequence_length)
        plain = not self.written_out and self.model.position.type != "alibi"
        return self.on_cpu and plain and not self.masked and scores >= LEAST_TILE_SCORES

    @property
    def written_out(self) -> bool:
        """Whether attention makes all scores, by its formula in fp32."""
        return bool(why_written_out(self.model, on_cpu=self.on_cpu))

    @property
    def rotated(self) -> bool:
        """Whether queries and keys are copies, turned by their positions."""
        return self.model.position.type == "rope"

    @property
    def copies_queries(self) -> bool:
        """Whether what is multiplied are not views of qkv: turned, normalised or scaled."""
        attention = self.model.attention
        return self.rotated or attention.scale != "sqrt" or attention.qk_norm != "none" or self.model.mup.base_head_dim is not None

    @property
    def windowed(self) -> bool:
        """Whether a layer's mask is more than causal: all of them may, though with global_every some don't."""
        window = self.model.attention.sliding_window
        return window is not None and window < self.sequence_length and self.model.position.type != "alibi"

    @property
    def reads_queries(self) -> bool:
        """Whether what becomes of queries and keys before they are rotated needs them in backward."""
        scale, norms = self.model.attention.scale, self.model.attention.qk_norm != "none"
        return norms or scale in ("temperature", "head_temperature") or (scale == "cosine" and self.itemsize == FP32)

    @property
    def heads(self) -> int:
        return self.model.num_attention_heads // self.tp

    @property
    def kv_heads(self) -> int:
        return max(self.model.kv_heads // self.tp, 1)

    @property
    def feed_forward(self) -> int:
        return self.model.intermediate_size // self.tp


def rank_shape(
    model: ModelConfig,
    training: TrainingConfig,
    parallel: ParallelConfig,
    *,
    micro_batch_size: int,
    pieces: bool = False,
    on_cpu: bool = True,
) -> RankShape:
    return RankShape(
        model=model,
        tp=parallel.tp,
        split=parallel.tp if parallel.sequence_parallel else 1,
        itemsize=2 if training.precision == "bf16" else FP32,
        micro_batch_size=micro_batch_size,
        sequence_length=training.sequence_length,
        pieces=pieces,
        on_cpu=on_cpu,
        plain_loss=training.loss == NO_EXTRAS and model.logit_factor == 1.0 and model.final_logit_softcapping is None,
    )


# ---------------------------------------------------------------------------------------------------------- activations


def saved_by_core(shape: RankShape) -> dict[str, int]:
    """Bytes that autograd keeps of one layer's attention proper, beside its input (qkv) and output: what `selective` recomputes."""
    item, head, heads, kv = shape.itemsize, shape.model.head_size, shape.heads, shape.kv_heads
    if shape.tiled:
        return {
            "rotated q and k": shape.tokens * item * (heads + kv) * head if shape.copies_queries else 0,
            "k and v without gaps": shape.tokens * item * 2 * kv * head,
        }
    if not shape.written_out:
        return {
            "outputs by document": shape.tokens * item * heads * head if shape.pieces else 0,
            "rotated q and k": shape.tokens * item * (heads + kv) * head if shape.copies_queries else 0,
            "log-sum-exp": shape.tokens * FP32 * heads,
            "window's mask": shape.sequence_length**2 * item if shape.windowed else 0,
            "mask": shape.tokens * shape.sequence_length * item if shape.masked else 0,
        }
    pairs = shape.tokens * shape.sequence_length * heads  # in fp32, keys and values repeated for their queries
    attention, dropped = shape.model.attention, shape.model.attention_dropout > 0
    return {
        "q, k and v in fp32": 3 * shape.tokens * FP32 * heads * head,
        "capped scores": FP32 * pairs if attention.logit_softcapping is not None else 0,
        "probabilities": FP32 * (pairs + (shape.tokens * heads if attention.sinks else 0)),
        "dropped probabilities": FP32 * pairs if dropped else 0,
        "dropout mask": pairs if dropped else 0,
        "causal mask": 0 if shape.masked else shape.sequence_length**2,
    }


def saved_by_query_key(shape: RankShape) -> dict[str, int]:
    """Bytes of what stands between qkv and the rotation."""
    item, how = shape.itemsize, shape.model.attention
    queries, keys = (shape.tokens * heads * shape.model.head_size for heads in (shape.heads, shape.kv_heads))
    norms, cosine = how.qk_norm != "none", how.scale == "cosine"
    scaled = norms and how.scale in ("temperature", "head_temperature")
    statistics = {"none": 0, "rms_norm": FP32, "layer_norm": 2 * item}[how.qk_norm] + (2 * FP32 if cosine else 0)
    return {
        "statistics of heads": shape.tokens * (shape.heads + shape.kv_heads) * statistics,
        "in fp32": (queries + keys) * FP32 if cosine and item < FP32 else 0,
        "queries before their scale": queries * item if scaled or cosine else 0,
    }


def saved_by_norm(shape: RankShape) -> dict[str, int]:
    """Bytes for one norm, its output apart: its input, and numbers a token in fp32 (1/rms, or the mean and 1/std)."""
    tokens, model = shape.tokens // shape.split, shape.model
    layer_norm, zero_centred = model.norm.type == "layer_norm", model.norm.zero_centred
    widened = zero_centred and (layer_norm or not shape.on_cpu)
    return {
        "input": tokens * model.hidden_size * (FP32 if widened else shape.itemsize),
        "statistics": tokens * FP32 * (2 if layer_norm else 1),
        "gain": model.hidden_size * FP32 if zero_centred else 0,
    }


def saved_by_residuals(shape: RankShape) -> dict[str, int]:
    """Bytes of a layer's two branches beside what is inside them: norms, what the branches read, and learned steps' factors."""
    one, model = saved_by_norm(shape), shape.model
    parallel, stream = model.residual.parallel, shape.tokens // shape.split * model.hidden_size * shape.itemsize
    behind = 2 if model.norm.placement == "sandwich" else 0
    norms, inputs = (1 if parallel == "one_norm" else 2) + behind, (1 if parallel != "none" else 2) + behind
    read = 1 if parallel == "one_norm" and shape.split == 1 else 2
    return {
        "norms' inputs": inputs * one["input"],
        "norms' statistics": norms * (one["statistics"] + one["gain"]),
        "what the branches read": read * shape.tokens * model.hidden_size * shape.itemsize,
        "learned steps' factors": 0 if model.residual.learned_step_size == "none" else 2 * stream,
    }


def saved_by_feed_forward(shape: RankShape) -> dict[str, int]:
    """Bytes of the MLP: relu keeps its output alone, and its square comes beside it."""
    one, mlp = shape.tokens * shape.itemsize * shape.feed_forward, shape.model.mlp
    if mlp.gated:
        activated = 2 if mlp.activation == "relu2" else 1
        return {"gate and up": 2 * one, "act(gate)": activated * one, "act(gate) * up": one}
    return {"up": 0 if mlp.activation in ("relu", "relu2") else one, "act(up)": (2 if mlp.activation == "relu2" else 1) * one}


def saved_by_layer(shape: RankShape, checkpointing: str) -> dict[str, int]:
    """Bytes that autograd keeps of one layer of one micro-batch."""
    item, head, size, tokens = shape.itemsize, shape.model.head_size, shape.model.hidden_size, shape.tokens
    if checkpointing == "full":
        return {"layer's input": tokens // shape.split * item * size}
    core = {**saved_by_core(shape), **saved_by_query_key(shape)} if checkpointing == "none" else {}
    copied = checkpointing == "none" and ((shape.tiled and shape.copies_queries) or shape.written_out) and not shape.reads_queries
    saved = {
        **saved_by_residuals(shape),
        **core,
        "qkv": 0 if copied else tokens * item * (shape.heads + 2 * shape.kv_heads) * head,  # what is not turned is a view of it
        "attention's output": tokens * item * shape.heads * head,
        **saved_by_feed_forward(shape),
    }
    if shape.tp > shape.model.kv_heads:
        saved["qkv weight, gathered"] = item * (shape.heads + 2) * head * size
    if shape.model.hidden_dropout > 0:
        saved["dropout masks"] = 2 * tokens // shape.split * size
    return saved


def bias_of_scores(shape: RankShape) -> int:
    """Bytes of positions by distance, one for each kind of window among the layers; and of T5's bucket numbers."""
    if shape.model.position.type not in ("alibi", "t5"):
        return 0
    pairs, layers = shape.sequence_length**2, range(shape.model.num_hidden_layers)
    windows = len({shape.model.attention.window_of(layer) for layer in layers})
    return pairs * (FP32 * shape.heads * windows + (8 + windows if shape.model.position.type == "t5" else 0))


def saved_outside_layers(shape: RankShape) -> dict[str, int]:
    """Bytes kept once a micro-batch: ids, rotation, the final norm, whose output the loss doesn't keep."""
    tokens, size = shape.tokens, shape.model.hidden_size
    norm = saved_by_norm(shape) if shape.model.has_final_norm else {}
    saved = {
        "token ids": tokens * 8,
        "rotation": tokens * FP32 * shape.model.rope.rotated_size(shape.model.head_size) if shape.rotated else 0,
        "bias of scores": bias_of_scores(shape),
        "positions": tokens // shape.split * 8 if shape.model.position.type == "learned" else 0,
        **{f"final norm's {name}": count for name, count in norm.items()},
    }
    if shape.model.hidden_dropout > 0:
        saved["dropout mask"] = tokens // shape.split * size
    return saved


def backward_of_layer(shape: RankShape) -> int:
    """Bytes of gradients in flight while one layer's backward runs, beyond the activations that it gives back as it goes."""
    item, size, tokens = shape.itemsize, shape.model.hidden_size, shape.tokens
    pairs = tokens * shape.sequence_length * shape.heads if shape.written_out else 0
    return tokens * item * (2 * shape.feed_forward + 2 * size) + 2 * FP32 * pairs


# --------------------------------------------------------------------------------------------------------------- logits


def saved_by_loss(shape: RankShape) -> dict[str, int]:
    """Bytes that the loss keeps for its backward: the gradients themselves, made in forward."""
    size = shape.model.hidden_size
    return {
        "hidden states' gradient": shape.tokens * size * shape.itemsize,
        "head's gradient in fp32": vocabulary_rows(shape.model.vocabulary, shape.tp) * size * FP32,
    }


def logits_bytes(shape: RankShape) -> tuple[int, int]:
    """(while the loss is computed, when its backward begins): what it keeps; and of a chunk of tokens the logits, probabilities
    in fp32 (one rank alone on CPU rounds them block by block, where the loss is plain), their copies for matrix products, and the
    head's gradient, with the last chunk's; or what is kept, scaled."""
    rows, size, item, kept = (
        vocabulary_rows(shape.model.vocabulary, shape.tp),
        shape.model.hidden_size,
        shape.itemsize,
        sum(saved_by_loss(shape).values()),
    )
    chunk = min(loss_chunk_tokens(rows, on_cpu=shape.on_cpu), shape.tokens)
    chunks = -(-shape.tokens // chunk)
    logits, head = chunk * rows * FP32, rows * size * FP32
    if item == FP32:
        working, rounded = 3 * logits + head * min(chunks - 1, 2), 0
    else:
        rounded = head // 2
        logits = logits // 2 if shape.on_cpu and shape.tp == 1 and shape.plain_loss else logits
        working = 2 * logits + rounded if chunks == 1 else max(4 * logits + rounded, 2 * logits + 3 * rounded)
    if not shape.plain_loss:
        working += logits  # in fp32, beside the products
    hidden = (shape.tokens + chunk) * size * item
    return hidden + kept + working, 2 * kept + rounded
