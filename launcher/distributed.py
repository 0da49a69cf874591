"""The device and the process group of this process."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict
from datetime import timedelta

import torch
import torch.distributed as dist

from launcher.environment import Environment
from launcher.memory import keep_freed_memory
from launcher.process_tree import Process, this_process
from megatron_lite.attention_sizes import why_written_out
from megatron_lite.checkpoint.agree import broadcast_json, gather_json
from megatron_lite.config import ParallelConfig, TrainingConfig
from megatron_lite.layers.document_kernels import choose_kernel
from megatron_lite.model_config import ModelConfig
from megatron_lite.parallel.grid import RankGrid
from megatron_lite.parallel.groups import ProcessGroups


def start_device(environment: Environment, *, tf32: bool = False) -> torch.device:
    """This process's GPU, or the CPU with its share of the cores.

    GPU arithmetic is set here, whatever a container's environment says: fp32 products in fp32, unless `tf32`; the sums of
    bf16 products in fp32, also where a kernel splits them.
    """
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        number = environment.local_rank % torch.cuda.device_count()  # a Slurm task may see its own GPU only
        torch.cuda.set_device(number)
        return torch.device("cuda", number)
    keep_freed_memory()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, num_cores() // environment.local_world_size))
    return torch.device("cpu")


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def start_groups(environment: Environment, parallel: ParallelConfig, *, device: torch.device, timeout_s: float) -> ProcessGroups:
    """Join the world and make the groups. A process alone needs neither an address nor a port."""
    backend, timeout = "nccl" if device.type == "cuda" else "gloo", timedelta(seconds=timeout_s)
    bound = device if device.type == "cuda" else None  # else a barrier guesses the GPU by the rank's number
    if environment.master is None:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout, device_id=bound)
    else:
        host, port = environment.master
        host = f"[{host}]" if ":" in host else host  # an IPv6 address
        dist.init_process_group(
            backend,
            init_method=f"tcp://{host}:{port}",
            rank=environment.rank,
            world_size=environment.world_size,
            timeout=timeout,
            device_id=bound,
        )
    grid = RankGrid(dp=environment.world_size // parallel.tp, tp=parallel.tp)
    return ProcessGroups.create(grid, sequence_parallel=parallel.sequence_parallel)


def find_siblings(groups: ProcessGroups) -> dict[int, Process]:
    """The other ranks on this host, by rank. Collective over the world."""
    mine = {"host": socket.gethostname(), "rank": groups.rank, **asdict(this_process())}
    everyone = broadcast_json(gather_json(mine, groups.world), groups.world)
    return {
        each["rank"]: Process(each["pid"], each["began"])
        for each in everyone
        if each["host"] == mine["host"] and each["rank"] != groups.rank
    }


def describe_attention(model: ModelConfig, training: TrainingConfig, *, document_mask: bool, device: torch.device) -> str:
    """What computes attention in this run, and why nothing faster does."""
    if why := why_written_out(model, on_cpu=device.type == "cpu"):
        return f"attention by its formula in fp32 ({why})"
    if not document_mask:
        return "attention by SDPA"
    dtype = torch.bfloat16 if training.precision == "bf16" else torch.float32
    if model.family == "seq2seq" and device.type == "cpu":
        return "attention by SDPA, pairs of a row kept apart by masks"
    choice = choose_kernel(training.document_kernel, device=device, dtype=dtype, head_size=model.head_size)
    return f"attention by SDPA, in rows of several documents by {choice}"


def make_deterministic() -> None:
    """The same bits on every run of the same layout, on GPUs too. Before the first CUDA call.

    cuBLAS gets a workspace of fixed size; attention's backward sums in a fixed order; compiled code is chosen without timing
    candidates. Raises RuntimeError at an operation that has no deterministic form.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")
    torch.use_deterministic_algorithms(True)
