"""What Slurm gave this job, from the environment of its batch script, and what it says about a job when asked."""

from __future__ import annotations

import datetime
import re
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from launcher.environment import first_node, task_counts

PORTS = range(15000, 32768)  # below what kernels give out by themselves


@dataclass(frozen=True)
class Allocation:
    """Nodes, and how many ranks to start on each."""

    job_id: str
    restart: int
    nodes: int
    ranks: tuple[int, ...]  # by node
    cpus_per_rank: int | None
    gpus: int = 0  # of this node

    @property
    def world(self) -> int:
        return sum(self.ranks)

    @property
    def srun_flags(self) -> list[str]:
        """Where tasks on all nodes are as many, Slurm is told; else it puts them as it allocated them."""
        per_node = [f"--ntasks-per-node={self.ranks[0]}"] if len(set(self.ranks)) == 1 else []
        cpus = [f"--cpus-per-task={self.cpus_per_rank}"] if self.cpus_per_rank else []
        return [f"--nodes={self.nodes}", f"--ntasks={self.world}", *per_node, *cpus]


def read_allocation(environ: Mapping[str, str], *, ranks_per_node: int | None = None, cpus_per_rank: int | None = None) -> Allocation:
    """The nodes, with `ranks_per_node` on each where the submission says so; else one rank a task that was asked for, and where a
    node has one task and several GPUs, one rank a GPU, which share the task's cores."""
    nodes = int(environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or 1)
    cpus = int(environ["SLURM_CPUS_PER_TASK"]) if environ.get("SLURM_CPUS_PER_TASK", "").isdigit() else None
    gpus = _gpus_on_node(environ)
    if ranks_per_node is not None:
        ranks, cpus = [ranks_per_node] * nodes, cpus_per_rank
    else:
        ranks = tasks_by_node(environ, nodes=nodes)
        if gpus > 1 and set(ranks) == {1}:
            ranks = [gpus] * nodes
            cpus = max(1, cpus // gpus) if cpus else None
    return Allocation(
        job_id=environ["SLURM_JOB_ID"],
        restart=int(environ.get("SLURM_RESTART_COUNT") or 0),
        nodes=nodes,
        ranks=tuple(ranks),
        cpus_per_rank=cpus,
        gpus=gpus,
    )


def tasks_by_node(environ: Mapping[str, str], *, nodes: int) -> list[int]:
    """The tasks that were asked for. SLURM_TASKS_PER_NODE counts CPUs where nobody asked for tasks: then it is one a node."""
    asked = environ.get("SLURM_NTASKS_PER_NODE", "")
    if asked.isdigit():
        return [int(asked)] * nodes
    if "SLURM_NTASKS" not in environ:
        return [1] * nodes
    return (task_counts(environ.get("SLURM_TASKS_PER_NODE", "1")) * nodes)[:nodes]


def _gpus_on_node(environ: Mapping[str, str]) -> int:
    """GPUs of the job on this node: SLURM_GPUS_ON_NODE, else their numbers in SLURM_JOB_GPUS."""
    count = environ.get("SLURM_GPUS_ON_NODE", "")
    if count.isdigit():
        return int(count)
    listed = environ.get("SLURM_JOB_GPUS") or ""
    return len([part for part in listed.split(",") if part])


@contextmanager
def held_port(environ: Mapping[str, str], *, start: int) -> Iterator[int | None]:
    """A port on this node, where rank 0 will be, that no other job of ours takes from now on; MASTER_PORT where that is set; None
    where rank 0 will be elsewhere, as in a shell of salloc's: the ranks then choose by the numbers of job and step.

    It is bound here without sharing, so whoever tries it first meets a conflict and goes to the next; only then is sharing
    allowed, and since nobody listens here, the first rank can bind and listen on it.
    """
    if environ.get("MASTER_PORT"):
        yield int(environ["MASTER_PORT"])
        return
    nodes = environ.get("SLURM_JOB_NODELIST")
    if nodes and environ.get("SLURMD_NODENAME") != first_node(nodes):
        yield None
        return
    holder, port = _bind(start)
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        yield port
    finally:
        holder.close()


def _bind(start: int) -> tuple[socket.socket, int]:
    family = socket.AF_INET6 if socket.has_ipv6 and socket.has_dualstack_ipv6() else socket.AF_INET
    for offset in range(len(PORTS)):
        port = PORTS[(start * 7 + offset) % len(PORTS)]
        holder = socket.socket(family, socket.SOCK_STREAM)
        if family == socket.AF_INET6:
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            holder.bind(("", port))
        except OSError:
            holder.close()
            continue
        return holder, port
    raise OSError(f"no free port from {PORTS.start} to {PORTS.stop - 1}")


def show_job(job_id: str) -> dict[str, str]:
    """`scontrol show job` as a mapping; empty where Slurm does not answer or no longer knows the job."""
    try:
        answer = subprocess.run(["scontrol", "show", "job", "-o", job_id], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return parse_job(answer.stdout) if answer.returncode == 0 else {}


def parse_job(text: str) -> dict[str, str]:
    """`Key=value Key=value ...`: a value goes on until the next key."""
    return {match[1]: match[2].strip() for match in re.finditer(r"(\S+?)=(.*?)(?=\s+[A-Za-z][\w/:]*=|\s*$)", text.strip(), re.DOTALL)}


def seconds_left(job: Mapping[str, str], *, now: float) -> float | None:
    """Until the job's time limit; None where there is none."""
    end = _time(job.get("EndTime", ""))
    return None if end is None else end - now


def limit_s(job: Mapping[str, str]) -> float | None:
    """The job's time limit in seconds; None for UNLIMITED."""
    return _duration_s(job.get("TimeLimit", ""))


def ended_by(job: Mapping[str, str]) -> Literal["", "itself", "time limit", "slurm"]:
    """Who ends this job, which asks about itself; empty where Slurm did not say.

    While a batch script still runs, a job that was cancelled, preempted, requeued or lost a node is COMPLETING, and nothing tells
    which; requeueing it would bring a cancelled job back. One that ran as long as it might is known by that.
    """
    state = job.get("JobState")
    if state in (None, "RUNNING"):
        return "itself" if state else ""
    ran, limit = _duration_s(job.get("RunTime", "")), limit_s(job)
    return "time limit" if state == "TIMEOUT" or (ran is not None and limit is not None and ran >= limit) else "slurm"


def _duration_s(text: str) -> float | None:
    """1-02:03:04, 02:03:04."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _time(text: str) -> float | None:
    try:
        return datetime.datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None
