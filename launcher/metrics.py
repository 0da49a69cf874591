"""metrics.jsonl and events.jsonl: what was measured at each step, once, and what happened to the run."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from data_pipeline.storage import atomic_write


def to_line(record: Mapping[str, Any]) -> str:
    """One JSON object on a line. JSON has no infinity: it is written as the string "inf", which float() reads."""
    plain = {key: str(value) if isinstance(value, float) and not math.isfinite(value) else value for key, value in record.items()}
    return json.dumps(plain, ensure_ascii=False, allow_nan=False) + "\n"


class JsonLines:
    """A file of JSON objects that is only appended to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[str] | None = None

    def append(self, record: Mapping[str, Any]) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 (open for the run's life)
        self._file.write(to_line(record))

    def sync(self) -> None:
        """Make all lines durable."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self.sync()
            self._file.close()
            self._file = None

    def lines(self) -> Iterator[tuple[str, dict[str, Any] | None]]:
        """(line, its object); None where the line is torn, as a killed writer leaves it."""
        if not self.path.exists():
            return
        with open(self.path, encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    value = json.loads(line) if line.endswith("\n") else None
                except ValueError:
                    value = None
                yield line, value if isinstance(value, dict) else None


class Events(JsonLines):
    """events.jsonl: what happened, with the time and the attempt that it happened in."""

    def __init__(self, path: Path, *, attempt: int) -> None:
        super().__init__(path)
        self.attempt = attempt

    def record(self, event: str, **fields: Any) -> None:
        self.append({"time": round(time.time(), 3), "attempt": self.attempt, "event": event, **fields})
        self.sync()


class Metrics(JsonLines):
    """metrics.jsonl: each step stands once, and evaluations stand at the step whose weights they scored."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._evaluated: set[int] = set()

    def rewind(self, step: int, events: Events) -> int:
        """Move what comes after `step` to the events; returns how many lines moved. To be killed in between is harmless: a
        line is in one of the files at every instant, and the next attempt doesn't move it twice."""
        self.close()
        kept: list[tuple[str, dict[str, Any] | None]] = []
        later: list[tuple[str, dict[str, Any] | None]] = []
        for line, value in self.lines():
            after = value is None or not isinstance(value.get("step"), int) or value["step"] > step
            (later if after else kept).append((line, value))
        if later:
            moved = {record["line"] for _, record in events.lines() if record is not None and record.get("event") == "superseded"}
            for line, _ in later:
                if line.rstrip("\n") not in moved:
                    events.append(
                        {"time": round(time.time(), 3), "attempt": events.attempt, "event": "superseded", "line": line.rstrip("\n")}
                    )
            events.sync()
            with atomic_write(self.path) as file:
                file.writelines(line.encode() for line, _ in kept)
        self._evaluated = {value["step"] for _, value in kept if value is not None and "eval/loss" in value}
        return len(later)

    def evaluated(self, step: int) -> bool:
        return step in self._evaluated

    def append(self, record: Mapping[str, Any]) -> None:
        super().append(record)
        if "eval/loss" in record:
            self._evaluated.add(int(record["step"]))

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """(steps, values) of a key; lines without it are left out."""
        pairs = [(value["step"], float(value[key])) for _, value in self.lines() if value is not None and key in value and "step" in value]
        return [step for step, _ in pairs], [value for _, value in pairs]


def perplexity(loss: float) -> float:
    """exp(loss), infinite where that is too large for a float, nan for nan."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def last_rates(metrics: Path) -> dict[str, Any]:
    """tokens_per_second, step_time_s and loss of the last logged step in the file; empty where there is none."""
    try:
        with open(metrics, "rb") as file:
            file.seek(max(0, metrics.stat().st_size - 8192))
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "tokens_per_second" in record:
            return {key: record[key] for key in ("tokens_per_second", "step_time_s", "loss") if key in record}
    return {}
