"""What megatron_lite needs to know, as strict sections. No torch here: configs are checked before anything heavy is loaded.

Keys follow Hugging Face's names where they exist. Batch sizes count sequences, lengths count tokens.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from data_pipeline.errors import Fault
from data_pipeline.schema import Section, section_faults, unread_faults
from megatron_lite.model_config import ModelConfig, nearest_divisors

# -------------------------------------------------------------------------------------------------------------- parallel


class ParallelConfig(Section):
    """Sizes of the mesh axes; dp is what is left of the world. Changes speed and memory, never the result."""

    tp: int = Field(1, gt=0)  # tensor parallel: processes that share each matrix
    pp: int = Field(1, gt=0)  # pipeline parallel: only 1 so far
    cp: int = Field(1, gt=0)  # context parallel: only 1 so far
    ep: int = Field(1, gt=0)  # expert parallel: only 1 so far
    sequence_parallel: bool = False  # Megatron's: outside the tp regions activations are split along the sequence
    zero_stage: Literal[0, 1, 2, 3] = 1  # what is sharded over dp: nothing, optimizer, and gradients, and weights

    @field_validator("pp", "cp", "ep")
    @classmethod
    def _later(cls, value: int) -> int:
        if value != 1:
            raise ValueError("1: this axis is not available yet | use tp and ZeRO")
        return value


# -------------------------------------------------------------------------------------------------------------- training


class LossConfig(Section):
    """What is optimised beside the cross-entropy; losses that are reported are without it, in nats."""

    label_smoothing: float = Field(0.0, ge=0, lt=1)  # that share of each target is spread over the vocabulary (Szegedy et al. 2016)
    z_loss: float = Field(0.0, ge=0)  # times log(sum(exp(logits)))^2 is added, which keeps logits near 0 (Chowdhery et al. 2022: 1e-4)


NO_EXTRAS = LossConfig()


class TrainingConfig(Section):
    """How long, how much at once, in which precision."""

    steps: int | None = Field(None, gt=0)  # optimizer updates of the whole run; or give tokens
    tokens: int | None = Field(None, gt=0)  # instead of steps: rows times sequence_length, padding counts; rounded up to whole steps
    sequence_length: int = Field(256, gt=0)  # targets a row
    source_length: int | None = Field(None, ge=2)  # of an encoder-decoder: source tokens a row; null: as many as targets
    global_batch_size: int = Field(16, gt=0)  # sequences an optimizer step, over all ranks and micro-batches
    micro_batch_size: int | Literal["auto"] = "auto"  # sequences a forward pass on one data-parallel rank
    precision: Literal["fp32", "bf16"] = "fp32"  # bf16 keeps fp32 masters and accumulates in fp32
    activation_checkpointing: Literal["none", "selective", "full"] = "none"  # what is computed again in the backward pass instead of kept
    engine: Literal["deepspeed", "torch"] = "deepspeed"  # torch: no sharding, for comparison
    compile: bool = False  # compile the layers with torch.compile
    document_kernel: Literal["auto", "varlen", "flex", "blocks"] = "auto"  # what keeps documents apart on GPUs
    tf32: bool = False  # on GPUs: fp32 matrix products in TF32, with 10 bits of mantissa, some 8 times as fast
    loss: LossConfig = LossConfig()
    deterministic: bool = False  # the same bits on every run of a layout, on GPUs too, for some speed

    @field_validator("micro_batch_size")
    @classmethod
    def _micro(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError("at least 1, or auto")
        return value

    @model_validator(mode="after")
    def _length(self) -> TrainingConfig:
        if (self.steps is None) == (self.tokens is None):
            raise ValueError(
                "exactly one of steps and tokens | set training.steps (updates) or training.tokens (rows times sequence_length)"
            )
        return self

    @property
    def encoder_length(self) -> int:
        """Source tokens a row of an encoder-decoder."""
        return self.source_length or self.sequence_length

    @property
    def num_steps(self) -> int:
        """Optimizer updates of the whole run."""
        if self.steps is not None:
            return self.steps
        assert self.tokens is not None
        return -(-self.tokens // (self.global_batch_size * self.sequence_length))


class OptimizerConfig(Section):
    """AdamW (Loshchilov and Hutter 2019); no decay on norms and biases."""

    name: Literal["adamw"] = "adamw"  # the only one so far
    lr: float = Field(1e-3, gt=0)  # the peak
    betas: tuple[float, float] = (0.9, 0.95)  # decay of the two moments
    eps: float = Field(1e-8, gt=0)  # added to the root of the second moment
    weight_decay: float = Field(0.1, ge=0)  # decoupled, times the learning rate
    decay_embeddings: bool = True  # false: no decay on the embedding, learned positions and the head
    max_grad_norm: float | None = Field(1.0, ge=0)  # global L2 norm; 0 or null: no clipping

    @field_validator("betas", mode="before")
    @classmethod
    def _betas(cls, value: object) -> object:
        pair = tuple(value) if isinstance(value, list) else value
        if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(b, int | float) and 0 <= b < 1 for b in pair)):
            raise ValueError("two numbers in [0, 1) | for example [0.9, 0.95]")
        return tuple(float(b) for b in pair)

    @field_validator("lr", "max_grad_norm", "weight_decay", "eps")
    @classmethod
    def _finite(cls, value: float | None) -> float | None:
        if value is not None and not (abs(value) < float("inf")):
            raise ValueError("a finite number")
        return value


class SchedulerConfig(Section):
    """Learning rate over the run: linear warm-up, then the named shape; cosine and linear go down to min_lr_ratio * lr, inverse_sqrt as
    lr * sqrt(warmup_steps / step), whatever the run's length."""

    name: Literal["cosine", "linear", "constant", "inverse_sqrt"] = "cosine"  # the shape from the peak down; constant stays there
    warmup_steps: int = Field(0, ge=0)  # updates up to the peak
    min_lr_ratio: float = Field(0.1, ge=0, le=1)  # cosine, linear: the last learning rate as a share of the peak

    @model_validator(mode="after")
    def _of_the_shape(self) -> SchedulerConfig:
        if faults := unread_faults(self, self.name, "name", {"min_lr_ratio": ("cosine", "linear")}):
            raise section_faults(faults)
        return self


