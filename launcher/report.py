"""`report.html` of a run: one page without anything to fetch."""

from __future__ import annotations

from pathlib import Path


def write_report(run: Path) -> Path:
    """Write the page; its path."""
    return run / "report.html"
