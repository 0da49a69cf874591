"""What a job does after an attempt: a chain of attempts goes on until the run is done, or until going on is no use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from data_pipeline.storage import atomic_write
from megatron_lite.checkpoint.committed import committed

# Whatever happened, it will happen again: config, data, checkpoints, non-finite numbers, a folder that another job has.
FINAL_CODES = {
    2: "the config is refused",
    3: "the data is refused",
    4: "there is no usable checkpoint",
    6: "loss or gradient is not finite",
    7: "another job has the run folder",
}
MAX_IDLE_ATTEMPTS = 2  # in a row, without a new checkpoint


@dataclass(frozen=True)
class Attempt:
    """One start of the run by a job: `checkpoint` is the newest that there was when it began."""

    job: str
    restart: int
    checkpoint: int | None
    nodes: int
    world: int


class Chain:
    """The attempts of one submission, in a file that outlives its jobs."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def attempts(self) -> list[Attempt]:
        try:
            return [Attempt(**record) for record in json.loads(self.path.read_text(encoding="utf-8"))]
        except FileNotFoundError:
            return []

    def add(self, attempt: Attempt) -> None:
        with atomic_write(self.path) as file:
            file.write(json.dumps([asdict(each) for each in [*self.attempts(), attempt]], indent=1).encode() + b"\n")


def newest_step(folder: Path) -> int | None:
    """The step of the newest committed checkpoint, without opening it."""
    return max(committed(folder), default=None)


def stuck(attempts: list[Attempt], now: int | None) -> bool:
    """Whether the last attempts, all ended, brought no new checkpoint."""
    last = attempts[-MAX_IDLE_ATTEMPTS:]
    return len(last) == MAX_IDLE_ATTEMPTS and all((now or -1) <= (each.checkpoint or -1) for each in last)


@dataclass(frozen=True)
class Decision:
    """`end`: the job ends with `code`. `again`: another attempt. `leave`: Slurm itself ends or requeues this job."""

    action: Literal["end", "again", "leave"]
    code: int
    why: str


def decide(
    status: Mapping[str, Any], *, is_new: bool, srun_code: int, attempts: list[Attempt], checkpoint: int | None, ended_by: str
) -> Decision:
    """After an attempt. `status` is status.json, believed where `is_new`: written by this attempt; `srun_code` counts only where
    it is not. `ended_by` says who ends the job."""
    code = status.get("code") if is_new else (srun_code if srun_code in FINAL_CODES else None)
    state = status.get("state") if is_new else "not begun"
    if is_new and state == "done":
        return Decision("end", 0, str(status.get("message", "done")))
    if code in FINAL_CODES:
        return Decision("end", int(code), f"not started again: {FINAL_CODES[int(code)]}")
    if ended_by == "slurm":
        return Decision("leave", 1, "Slurm ends this job: cancelled, it stays so; preempted, or with a node lost, Slurm starts it again")
    reasons = {"stopped": "stopped and saved", "failed": f"failed with code {code}", "not begun": "stopped before the run began"}
    reason = reasons.get(str(state), f"ended while {state}")
    if stuck(attempts, checkpoint):
        where = "without a checkpoint" if checkpoint is None else f"without a checkpoint after step {checkpoint}"
        return Decision(
            "end", code if code and code != 75 else 1, f"{reason}; {MAX_IDLE_ATTEMPTS} attempts in a row {where}: not started again"
        )
    return Decision("again", 75, reason)


def lead_s(status: Mapping[str, Any], *, step_s: float, limit_s: float) -> float:
    """Seconds before the time limit at which a run must begin to stop: three saves as measured and the steps in flight, with
    half a minute to spare; five minutes where no save was measured. Never more than a third of the limit."""
    save_s = status.get("save_s")
    wanted = 300.0 if save_s is None else 30.0 + 3.0 * float(save_s) + 2.0 * step_s
    return min(wanted, limit_s / 3)
