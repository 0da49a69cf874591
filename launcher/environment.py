"""Ranks and addresses, read once from whatever started this process: deepspeed, torchrun, srun or nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from data_pipeline.errors import ConfigError, Fault

Starter = Literal["deepspeed", "torchrun", "srun", "python"]


@dataclass(frozen=True)
class Environment:
    """This process's place in the world. `master` is None for one process alone, which needs no address."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    master: tuple[str, int] | None = None
    starter: Starter = "python"
    job_id: str | None = None  # of Slurm


def read_environment(environ: Mapping[str, str]) -> Environment:
    """Launchers that set RANK and WORLD_SIZE come first; then a Slurm step; else one process.

    A batch script's own shell has SLURM_PROCID and SLURM_NTASKS too: only SLURM_STEP_ID says that srun started us.
    Raises ConfigError when the variables contradict each other.
    """
    job_id = environ.get("SLURM_JOB_ID")
    if "RANK" in environ and "WORLD_SIZE" in environ:
        starter: Starter = "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "deepspeed" if "LOCAL_SIZE" in environ else "python"
        world = _number(environ, "WORLD_SIZE")
        local_world = environ.get("LOCAL_WORLD_SIZE") or environ.get("LOCAL_SIZE")
        found = Environment(
            rank=_number(environ, "RANK"),
            local_rank=_number(environ, "LOCAL_RANK", default=0),
            world_size=world,
            local_world_size=int(local_world) if local_world else world,
            master=(environ.get("MASTER_ADDR", "127.0.0.1"), _number(environ, "MASTER_PORT", default=29500)),
            starter=starter,
            job_id=job_id,
        )
    elif "SLURM_STEP_ID" in environ and _number(environ, "SLURM_STEP_NUM_TASKS", default=1) > 1:
        nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or "127.0.0.1"
        _require_first_node(environ, first_node(nodes))
        port = 15000 + (_number(environ, "SLURM_JOB_ID", default=0) * 7 + _number(environ, "SLURM_STEP_ID")) % 17768  # to 32767
        found = Environment(
            rank=_number(environ, "SLURM_PROCID"),
            local_rank=_number(environ, "SLURM_LOCALID", default=0),
            world_size=_number(environ, "SLURM_STEP_NUM_TASKS"),
            local_world_size=_tasks_on_node(environ.get("SLURM_STEP_TASKS_PER_NODE", "1"), _number(environ, "SLURM_NODEID", default=0)),
            master=(environ.get("MASTER_ADDR") or first_node(nodes), _number(environ, "MASTER_PORT", default=port)),
            starter="srun",
            job_id=job_id,
        )
    else:
        found = Environment(job_id=job_id)
    if not 0 <= found.rank < found.world_size:
        raise ConfigError([Fault("RANK", found.rank, f"0 to {found.world_size - 1}", "the launcher's variables contradict each other")])
    return found


def first_node(nodelist: str) -> str:
    """The first host of a Slurm node list, in the order given: `gpu003` of `gpu[003-010,12],login1`, `a1b1` of `a[1-2]b[1-2],c`."""
    end, depth = len(nodelist), 0
    for place, letter in enumerate(nodelist):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            end = place
            break
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", nodelist[:end])


def task_counts(tasks: str) -> list[int]:
    """`4(x2),3` is 4, 4 and 3 tasks on nodes 0, 1 and 2."""
    counts: list[int] = []
    for part in tasks.split(","):
        count, _, times = part.partition("(x")
        counts += [int(count)] * (int(times.rstrip(")")) if times else 1)
    return counts


def _tasks_on_node(tasks: str, node: int) -> int:
    counts = task_counts(tasks)
    return counts[min(node, len(counts) - 1)]


def _require_first_node(environ: Mapping[str, str], master: str) -> None:
    """The first rank listens where all others look for it, unless somebody chose an address."""
    here = environ.get("SLURMD_NODENAME")
    if environ.get("SLURM_PROCID") == "0" and "MASTER_ADDR" not in environ and here and here != master:
        raise ConfigError(
            [Fault("SLURM_STEP_NODELIST", master, f"the first rank's node, {here}, to come first", f"export MASTER_ADDR={here}")]
        )


def _number(environ: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ConfigError([Fault(name, text, "a whole number in the environment", "start through deepspeed, torchrun or srun")]) from None
