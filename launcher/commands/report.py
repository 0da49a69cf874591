"""`mlite report`: the run on one page."""

from __future__ import annotations

from pathlib import Path

from launcher.report import write_report
from launcher.saved_config import run_of


def report_run(path: Path, *, to: Path | None) -> None:
    """Write the page and print where it is. Raises ConfigError where `path` is no run."""
    print(write_report(run_of(path), to))