class CheckpointConfig(Section):
    """When to save, what to keep, what to start from."""

    interval_steps: int | None = Field(50, gt=0)  # always also at the end and when asked to stop
    interval_minutes: float | None = Field(None, gt=0)  # as well, or instead with interval_steps null
    keep_last: int = Field(2, ge=1)  # the newest so many stay
    keep_every_steps: int | None = Field(None, gt=0)  # multiples of this stay; a multiple of interval_steps, or a divisor
    resume: str = "auto"  # auto | never | a checkpoint folder that seeds an empty run folder
    allow_fallback: bool = False  # a damaged newest checkpoint: go on from an older good one, and say so
    init_from: str | None = None  # weights alone, from a run, a checkpoint folder, or hf:DIR, a folder of transformers' format

    def most_on_disk(self, steps: int) -> int:
        """The most checkpoints that a run of so many steps has at once: those that apply_retention leaves, and the one that is
        written before it deletes any. Which steps are saved is not known, since a stop saves any."""
        newest = self.keep_last + 1
        return newest + (max(0, steps - newest) // self.keep_every_steps if self.keep_every_steps else 0)


# ------------------------------------------------------------------------------------------------------- across sections


def layout_faults(
    model: ModelConfig, parallel: ParallelConfig, training: TrainingConfig, *, world_size: int, start: str | None = None
) -> list[Fault]:
    """What of the layout can't be: every fault, each with the nearest sizes that can."""
    faults: list[Fault] = []
    heads, kv, tp = model.num_attention_heads, model.kv_heads, parallel.tp
    if heads % tp:
        faults.append(Fault("parallel.tp", tp, f"a divisor of model.num_attention_heads ({heads})", f"use {nearest_divisors(heads, tp)}"))
    if kv % tp and tp % kv:
        faults.append(
            Fault("parallel.tp", tp, f"a divisor or a multiple of model.num_key_value_heads ({kv})", f"use tp {nearest_divisors(kv, tp)}")
        )
    elif tp > kv and model.head_size % (tp // kv):
        faults.append(
            Fault("parallel.tp", tp, f"tp / num_key_value_heads ({tp // kv}) to divide head_dim ({model.head_size})", "use a smaller tp")
        )
    if model.intermediate_size % tp:
        faults.append(
            Fault(
                "model.intermediate_size",
                model.intermediate_size,
                f"a multiple of parallel.tp ({tp})",
                f"use {_nearest_multiples(model.intermediate_size, tp)}",
            )
        )
    if model.max_position_embeddings < training.sequence_length:
        faults.append(
            Fault(
                "training.sequence_length",
                training.sequence_length,
                f"at most model.max_position_embeddings ({model.max_position_embeddings})",
                "raise that or shorten this",
            )
        )
    if model.family == "seq2seq":
        faults += _source_faults(model, parallel, training)
    elif training.source_length is not None:
        want, fix = "null with model.family: decoder", "set model.family: seq2seq, or remove it"
        faults.append(Fault("training.source_length", training.source_length, want, fix))
    if parallel.sequence_parallel:
        if tp == 1:
            faults.append(
                Fault(
                    "parallel.sequence_parallel",
                    True,
                    "tp > 1",
                    "sequence parallel splits activations over tp; set parallel.tp or switch it off",
                )
            )
        elif training.sequence_length % tp:
            faults.append(
                Fault(
                    "training.sequence_length",
                    training.sequence_length,
                    f"a multiple of parallel.tp ({tp}) under sequence_parallel",
                    f"use {_nearest_multiples(training.sequence_length, tp)}",
                )
            )
    if training.engine == "deepspeed" and training.precision == "bf16" and parallel.zero_stage == 0:
        faults.append(
            Fault(
                "parallel.zero_stage",
                0,
                "1, 2 or 3 in bf16",
                "DeepSpeed 0.19 takes an optimizer step on zero gradients at construction and its norm ignores tp there; stage 1 serves dp = 1 too",
            )
        )
    if training.engine == "torch" and parallel.zero_stage != 0:
        faults.append(
            Fault(
                "parallel.zero_stage",
                parallel.zero_stage,
                "0 with training.engine: torch",
                "the torch engine shards nothing; set parallel.zero_stage=0 or engine deepspeed",
            )
        )
    if world_size % tp:
        divisors = [size for size in range(1, world_size + 1) if world_size % size == 0 and heads % size == 0]
        faults.append(
            Fault(
                "parallel.tp",
                tp,
                f"a divisor of the world ({world_size} processes)",
                f"start {tp} processes: {start or f'deepspeed --num_gpus {tp} launcher/train.py'} ..., or use tp {' or '.join(map(str, divisors))}",
            )
        )
    else:
        dp, batch = world_size // tp, training.global_batch_size
        if batch % dp:
            faults.append(
                Fault(
                    "training.global_batch_size",
                    batch,
                    f"a multiple of dp ({dp} = {world_size} processes / tp {tp})",
                    f"use {_nearest_multiples(batch, dp)}",
                )
            )
        elif isinstance(training.micro_batch_size, int) and (batch // dp) % training.micro_batch_size:
            share = batch // dp
            faults.append(
                Fault(
                    "training.micro_batch_size",
                    training.micro_batch_size,
                    f"a divisor of global_batch_size / dp = {share}",
                    f"use {nearest_divisors(share, training.micro_batch_size)}",
                )
            )
    return faults


def _source_faults(model: ModelConfig, parallel: ParallelConfig, training: TrainingConfig) -> list[Fault]:
    """Of the source side of an encoder-decoder's rows; where its length is the targets', what is wrong with that says it."""
    length, most = training.source_length, model.max_position_embeddings
    if length is None:
        return []
    faults: list[Fault] = []
    if length > most:
        want = f"at most model.max_position_embeddings ({most})"
        faults.append(Fault("training.source_length", length, want, "raise that or shorten this"))
    if parallel.sequence_parallel and length % parallel.tp:
        want = f"a multiple of parallel.tp ({parallel.tp}) under sequence_parallel"
        faults.append(Fault("training.source_length", length, want, f"use {_nearest_multiples(length, parallel.tp)}"))
    return faults


def scheduler_faults(scheduler: SchedulerConfig, training: TrainingConfig) -> list[Fault]:
    """A warm-up that outlasts the run never reaches the learning rate that was asked for."""
    if scheduler.warmup_steps > training.num_steps:
        return [
            Fault(
                "lr_scheduler.warmup_steps",
                scheduler.warmup_steps,
                f"at most the run's {training.num_steps} steps",
                "shorten the warm-up or lengthen the run",
            )
        ]
    return []


def checkpoint_faults(checkpoint: CheckpointConfig) -> list[Fault]:
    """Keys that would do nothing beside others: steps to keep that are never saved, or by chance only; a second place to start from."""
    faults: list[Fault] = []
    every, often = checkpoint.keep_every_steps, checkpoint.interval_steps
    if every is not None and often is None:
        want = "a checkpoint.interval_steps with which these steps are saved"
        faults.append(Fault("checkpoint.keep_every_steps", every, want, f"set it to a divisor of {every}"))
    elif every is not None and often is not None and every % often and often % every:  # a divisor keeps all that are saved
        want = f"a multiple of checkpoint.interval_steps ({often}), or a divisor of it to keep every checkpoint"
        faults.append(Fault("checkpoint.keep_every_steps", every, want, f"use {_nearest_multiples(every, often)}"))
    if checkpoint.init_from is not None and checkpoint.resume not in ("auto", "never"):
        fix = "resume goes on from there, optimizer and step included, init_from takes weights alone: remove one of them"
        faults.append(Fault("checkpoint.init_from", checkpoint.init_from, f"null beside checkpoint.resume: {checkpoint.resume}", fix))
    return faults


def _nearest_multiples(number: int, factor: int) -> str:
    below, above = number // factor * factor, -(-number // factor) * factor
    return " or ".join(str(size) for size in dict.fromkeys((below, above)) if size > 0)
