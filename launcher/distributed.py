"""The device and the process group of this process."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict
from datetime import timedelta

import torch
import torch.distributed as dist

from launcher.environment import Environment
from launcher.process_tree import Process, this_process
from megatron_lite.checkpoint.agree import broadcast_json, gather_json
from megatron_lite.config import ParallelConfig
from megatron_lite.parallel.grid import RankGrid
from megatron_lite.parallel.groups import ProcessGroups


def start_device(environment: Environment) -> torch.device:
    """This process's GPU, or the CPU with its share of the cores."""
    if torch.cuda.is_available():
        number = environment.local_rank % torch.cuda.device_count()  # a Slurm task may see its own GPU only
        torch.cuda.set_device(number)
        return torch.device("cuda", number)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, num_cores() // environment.local_world_size))
    return torch.device("cpu")


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def start_groups(environment: Environment, parallel: ParallelConfig, *, device: torch.device, timeout_s: float) -> ProcessGroups:
    """Join the world and make the groups. A process alone needs neither an address nor a port."""
    backend, timeout = "nccl" if device.type == "cuda" else "gloo", timedelta(seconds=timeout_s)
    if environment.master is None:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        host, port = environment.master
        dist.init_process_group(
            backend, init_method=f"tcp://{host}:{port}", rank=environment.rank, world_size=environment.world_size, timeout=timeout
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


def make_deterministic() -> None:
    """The same bits on every run of the same layout, on GPUs too. Before the first CUDA call."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
