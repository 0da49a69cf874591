"""What a run will need, before it starts: memory by part, FLOPs, time, checkpoints; and what would fit where it does not.

Pure functions of the config and the world, without torch, a device or a process group.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from data_pipeline.errors import ConfigError, Fault
from launcher.config import RunConfig, world_faults
from launcher.micro_batch import resolve_micro_batch
from megatron_lite.communication import communicated_bytes
from megatron_lite.memory import Buckets, Memory, memory
from megatron_lite.sizes import checkpoint_bytes, flops_per_token, num_local_parameters, num_parameters
from megatron_lite.training.deepspeed_config import deepspeed_config

# A process before it builds its model: Python and torch on CPU (measured); on a GPU its context, NCCL and cuBLAS (a usual size).
PROCESS_BYTES = {"cpu": 320 << 20, "cuda": 1536 << 20}
# Of what was asked for, what the allocator keeps of freed memory: on CPU 12 to 68 % over the eight runs of bench_plan.py, since a run
# tells glibc to keep it (launcher/memory.py); on GPUs what a caching allocator usually holds in pieces that fit nothing.
ALLOCATOR_SHARE = {"cpu": 0.5, "cuda": 0.05}
SECONDS_A_DAY = 86400
MOST_SUGGESTIONS = 5
MOST_RANKS = 4096


@dataclass(frozen=True)
class Limit:
    """Bytes that one rank may use, and where that number is from."""

    bytes: int
    source: str


@dataclass(frozen=True)
class RunPlan:
    """Numbers of a run on a world of ranks; bytes are a rank's."""

    world: int
    dp: int
    tp: int
    device_type: str
    micro_batch_size: int
    micro_batches: int  # of a rank a step
    parameters: int
    local_parameters: int
    memory: Memory
    communication: dict[str, dict[str, int]]  # {axis: {collective: bytes of a step}}
    flops_per_step: float  # of the model; recomputed activations don't count
    hardware_flops_per_step: float  # with them
    tokens_per_step: int
    steps: int
    checkpoint_bytes: int
    checkpoints_kept_bytes: int  # on disk while a new one is written

    @property
    def needed_bytes(self) -> int:
        """What the device must have: the peak, the process itself, and what the allocator wastes."""
        return round(self.memory.peak_bytes * (1 + ALLOCATOR_SHARE[self.device_type])) + PROCESS_BYTES[self.device_type]

    def time(self, tokens_per_second: float) -> dict[str, float]:
        """Seconds a step, tokens a day and days a run at this rate of the whole world."""
        return {
            "tokens_per_second": tokens_per_second,
            "step_time_s": self.tokens_per_step / tokens_per_second,
            "tokens_a_day": tokens_per_second * SECONDS_A_DAY,
            "run_s": self.steps * self.tokens_per_step / tokens_per_second,
        }

    def to_json(self) -> dict[str, Any]:
        record = asdict(self)
        found = self.memory
        record["memory"] = {
            "moments": found.moments,
            "peak_moment": found.peak_moment,
            "peak_bytes": found.peak_bytes,
            "needed_bytes": self.needed_bytes,
        }
        return record


def plan_run(config: RunConfig, *, world: int, device_type: str) -> RunPlan:
    """The plan of a config whose layout is sound on `world` ranks and whose vocab_size is a number."""
    training, parallel, model = config.training, config.parallel, config.model
    dp = world // parallel.tp
    micro = resolve_micro_batch(
        training.micro_batch_size,
        global_batch_size=training.global_batch_size,
        dp=dp,
        sequence_length=config.row_tokens,
        device_type=device_type,
    )
    tokens = training.global_batch_size * training.sequence_length
    flops = flops_per_token(model, training.sequence_length, training.source_length) * tokens
    size = checkpoint_bytes(model)
    return RunPlan(
        world=world,
        dp=dp,
        tp=parallel.tp,
        device_type=device_type,
        micro_batch_size=micro,
        micro_batches=training.global_batch_size // dp // micro,
        parameters=num_parameters(model),
        local_parameters=num_local_parameters(model, parallel.tp),
        memory=memory(
            model,
            training,
            parallel,
            dp=dp,
            micro_batch_size=micro,
            buckets=_buckets(config, dp=dp),
            document_mask=config.data.document_mask,
            on_cpu=device_type == "cpu",
        ),
        communication=communicated_bytes(model, training, parallel, dp=dp, micro_batch_size=micro),
        flops_per_step=flops,
        hardware_flops_per_step=flops * (4 / 3 if training.activation_checkpointing == "full" else 1),
        tokens_per_step=tokens,
        steps=training.num_steps,
        checkpoint_bytes=size,
        checkpoints_kept_bytes=size * config.checkpoint.most_on_disk(training.num_steps),
    )


def _buckets(config: RunConfig, *, dp: int) -> Buckets:
    """Sizes of DeepSpeed's buffers: ours, or the deepspeed section's."""
    if config.training.engine != "deepspeed":
        return Buckets()
    zero = deepspeed_config(config.training, config.optimizer, config.parallel, dp=dp, overrides=config.deepspeed)["zero_optimization"]
    return Buckets(reduce=int(zero["reduce_bucket_size"]), stage3_live=int(zero.get("stage3_max_live_parameters", Buckets().stage3_live)))


# ------------------------------------------------------------------------------------------------------------ what would fit


