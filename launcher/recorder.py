"""What a run says about itself while it goes: metrics, events, trackers, plot, report. Only the first rank has one that speaks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launcher.console import show
from launcher.devices import mfu
from launcher.metrics import Events, Metrics
from launcher.plot import draw_losses
from launcher.report import write_report
from launcher.run_folder import RunFolder
from launcher.trackers import ConsoleTracker, FileTracker, Several


@dataclass(frozen=True)
class Rates:
    """What turns seconds into tokens per second and MFU."""

    flops_per_token: float
    num_devices: int
    peak_flops: float | None  # of one device


class Recorder:
    """Everything here is a no-op on ranks other than the first, so callers need not ask."""

    def __init__(self, folder: RunFolder, *, active: bool, total_steps: int, rates: Rates, quiet: bool = False) -> None:
        self.active, self._quiet = active, quiet or not active
        self._folder, self._total, self._rates = folder, total_steps, rates
        self.metrics, self.events = Metrics(folder.metrics), Events(folder.events, attempt=folder.attempt)
        local = [FileTracker(self.metrics), ConsoleTracker(self.say, total_steps=total_steps, seconds_left=self._seconds_left)]
        self.trackers = Several(local if active else [])
        self._began = time.monotonic()
        self._steps_timed, self._seconds_timed = 0, 0.0
        self._status_at = 0.0

    def say(self, text: str) -> None:
        if not self._quiet:
            show(text)

    def event(self, name: str, **fields: Any) -> None:
        if self.active:
            self.events.record(name, **fields)

    def step(self, record: Mapping[str, Any], *, seconds: float, tokens: int, steps: int) -> None:
        """One logged step; `seconds` and `tokens` since the last logged one, which was `steps` ago."""
        if not self.active:
            return
        rate = tokens / max(seconds, 1e-9)
        full = {**record, "tokens_per_second": round(rate, 1), "step_time_s": round(seconds / steps, 4)}
        if self._rates.peak_flops is not None:
            full["mfu"] = round(
                mfu(
                    tokens_per_second=rate,
                    flops_per_token=self._rates.flops_per_token,
                    num_devices=self._rates.num_devices,
                    peak=self._rates.peak_flops,
                ),
                4,
            )
        self._steps_timed, self._seconds_timed = self._steps_timed + steps, self._seconds_timed + seconds
        self.trackers.log(full)
        if time.monotonic() - self._status_at > 10:
            self._status_at = time.monotonic()
            self._folder.write_status(
                "running", step=record["step"], total_steps=self._total, seconds_left=round(self._seconds_left(record["step"]))
            )

    def evaluation(self, step: int, record: Mapping[str, Any]) -> None:
        if self.active:
            self.trackers.log({"step": step, **record})

    def _seconds_left(self, step: int) -> float:
        return (self._total - step) * self._seconds_timed / max(self._steps_timed, 1)

    def sync(self) -> None:
        """Make what was measured durable: before a checkpoint of its step is committed."""
        if self.active:
            self.metrics.sync()

    def close(self, *, title: str) -> None:
        """Close the files, draw the plot, write the report."""
        if not self.active:
            return
        self.metrics.close()
        self.events.close()
        if self.metrics.path.exists():
            draw_losses(self.metrics.path, self._folder.plot, title=title)
            write_report(self._folder.path)
