"""What a run says about itself while it goes: metrics, events, tracker, console, plot. Only the first rank has one that speaks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launcher.console import show
from launcher.devices import mfu
from launcher.metrics import Events, Metrics
from launcher.plot import draw_losses
from launcher.run_folder import RunFolder
from launcher.trackers import Tracker


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
        self.tracker = Tracker()
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
        self.metrics.append(full)
        self.tracker.log(full)
        self._steps_timed, self._seconds_timed = self._steps_timed + steps, self._seconds_timed + seconds
        left_s = (self._total - record["step"]) * self._seconds_timed / self._steps_timed
        width = len(str(self._total))
        self.say(
            f"step {record['step']:>{width}}/{self._total} | loss {record['loss']:.4f} | grad {record['grad_norm']:.3f} | lr {record['lr']:.2e} | "
            f"{rate:,.0f} tok/s | {duration(left_s)} left"
        )
        if time.monotonic() - self._status_at > 10:
            self._status_at = time.monotonic()
            self._folder.write_status("running", step=record["step"], total_steps=self._total, seconds_left=round(left_s))

    def evaluation(self, step: int, record: Mapping[str, Any]) -> None:
        if self.active:
            full = {"step": step, **record}
            self.metrics.append(full)
            self.tracker.log(full)
            self.say(
                f"step {step:>{len(str(self._total))}}/{self._total} | held-out loss {record['eval/loss']:.4f} | perplexity {record['eval/perplexity']:.2f} | "
                f"{record['eval/bits_per_byte']:.4f} bits a byte"
            )

    def sync(self) -> None:
        """Make what was measured durable: before a checkpoint of its step is committed."""
        if self.active:
            self.metrics.sync()

    def close(self, *, title: str) -> None:
        """Close the files and draw the plot."""
        if not self.active:
            return
        self.metrics.close()
        self.events.close()
        if self.metrics.path.exists():
            draw_losses(self.metrics.path, self._folder.plot, title=title)


def duration(seconds: float) -> str:
    """3 s, 2 m 05 s, 1 h 02 m, 3 d 04 h."""
    whole = int(seconds + 0.5)
    for unit, below, size, part in (("d", "h", 86400, 3600), ("h", "m", 3600, 60), ("m", "s", 60, 1)):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // part:02d} {below}"
    return f"{whole} s"
