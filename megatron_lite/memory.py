"""Bytes of memory on one rank, as pure functions of the config: what stands there always, and what a step adds.

Three moments can be the peak: the loss, when all activations are held and the logits are there (`loss`); the first layer's
backward, when all gradients are (`backward`); the optimizer's update (`update`). What DeepSpeed 0.19 allocates was measured by
listing live storages; activations are in activations.py. Not counted: Python, its libraries and the device's context
(`runtime` is what is loaded late), and what an allocator keeps beyond what was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_lite.activations import FP32, backward_of_layer, logits_bytes, rank_shape, saved_by_layer, saved_outside_layers
from megatron_lite.activations_seq2seq import Sides, most_in_flight, saved_by_decoder_layer, saved_by_layers, saved_outside
from megatron_lite.config import ParallelConfig, TrainingConfig
from megatron_lite.model_config import ModelConfig
from megatron_lite.sizes import largest_local_parameter, num_local_parameters

PARTS = ("weights", "gradients", "accumulators", "optimizer", "activations", "logits", "gathered", "buffers", "runtime")

_RUNTIME_BYTES = {"torch": 56 << 20, "deepspeed": 72 << 20, "zero": 120 << 20}  # libraries and kernels that the first steps load on CPU
_BF16_KERNEL_BYTES = 48 << 20  # one is compiled for each shape that attention meets
_ALL_REDUCED = 500_000_000  # elements that DeepSpeed copies together to all-reduce them, where it does so; no key sets it


@dataclass(frozen=True)
class Buckets:
    """DeepSpeed's buffers, in elements."""

    reduce: int = 1 << 24
    stage3_live: int = 1_000_000_000  # parameters that stay gathered between their uses


@dataclass(frozen=True)
class Memory:
    """Bytes by moment of a step and by part; every rank of the layout needs the same, to within the padding."""

    moments: dict[str, dict[str, int]]

    def total(self, moment: str) -> int:
        return sum(self.moments[moment].values())

    @property
    def peak_moment(self) -> str:
        return max(self.moments, key=self.total)

    @property
    def peak_bytes(self) -> int:
        return self.total(self.peak_moment)


# ---------------------------------------------------------------------------------------------------------------- state


@dataclass(frozen=True)
class _State:
    """What parameters cost by moment, beside weights and optimizer."""

    weights: float
    optimizer: float  # fp32 masters where they are separate, and moments
    first_forward: Mapping[str, float]  # gradients and accumulators when a step begins
    next_forward: Mapping[str, float]  # in later micro-batches of the step
    backward: Mapping[str, float]  # as the last backward ends
    update: Mapping[str, float]


def _state(
    model: ModelConfig, training: TrainingConfig, parallel: ParallelConfig, *, dp: int, buckets: Buckets, accumulates: bool
) -> _State:
    """By engine and stage, for n local parameters over dp ranks."""
    n, stage = num_local_parameters(model, parallel.tp), parallel.zero_stage
    mine, largest = n / dp, largest_local_parameter(model, parallel.tp)
    bf16 = training.precision == "bf16"
    item = 2 if bf16 else FP32
    bucket, norm = FP32 * min(buckets.reduce, n), 2 * FP32 * largest  # our norm is taken in float64, a parameter at a time
    all_reduced = FP32 * min(n, _ALL_REDUCED) if dp > 1 else 0
    if training.engine == "torch":
        always = {"accumulators": FP32 * n}
        return _State(item * n, (8 + (FP32 if bf16 else 0)) * n, always, always, always, {**always, "buffers": norm})
    if stage == 0:
        gradients: Mapping[str, float] = {"gradients": FP32 * n}
        return _State(item * n, 8 * n, {}, gradients, {**gradients, "buffers": all_reduced}, {**gradients, "buffers": norm})
    if stage == 1 and bf16:
        always = {"accumulators": FP32 * n}
        return _State(
            item * n, 12 * mine, always, always, {**always, "buffers": all_reduced}, {**always, "buffers": min(FP32 * mine, all_reduced)}
        )
    if stage <= 2:
        partition = {"accumulators": FP32 * mine}
        held = {"gradients": float(FP32 * n)} if stage == 1 else partition
        backward = {"accumulators": FP32 * mine * (2 if accumulates else 1)} if stage == 2 else held  # the sum, and what is added
        update = {**partition, "buffers": FP32 * mine}  # the partition's gradients parameter by parameter, then flattened
        return _State(item * n, 12 * mine, {}, held, {**backward, "buffers": bucket}, update)
    sharded = {"accumulators": FP32 * mine, "buffers": float(bucket)}
    gathered = {**sharded, "gathered": item * (min(n, buckets.stage3_live) + largest)}
    return _State(item * mine, 12 * mine, gathered, gathered, gathered, {**sharded, "gathered": float(item * largest)})


# ----------------------------------------------------------------------------------------------------------------- whole


def memory(
    model: ModelConfig,
    training: TrainingConfig,
    parallel: ParallelConfig,
    *,
    dp: int,
    micro_batch_size: int,
    buckets: Buckets = Buckets(),
    document_mask: bool = False,
    on_cpu: bool = True,
) -> Memory:
    """What one rank needs at each moment of a step. `model.vocab_size` is a number."""
    shape = rank_shape(model, training, parallel, micro_batch_size=micro_batch_size, pieces=document_mask and on_cpu, on_cpu=on_cpu)
    accumulates = training.global_batch_size // dp > micro_batch_size
    state = _state(model, training, parallel, dp=dp, buckets=buckets, accumulates=accumulates)
    if model.family == "seq2seq":
        sides = Sides.of(shape, training.encoder_length)
        outside = sum(saved_outside(sides).values())
        layer = saved_by_decoder_layer(sides, "none")
        kept, kept_by_all = (
            saved_by_decoder_layer(sides, training.activation_checkpointing),
            saved_by_layers(sides, training.activation_checkpointing),
        )
        in_flight = most_in_flight(sides)
    else:
        outside = sum(saved_outside_layers(shape).values())
        layer = sum(saved_by_layer(shape, "none").values())
        kept = sum(saved_by_layer(shape, training.activation_checkpointing).values())
        kept_by_all = kept * model.num_hidden_layers
        in_flight = backward_of_layer(shape)
    runtime = _RUNTIME_BYTES["zero" if parallel.zero_stage else training.engine]
    runtime += _BF16_KERNEL_BYTES if training.precision == "bf16" else 0
    always = {
        "weights": state.weights,
        "optimizer": state.optimizer,
        "runtime": runtime if on_cpu else 0,
    }
    logits, last_layer = max(logits_bytes(shape)), in_flight + (layer - kept)  # the loss, or the backward that follows it
    moments = {
        "loss": {
            **always,
            **(state.next_forward if accumulates else state.first_forward),
            "activations": kept_by_all + outside + (last_layer if last_layer > logits else 0),
            "logits": logits if last_layer <= logits else 0,
        },
        "backward": {**always, **state.backward, "activations": layer + outside + in_flight},
        "update": {**always, **state.update},
    }
    return Memory({name: {part: round(parts.get(part, 0)) for part in PARTS} for name, parts in moments.items()})
