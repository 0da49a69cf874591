"""Planted faults, for tests of what a run does when something breaks: MLITE_FAULT="before_rename:2,slow_step:0.2".

    slice:N  before_manifest:N  before_rename:N  before_parent_fsync:N    SIGKILL to itself at that point of the Nth save
    kill:N  exit:N  raise:N  hang:N                                       at step N: SIGKILL, exit code 1, an exception, no progress
    slow_step:S  slow_eval:S  slow_save:S                                 sleep so many seconds at each

`:RANK` after any of them chooses the rank (0 for those of the first two lines, all for the sleeps).
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

from data_pipeline.errors import ConfigError

SAVE_POINTS = ("slice", "before_manifest", "before_rename", "before_parent_fsync")
AT_STEP = ("kill", "exit", "raise", "hang")
SLEEPS = ("slow_step", "slow_eval", "slow_save")


@dataclass(frozen=True)
class Fault:
    point: str
    number: float
    rank: int | None


class Faults:
    """The faults planted in this rank; without any, every call returns at once."""

    def __init__(self, text: str = "", *, rank: int = 0) -> None:
        planted = [_parse(part) for part in text.split(",") if part]
        self._mine = [fault for fault in planted if fault.rank in (None, rank)]
        self._saves = 0

    def at_step(self, step: int) -> None:
        for fault in self._mine:
            if fault.point in AT_STEP and fault.number == step:
                _strike(fault.point, step)
        self._sleep("slow_step")

    def at_evaluation(self) -> None:
        self._sleep("slow_eval")

    def at_save(self) -> None:
        """Called once before each save."""
        self._saves += 1
        self._sleep("slow_save")

    def at_save_point(self, name: str) -> None:
        if any(fault.point == name and fault.number == self._saves for fault in self._mine):
            _strike("kill", self._saves)

    def _sleep(self, point: str) -> None:
        for fault in self._mine:
            if fault.point == point:
                time.sleep(fault.number)


def _parse(text: str) -> Fault:
    point, *numbers = text.split(":")
    try:
        number = float(numbers[0])
        rank = int(numbers[1]) if len(numbers) > 1 else (None if point in SLEEPS else 0)
    except (IndexError, ValueError):
        number, rank, point = 0.0, None, ""
    if point not in (*SAVE_POINTS, *AT_STEP, *SLEEPS):
        raise ConfigError(f"MLITE_FAULT: {text!r} is no POINT:NUMBER[:RANK] with a point of {', '.join((*SAVE_POINTS, *AT_STEP, *SLEEPS))}")
    return Fault(point, number, rank)


def _strike(what: str, number: int) -> None:
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(10)
    elif what == "exit":
        os._exit(1)
    elif what == "hang":
        time.sleep(3600)
    raise RuntimeError(f"a planted fault at step {number}")
