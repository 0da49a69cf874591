"""The DeepSpeed config of a run: a pure function of our sections, with the user's own keys merged over it.

Imports neither torch nor DeepSpeed, so that a config is checked, shown and saved (`deepspeed.json`) before anything starts.
Keys that one of our sections decides are owned: the user's must be "auto" or equal. Of the others those may be set that change
speed and memory and leave the flat partitions readable, which is how checkpoints are written.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from data_pipeline.errors import ConfigError, Fault
from megatron_lite.config import OptimizerConfig, ParallelConfig, TrainingConfig

BUCKET_ELEMENTS = 1 << 24  # 64 MiB in fp32; DeepSpeed's default of 5e8 elements allocates 2 GB

TUNABLE = frozenset(
    [
        f"zero_optimization.{key}"
        for key in (
            "reduce_bucket_size",
            "allgather_bucket_size",
            "reduce_scatter",
            "overlap_comm",
            "contiguous_gradients",
            "use_multi_rank_bucket_allreduce",
            "sub_group_size",
            "stage3_prefetch_bucket_size",
            "stage3_param_persistence_threshold",
            "stage3_model_persistence_threshold",
            "stage3_max_live_parameters",
            "stage3_max_reuse_distance",
            "stage3_module_granularity_threshold",
            "stage3_use_all_reduce_for_fetch_params",
            "stage3_allgather_sequential",
            "log_trace_cache_warnings",
            "enable_sanity_checks",
        )
    ]
    + ["flops_profiler", "tensorboard", "csv_monitor", "log_level", "wall_clock_breakdown", "memory_breakdown"]
)

# What people bring from other projects, and where it is said here, or why it would change nothing.
ELSEWHERE = {
    "optimizer": "say it in the optimizer section",
    "scheduler": "say it in the lr_scheduler section",
    "fp16": "set training.precision: bf16 or fp32; fp16 is not supported",
    "amp": "set training.precision",
    "torch_autocast": "set training.precision",
    "activation_checkpointing": "set training.activation_checkpointing",
    "wandb": "set logging.wandb",
    "steps_per_print": "remove it: set logging.interval_steps; DeepSpeed's own lines are not shown",
    "dump_state": "remove it: it shows nothing here; the resolved configs are config.yaml and deepspeed.json of the run",
    "comms_logger": "remove it: its summary is never printed here; mlite plan counts the bytes of every collective",
    "zero_optimization.allgather_partitions": "remove it: DeepSpeed 0.19 reads it nowhere",
    "checkpoint": "set the checkpoint section; DeepSpeed's own checkpoints are not written",
    "zero_optimization.offload_optimizer": "remove it: offloaded partitions can't be written to checkpoints",
    "zero_optimization.offload_param": "remove it: offloaded partitions can't be written to checkpoints",
}


def deepspeed_config(
    training: TrainingConfig,
    optimizer: OptimizerConfig,
    parallel: ParallelConfig,
    *,
    dp: int,
    overrides: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What `deepspeed.initialize` gets, on `dp` data-parallel ranks.

    One accumulation step as DeepSpeed counts them: the trainer owns the boundary, because with more of them DeepSpeed divides
    by their number even when told not to. Both dtype keys are needed to accumulate and to sum in fp32.

    Raises ConfigError with every fault of the overrides.
    """
    owned = _owned(training, optimizer, parallel, dp)
    config: dict[str, Any] = {"zero_optimization": {"reduce_bucket_size": BUCKET_ELEMENTS, "allgather_bucket_size": BUCKET_ELEMENTS}}
    for path, (value, _) in owned.items():
        _put(config, path, value)
    faults: list[Fault] = []
    for path, value in _leaves(overrides or {}):
        fault = _fault(path, value, owned)
        if fault is not None:
            faults.append(fault)
        elif path not in owned and value != "auto":
            _put(config, path, copy.deepcopy(value))
    if faults:
        raise ConfigError(faults)
    if parallel.zero_stage == 0:  # here the engine clips by itself: DeepSpeed keeps no norm at stage 0, and clips twice else
        config["gradient_clipping"] = 0.0
    return config


def _owned(training: TrainingConfig, optimizer: OptimizerConfig, parallel: ParallelConfig, dp: int) -> dict[str, tuple[Any, str]]:
    """Dotted key -> (value, the key of ours that decides it)."""
    bf16 = training.precision == "bf16"
    ours = "nothing: the trainer needs it so"
    return {
        "train_batch_size": (training.global_batch_size, "training.global_batch_size"),
        "train_micro_batch_size_per_gpu": (training.global_batch_size // dp, "training.micro_batch_size: here it is a rank's whole share"),
        "gradient_accumulation_steps": (1, "training.micro_batch_size: the trainer accumulates, not DeepSpeed"),
        "gradient_clipping": (float(optimizer.max_grad_norm or 0.0), "optimizer.max_grad_norm"),
        "communication_data_type": ("fp32", ours),
        "data_types.grad_accum_dtype": ("fp32", ours),
        "bf16.enabled": (bf16, "training.precision"),
        **(
            {
                # adds each micro-gradient to the fp32 sum at once, instead of keeping a bf16 copy of all of them
                "bf16.immediate_grad_update": (parallel.zero_stage == 1, ours),
                "bf16.check_grad_overflow": (True, ours),
            }
            if bf16
            else {}
        ),
        "zero_allow_untested_optimizer": (True, ours),
        "zero_optimization.stage": (parallel.zero_stage, "parallel.zero_stage"),
        "zero_optimization.round_robin_gradients": (False, ours),
        "zero_optimization.memory_efficient_linear": (False, ours),  # it replaces torch's linear in the whole process, for good
    }


def _fault(path: str, value: Any, owned: Mapping[str, tuple[Any, str]]) -> Fault | None:
    field = f"deepspeed.{path}"
    if path in owned:
        ours, source = owned[path]
        if value == "auto" or (value == ours and isinstance(value, bool) == isinstance(ours, bool)):
            return None
        return Fault(field, value, f'"auto" or {ours!r}', f"decided by {source}")
    top = path.split(".")[0]
    prefixes = (path, ".".join(path.split(".")[:2]), top)
    if any(prefix in TUNABLE for prefix in prefixes):
        return None
    for prefix in prefixes:
        if prefix in ELSEWHERE:
            return Fault(field, value, "no such key here", ELSEWHERE[prefix])
    known = [*owned, *sorted(TUNABLE)]
    close = difflib.get_close_matches(path, known, n=1, cutoff=0.6)
    return Fault(field, value, "a key that may be set here", f"did you mean {close[0]}?" if close else f"valid keys: {', '.join(known)}")


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value


def _put(tree: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for part in parents:
        tree = tree.setdefault(part, {})
    tree[last] = value
