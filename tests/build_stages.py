"""Which stage a build is at, told in a file, for what watches it from outside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def tell_stages(path: str | Path) -> None:
    """From here on builds of this process write into the file the stage that begins, and `after` it when it ends."""
    from data_pipeline.progress import Progress

    real = Progress.stage

    @contextmanager
    def stage(self: Progress, name: str, total_bytes: int) -> Iterator[Any]:
        Path(path).write_text(name)
        with real(self, name, total_bytes) as advance:
            yield advance
        Path(path).write_text(f"after {name}")

    Progress.stage = stage  # type: ignore[method-assign]
