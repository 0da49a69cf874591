"""What a check found, written down as it comes, so that a run that is cut off keeps what it had."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

State = Literal["ok", "FAILED", "skipped", "measured"]


@dataclass
class Finding:
    """One line of the summary. `numbers` are for the JSON file."""

    state: State
    text: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)


class Skip(Exception):
    """This device can't do it, or there is no time left: the reason."""


def at_most(limits: dict[str, float], found: dict[str, float]) -> Finding:
    """Passes where every number is at most its limit; NaN never is."""
    passed = all(found[name] <= limit for name, limit in limits.items())
    text = ", ".join(f"{name} {found[name]:.1e} (<= {limit:.0e})" for name, limit in limits.items())
    return Finding("ok" if passed else "FAILED", text, dict(found))


def same(what: str, equal: bool, *, otherwise: str = "") -> Finding:
    return Finding("ok", f"{what}: the same") if equal else Finding("FAILED", f"{what} differ{': ' if otherwise else ''}{otherwise}")


class Recorder:
    """Runs the checks of one group in this process; each one's finding is a line of `file`."""

    def __init__(self, file: Path, group: str, *, stop_at: float) -> None:
        self._file, self._group, self._stop_at = file, group, stop_at  # time.time()

    @property
    def folder(self) -> Path:
        return self._file.parent

    @property
    def left_s(self) -> float:
        return self._stop_at - time.time()

    def check(self, name: str, function: Callable[[], Finding], *, needs_s: float = 0.0) -> None:
        """Record what the function finds; an exception of it is a failure like another, and the next check follows."""
        began = time.perf_counter()
        try:
            if self.left_s < needs_s:
                raise Skip(f"{self.left_s:.0f} s are left, it needs {needs_s:.0f}")
            finding = function()
        except Skip as reason:
            finding = Finding("skipped", str(reason))
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            finding = Finding("FAILED", f"{type(error).__name__}: {str(error)[:300]} ({Path(last.filename).name}:{last.lineno})")
            finding.numbers["traceback"] = traceback.format_exc()
        seconds = round(time.perf_counter() - began, 2)
        line = {"group": self._group, "name": name, **asdict(finding), "seconds": seconds}
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{finding.state:>8}  {self._group}: {name}: {finding.text}  [{seconds:.1f} s]", flush=True)
