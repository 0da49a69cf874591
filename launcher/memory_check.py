"""A run's check of its plan: the peak of memory as it was planned and as it was measured."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

from launcher.plan import ALLOCATOR_SHARE, RunPlan, show_bytes
from launcher.recorder import Recorder

_STATUS, _REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class MemoryCheck:
    """Made right before the engine is built; `report` after training.

    Measured is, on a GPU, the most that PyTorch had allocated at once (torch.cuda.max_memory_allocated); on CPU, under Linux,
    how far the process's resident memory rose above what it was when this was made (VmHWM - VmRSS). Elsewhere nothing is.
    The resident memory has what the C library's allocator keeps beside what was asked for, which `planned_bytes` leaves out and
    `planned_with_kept_bytes` has.
    """

    def __init__(self, plan: RunPlan, device: torch.device) -> None:
        self._plan, self._device = plan, device
        self._before = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        elif _STATUS.is_file():
            self._before = resident_bytes("VmRSS")
            with contextlib.suppress(OSError):
                _REFS.write_text("5")  # VmHWM starts again from here

    def measured_bytes(self) -> int | None:
        """The peak so far; None where it can't be known."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        return resident_bytes("VmHWM") - self._before if _STATUS.is_file() else None

    def report(self, recorder: Recorder) -> None:
        """Write planned and measured to events.jsonl and say them."""
        measured, planned = self.measured_bytes(), self._plan.memory.peak_bytes
        if not measured:
            return
        off = planned / measured - 1
        kept = {} if self._device.type == "cuda" else {"planned_with_kept_bytes": round(planned * (1 + ALLOCATOR_SHARE["cpu"]))}
        recorder.event("memory", planned_bytes=planned, measured_bytes=measured, plan_over_measured=round(off, 4), **kept)
        beside = "".join(f", {show_bytes(size)} with what the allocator keeps" for size in kept.values())
        recorder.say(f"peak memory of a rank: planned {show_bytes(planned)}{beside}; measured {show_bytes(measured)}")


def resident_bytes(key: str) -> int:
    """VmRSS, resident now, or VmHWM, its peak."""
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024
