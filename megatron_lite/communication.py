"""Bytes that one rank hands to collectives in a step, as pure functions of the config.

A collective counts its larger tensor: what is all-reduced, what an all-gather makes, what a reduce-scatter takes. On a ring of n
ranks an all-reduce moves 2 (n - 1) / n of that over each link, the other two half as much. Single numbers (losses, counts, norms)
are left out. Exact over tp, and over dp but for stage 3, where weights that stay gathered are not gathered again.
"""

from __future__ import annotations

from megatron_lite.attention_sizes import gains_of_heads, num_attentions, temperatures
from megatron_lite.config import ParallelConfig, TrainingConfig
from megatron_lite.model_config import ModelConfig
from megatron_lite.sizes import num_local_parameters, num_replicated_parameters

FP32 = 4


def communicated_bytes(
    model: ModelConfig, training: TrainingConfig, parallel: ParallelConfig, *, dp: int, micro_batch_size: int
) -> dict[str, dict[str, int]]:
    """{axis: {collective: bytes of a step}}; an axis of size 1 is left out."""
    micro_batches = training.global_batch_size // dp // micro_batch_size
    found: dict[str, dict[str, int]] = {}
    if parallel.tp > 1:
        one = _over_tp(model, training, parallel, micro_batch_size=micro_batch_size)
        found["tp"] = {name: count * micro_batches for name, count in one.items() if count}
    if dp > 1:
        found["dp"] = _over_dp(model, training, parallel, micro_batches=micro_batches)
    return found


def _over_tp(model: ModelConfig, training: TrainingConfig, parallel: ParallelConfig, *, micro_batch_size: int) -> dict[str, int]:
    """Of one micro-batch. Into and out of each tp region stands a collective in one direction, its partner in the other; there are
    two regions a layer, beside cross-attention three; the embedding is half of one and the head the other half. An encoder's embedding
    is half of one, too, and its output, which enters the decoder's regions once for all, the other half. Recomputing a layer repeats its
    forward up to the last product, whose sum nobody needs."""
    item = 2 if training.precision == "bf16" else FP32
    tokens, size, layers, tp = micro_batch_size * training.sequence_length, model.hidden_size, model.num_hidden_layers, parallel.tp
    full = training.activation_checkpointing == "full"
    loss = tp * 2 * tokens * FP32
    sharing = tp // model.kv_heads if tp > model.kv_heads else 1
    cross = model.family == "seq2seq"
    rows = 2 * model.head_size * num_attentions(model) if sharing > 1 else 0  # of the key and value matrices of a head that ranks share
    shared = rows * (size + (1 if model.attention.qkv_bias else 0))
    gathered = item * shared * (2 if full else 1)
    # (bytes of a hidden state, layers, regions of each)
    sides = [(tokens * size * item, layers, 3 if cross else 2)]
    if cross:
        sides.append((micro_batch_size * training.encoder_length * size * item, model.encoder_layers, 2))
    both_ways = sum(hidden * (2 * regions * count + 2) for hidden, count, regions in sides)
    entered_again = sum(hidden * regions * count for hidden, count, regions in sides) if full else 0
    left_again = sum(hidden * (regions - 1) * count for hidden, count, regions in sides) if full else 0
    if not parallel.sequence_parallel:
        reduced = both_ways + left_again + gains_of_heads(model) * FP32
        return {"all_reduce": reduced, "all_gather": loss + gathered, "reduce_scatter": FP32 * shared}
    return {
        "all_gather": both_ways + entered_again + loss + gathered,
        "reduce_scatter": both_ways + left_again + FP32 * shared,
        "all_reduce": (num_replicated_parameters(model) - temperatures(model)) * FP32,  # their gradients
    }


def _over_dp(model: ModelConfig, training: TrainingConfig, parallel: ParallelConfig, *, micro_batches: int) -> dict[str, int]:
    """Gradients in fp32; under ZeRO the new weights are gathered. Stages 2 and 3 reduce after each micro-batch."""
    n, stage = num_local_parameters(model, parallel.tp), parallel.zero_stage
    item = 2 if training.precision == "bf16" else FP32
    if training.engine == "torch" or stage == 0:
        return {"all_reduce": FP32 * n}
    if stage <= 2:
        return {"all_reduce": FP32 * n * (micro_batches if stage == 2 else 1), "all_gather": item * n}
    return {"reduce_scatter": FP32 * n * micro_batches, "all_gather": 2 * item * n * micro_batches}
