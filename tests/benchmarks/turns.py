"""Programs that do one training step when told to, so that several take turns on one machine. Standard library only: peers
run it in environments of their own."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent


def serve(step: Callable[[], float], about: Mapping[str, Any]) -> None:
    """The child's side: say what it is, then for each line that comes run one step and answer its times and loss."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    answers.write(json.dumps(dict(about)) + "\n")
    for _ in sys.stdin:
        began, cpu = time.perf_counter(), time.process_time()
        loss = step()
        answers.write(json.dumps({"s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu, "loss": loss}) + "\n")


class Runner:
    """The parent's side of one program."""

    def __init__(self, name: str, command: Sequence[str], *, environment: Mapping[str, str] | None = None) -> None:
        self.name, self.times, self.cpu_times, self.losses = name, [], [], []  # type: ignore[var-annotated]
        paths = {"PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            list(command), env={**os.environ, **paths, **(environment or {})}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.about: dict[str, Any] = self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"{self.name} ended with code {self._process.wait()}")
        return json.loads(line)

    def step(self, *, keep: bool) -> None:
        """One step now; its times count where `keep`."""
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        answer = self._answer()
        self.losses.append(answer["loss"])
        if keep:
            self.times.append(answer["s"])
            self.cpu_times.append(answer["cpu_s"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


def take_turns(runners: Sequence[Runner], *, rounds: int, warm_up: int) -> None:
    """Each runner one step a round, in an order that turns; the first `warm_up` rounds don't count."""
    for number in range(warm_up + rounds):
        for at in range(len(runners)):
            runners[(at + number) % len(runners)].step(keep=number >= warm_up)


def median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """The median of the ratios of one round each: what slows the whole machine for a while slows both."""
    return statistics.median(first / second for first, second in zip(over, under, strict=True))
