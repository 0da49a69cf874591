"""`mlite plan`: what a run will need, printed before anything is started; exit 2 where it can't fit."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Sequence
from typing import Any

from data_pipeline.errors import ConfigError, DataError, Fault
from data_pipeline.loader import Dataset
from launcher.commands.train import num_gpus
from launcher.config import RunConfig, load_config, parse_arguments, vocabulary_notice, with_vocabulary
from launcher.console import duration
from launcher.datasets import open_datasets
from launcher.metrics import JsonLines, Metrics
from launcher.mixture import cap_faults, expected_mixture
from launcher.plan import ALLOCATOR_SHARE, PROCESS_BYTES, Limit, RunPlan, parse_bytes, plan_run, require_fit, show_bytes
from launcher.run_folder import RunFolder
from launcher.saved_config import read_config
from megatron_lite.memory import PARTS
from megatron_lite.sizes import flops_per_token

USAGE = "Usage: mlite plan CONFIG [section.key=value ...]"
ARITHMETIC = ("precision", "compile", "tf32", "deterministic", "activation_checkpointing")  # of training: FLOPs don't tell their cost
MEANING = {
    "weights": "what forward uses",
    "gradients": "what backward leaves",
    "accumulators": "fp32 sums of gradients",
    "optimizer": "fp32 masters and Adam's moments",
    "activations": "kept for backward",
    "logits": "the loss, in chunks of tokens",
    "gathered": "ZeRO-3's whole weights",
    "buffers": "of reductions and the update",
    "runtime": "loaded by the first step",
}


def plan_config(
    argv: Sequence[str],
    *,
    world: int = 0,
    memory: str | None = None,
    rate: float | None = None,
    device: str | None = None,
    as_json: bool = False,
) -> None:
    """Print the plan. Raises ConfigError where the config is wrong or a rank needs more memory than there is."""
    if device not in (None, *PROCESS_BYTES):
        raise ConfigError([Fault("--device", device, " or ".join(PROCESS_BYTES))])
    arguments = parse_arguments(argv, usage=USAGE)
    config = load_config(arguments.config, arguments.overrides, world_size=world or None)
    device_type = device or ("cuda" if num_gpus() else "cpu")
    ranks = world or (num_gpus() if device_type == "cuda" else 0) or config.parallel.tp
    config = known_vocabulary(load_config(arguments.config, arguments.overrides, world_size=ranks))
    plan = plan_run(config, world=ranks, device_type=device_type)
    mixture = known_mixture(config)
    limit = Limit(parse_bytes(memory), "--memory") if memory else memory_here(device_type, ranks if not world else None)
    speed, speed_source = (rate, "--rate") if rate else measured_rate(config, world=ranks, device_type=device_type)
    if as_json:
        record = {
            **plan.to_json(),
            "limit_bytes": limit.bytes if limit else None,
            "fits": limit is None or plan.needed_bytes <= limit.bytes,
            "data": mixture,
        }
        print(json.dumps({**record, "time": plan.time(speed) if speed else None}))
    else:
        print(describe(config, plan, limit))
        print(describe_time(plan, speed, speed_source))
        if notice := known_notice(config):
            print(notice)
        for source in mixture:
            print(f"data: {source['path']}: {100 * source['share']:.2f} % of the samples, about {source['epochs']:.2f} epochs")
    if limit is not None:
        require_fit(config, plan, limit)


def known_mixture(config: RunConfig) -> list[dict[str, Any]]:
    """What the run takes from each dataset; nothing where one isn't there yet. Raises ConfigError where caps don't allow it."""
    try:
        datasets = open_datasets(config.data)
    except DataError:
        return []
    if faults := cap_faults(config, datasets):
        raise ConfigError(faults)
    return expected_mixture(config, datasets)


def known_vocabulary(config: RunConfig) -> RunConfig:
    """With `vocab_size: auto` filled in from the dataset, which must have been built for that."""
    path = config.data.mixture[0].path
    try:
        return with_vocabulary(config, tokenizer_size=Dataset.open(path, cache=config.data.cache).vocab_size)
    except DataError as error:
        if isinstance(config.model.vocab_size, int):
            return config
        fix = f"build the data first, or add model.vocab_size=NUMBER ({str(error).splitlines()[0]})"
        raise ConfigError([Fault("model.vocab_size", "auto", f"a dataset in {path} that says it", fix)]) from None


def known_notice(config: RunConfig) -> str:
    """Of a vocabulary beside that of the dataset, where that is there."""
    try:
        return vocabulary_notice(config, tokenizer_size=Dataset.open(config.data.mixture[0].path, cache=config.data.cache).vocab_size)
    except DataError:
        return ""


def memory_here(device_type: str, ranks: int | None) -> Limit | None:
    """What a rank may use on this machine, where that can be known: a GPU's memory, or the RAM shared by the ranks."""
    if device_type == "cuda":
        try:
            words = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
            sizes = subprocess.run(words, capture_output=True, text=True, timeout=10, check=True).stdout.split()
            return Limit(min(int(size) for size in sizes) << 20, "this machine's smallest GPU")
        except (OSError, ValueError, subprocess.SubprocessError):
            return None
    if ranks is None or not hasattr(os, "sysconf"):
        return None
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Limit(total // ranks, f"this machine's {show_bytes(total)} over {ranks} processes" if ranks > 1 else "this machine's memory")


def measured_rate(config: RunConfig, *, world: int, device_type: str) -> tuple[float | None, str]:
    """Tokens per second of the whole world, from the last attempt in the run folder, if there is one: (rate, where it is from), or
    (None, why not). Another model or sequence length counts by its FLOPs a token; another kind of arithmetic can't be counted."""
    folder = RunFolder(config.run.folder)
    if not folder.metrics.is_file() or not folder.config.is_file():
        return None, ""
    events = [event for _, event in JsonLines(folder.events).lines() if event is not None]
    started: dict[str, Any] = next((event for event in reversed(events) if event.get("event") == "started" and "layout" in event), {})
    steps, rates = Metrics(folder.metrics).series("tokens_per_second")
    rates = [rate for step, rate in zip(steps, rates) if step > started.get("step", 0)]
    if not started or not rates:
        return None, ""
    try:
        before = read_config(folder.path)
    except ConfigError:
        return None, f"{folder.config} is not of this version"
    others = [f"training.{key}={getattr(before.training, key)}" for key in ARITHMETIC if _differ(before, config, key)]
    others += [] if started.get("device") == device_type else [f"on {started.get('device', 'an unknown device')}"]
    if others:
        return None, f"{folder.path} ran {', '.join(others)}"
    rate, source = statistics.median(rates[-50:]), f"measured in {folder.path}"
    lengths = ((each.model, each.training.sequence_length, each.training.source_length) for each in (before, config))
    theirs, ours = (flops_per_token(*each) for each in lengths)
    ranks = started["layout"]["world"]
    if theirs != ours:
        rate, source = rate * theirs / ours, f"{source} at {theirs:.3g} FLOPs a token, here {ours:.3g}: taken to go by them"
    if ranks != world:
        rate, source = rate * world / ranks, f"{source}; on {ranks} ranks, taken to grow with them"
    return rate, source


def _differ(one: RunConfig, other: RunConfig, key: str) -> bool:
    return bool(getattr(one.training, key) != getattr(other.training, key))


# ---------------------------------------------------------------------------------------------------------------- in words


def describe(config: RunConfig, plan: RunPlan, limit: Limit | None) -> str:
    """The plan as a table."""
    training, memory = config.training, plan.memory
    lines = [
        f"{plan.parameters:,} parameters, {plan.local_parameters:,} on each rank with padding",
        f"{plan.world} x {plan.device_type}: dp {plan.dp} x tp {plan.tp}, ZeRO {config.parallel.zero_stage}, {training.precision}, "
        f"engine {training.engine}, activation checkpointing {training.activation_checkpointing}",
        f"{training.global_batch_size} sequences of {training.sequence_length} a step = {plan.tokens_per_step:,} tokens: on each rank "
        f"{plan.micro_batches} micro-batch{'es' if plan.micro_batches > 1 else ''} of {plan.micro_batch_size}",
        "",
        f"{'each rank needs':<16}" + "".join(f"{moment:>13}" for moment in memory.moments),
    ]
    for part in PARTS:
        sizes = [parts[part] for parts in memory.moments.values()]
        if any(sizes):
            lines.append(f"  {part:<14}" + "".join(f"{show_bytes(size) if size else '-':>13}" for size in sizes) + f"   {MEANING[part]}")
    totals = "".join(f"{show_bytes(memory.total(moment)):>13}" for moment in memory.moments)
    lines.append(f"  {'together':<14}{totals}   the peak is at the {memory.peak_moment}")
    room = f" of {show_bytes(limit.bytes)} ({limit.source})" if limit else "; give --memory to compare it with a device's"
    lines += [
        f"needed: {show_bytes(plan.needed_bytes)}{room}: the peak, {ALLOCATOR_SHARE[plan.device_type]:.0%} of it for the allocator, "
        f"{show_bytes(PROCESS_BYTES[plan.device_type])} for the process",
        f"checkpoint: {show_bytes(plan.checkpoint_bytes)}, at most {show_bytes(plan.checkpoints_kept_bytes)} on disk "
        f"(keep_last {config.checkpoint.keep_last}"
        + (f", every {config.checkpoint.keep_every_steps:,} steps for good," if config.checkpoint.keep_every_steps else "")
        + " and one being written)",
        f"a step: {plan.flops_per_step:.3g} FLOPs"
        + (f", {plan.hardware_flops_per_step:.3g} with recomputation" if plan.hardware_flops_per_step != plan.flops_per_step else "")
        + f"; the run: {plan.steps:,} steps, {plan.steps * plan.tokens_per_step:,} tokens, {plan.steps * plan.flops_per_step:.3g} FLOPs",
    ]
    for axis, collectives in plan.communication.items():
        traffic = ", ".join(f"{name.replace('_', '-')} {show_bytes(count)}" for name, count in collectives.items() if count)
        lines.append(f"communication of a rank over {axis}, a step: {traffic}")
    if training.compile:
        lines.append("training.compile: compiled layers keep fewer activations than these")
    return "\n".join(lines)


def describe_time(plan: RunPlan, speed: float | None, source: str) -> str:
    if not speed:
        why = f" ({source})" if source else ""
        return f"time: no rate known{why}; give --rate TOKENS_PER_SECOND, or run some steps and plan again"
    found = plan.time(speed)
    return (
        f"time at {speed:,.0f} tokens/s ({source}): {found['step_time_s']:.3g} s a step, {found['tokens_a_day']:.3g} tokens a day, "
        f"{duration(found['run_s'])} for the run"
    )