def require_fit(config: RunConfig, plan: RunPlan, limit: Limit) -> None:
    """Raises ConfigError, naming what would fit, where a rank needs more than the limit."""
    if plan.needed_bytes <= limit.bytes:
        return
    found = [" ".join(f"{key}={value}" for key, value in change.items()) for change in fitting_changes(config, plan, limit)]
    if found:
        fix = "these would fit, the nearest first: " + " | ".join(found)
    else:
        fix = _more_ranks(config, plan, limit)
    raise ConfigError(
        [Fault("memory of a rank", show_bytes(plan.needed_bytes), f"at most {show_bytes(limit.bytes)} ({limit.source})", fix)]
    )


def _more_ranks(config: RunConfig, plan: RunPlan, limit: Limit) -> str:
    """What the smallest larger world that fits would run, by doubling."""
    here = f"no layout of {plan.world} rank{'s' if plan.world > 1 else ''} fits"
    world = plan.world
    while world < MOST_RANKS and config.training.global_batch_size % (2 * world // plan.tp) == 0:
        world *= 2
        if starts := not world_faults(config, world_size=world):
            larger = plan_run(config, world=world, device_type=plan.device_type)
        else:
            larger = replace(plan, world=world, dp=world // plan.tp)  # no layout of a run: from where to look for one
        if starts and larger.needed_bytes <= limit.bytes:
            return f"{here}; --world {world} does, with this layout"
        found = fitting_changes(config, larger, limit)
        if found:
            return f"{here}; --world {world} does, with " + " ".join(f"{key}={value}" for key, value in found[0].items())
    return f"no layout of up to {world} ranks fits: use a shorter training.sequence_length or a smaller model"


def fitting_changes(config: RunConfig, plan: RunPlan, limit: Limit) -> list[dict[str, Any]]:
    """Changes of layout that fit on the same world, those with the fewest keys first, then those that cost the least speed."""
    fitting: list[dict[str, Any]] = []

    def fits(change: dict[str, Any]) -> bool:
        changed = with_changes(config, change)
        if world_faults(changed, world_size=plan.world):
            return False
        return plan_run(changed, world=plan.world, device_type=plan.device_type).needed_bytes <= limit.bytes

    for change in sorted(_changes(config, plan), key=lambda change: (len(change), _cost(change))):
        if len(fitting) == MOST_SUGGESTIONS:
            break
        if any(set(better) == set(change) for better in fitting) or not fits(change):
            continue  # the same keys, further away
        if len(change) > 1 and any(fits({key: change[key] for key in change if key != spared}) for spared in change):
            continue  # more than is needed
        fitting.append(change)
    return fitting


def with_changes(config: RunConfig, change: dict[str, Any]) -> RunConfig:
    """The config with keys `section.key` replaced by values that are valid for them."""
    sections: dict[str, Any] = {}
    for path, value in change.items():
        section, key = path.split(".")
        before = sections.get(section, getattr(config, section))
        sections[section] = before.model_copy(update={key: value})
    return config.model_copy(update=sections)


def _changes(config: RunConfig, plan: RunPlan) -> Iterator[dict[str, Any]]:
    """Every combination of a smaller micro-batch, more checkpointing, a higher ZeRO stage and more tp."""
    levels = ("none", "selective", "full")
    share = config.training.global_batch_size // plan.dp
    tp_sizes = [tp for tp in range(plan.tp, plan.world + 1) if plan.world % tp == 0]
    stages = [config.parallel.zero_stage] if config.training.engine == "torch" else range(max(1, config.parallel.zero_stage), 4)
    choices: dict[str, list[Any]] = {
        "training.micro_batch_size": [size for size in range(plan.micro_batch_size, 0, -1) if share % size == 0],
        "training.activation_checkpointing": list(levels[levels.index(config.training.activation_checkpointing) :]),
        "parallel.zero_stage": [config.parallel.zero_stage, *(stage for stage in stages if stage != config.parallel.zero_stage)],
        "parallel.tp": tp_sizes,
    }
    now = {
        "training.micro_batch_size": plan.micro_batch_size,
        "training.activation_checkpointing": config.training.activation_checkpointing,
        "parallel.zero_stage": config.parallel.zero_stage,
        "parallel.tp": plan.tp,
    }
    for values in itertools.product(*choices.values()):
        change = {key: value for key, value in zip(choices, values) if value != now[key]}
        if change:
            yield change


def _cost(change: dict[str, Any]) -> float:
    """What a change costs in speed, roughly, to order changes of the same number of keys."""
    cost = 0.0
    cost += {"none": 0.0, "selective": 0.05, "full": 0.33}[change.get("training.activation_checkpointing", "none")]
    cost += {0: 0.0, 1: 0.01, 2: 0.02, 3: 0.15}[change.get("parallel.zero_stage", 0)]
    cost += 0.1 * change.get("parallel.tp", 0) ** 0.5
    return cost + (0.02 / change["training.micro_batch_size"] if "training.micro_batch_size" in change else 0.0)


# ------------------------------------------------------------------------------------------------------------------- numbers


def show_bytes(count: float) -> str:
    """1.5 GiB, 340 MiB, 12 KiB."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.{2 if count < 10 * size else 1}f} {unit}"
    return f"{count:.0f} B"


def parse_bytes(text: str) -> int:
    """80GiB, 24GB, 512MiB or a plain number of bytes. Raises ConfigError."""
    units = {"": 1, "B": 1}
    for power, letter in enumerate("KMGT", start=1):
        units |= {letter: 1024**power, f"{letter}B": 1000**power, f"{letter}IB": 1024**power}
    cleaned = text.strip().replace(" ", "").upper()
    number = cleaned.rstrip("KMGTIB")
    try:
        value = float(number) * units[cleaned[len(number) :]]
    except (KeyError, ValueError):
        value = 0.0
    if value <= 0:
        raise ConfigError([Fault("--memory", text, "a size such as 80GiB, 24GB or 512MiB")])
    return int(value)
