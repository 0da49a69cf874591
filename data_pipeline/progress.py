"""Progress for people: a bar on a terminal, a plain line every few seconds elsewhere, nothing where quiet is asked."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

_LINE_EVERY_S = 5.0


def size(num_bytes: float) -> str:
    """1,234,567 bytes as 1.2 MB (decimal units)."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def duration(seconds: float) -> str:
    """75 seconds as 1:15, 4000 as 1:06:40."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


class Progress:
    """Stages one after another. Nothing here reaches a file of the dataset, so times may be said."""

    def __init__(self, *, quiet: bool = False, stream: TextIO | None = None, line_every_s: float = _LINE_EVERY_S) -> None:
        self._quiet, self._stream, self._every_s = quiet, sys.stderr if stream is None else stream, line_every_s
        self._bars = not quiet and self._stream.isatty()

    def say(self, text: str) -> None:
        if not self._quiet:
            print(text, file=self._stream, flush=True)

    @contextmanager
    def stage(self, name: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
        """Yields what is told the bytes done since the last time."""
        start = time.monotonic()
        done = 0
        if self._bars:
            with self._bar(name, total_bytes) as advance:
                yield advance
            return
        last = start

        def advance_line(num_bytes: int) -> None:
            nonlocal done, last
            done += num_bytes
            now = time.monotonic()
            if now - last >= self._every_s:
                last = now
                self.say(_line(name, done, total_bytes, now - start))

        yield advance_line
        self.say(f"{name}: {size(total_bytes)} in {duration(time.monotonic() - start)}")

    @contextmanager
    def _bar(self, name: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as Rich

        columns: list[Any] = [
            TextColumn("{task.description:<12}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        ]
        with Rich(*columns, console=Console(file=self._stream)) as rich:
            task = rich.add_task(name, total=total_bytes or None)
            yield lambda num_bytes: rich.advance(task, num_bytes)
            rich.update(task, total=max(total_bytes, 1), completed=max(total_bytes, 1))


def _line(name: str, done: int, total: int, elapsed_s: float) -> str:
    rate = done / max(elapsed_s, 1e-9)
    if not total or done <= 0:
        return f"{name}: {size(done)}, {duration(elapsed_s)}"
    left = duration(max(total - done, 0) / max(rate, 1e-9))
    return f"{name}: {100 * done / total:.0f} % ({size(done)} of {size(total)}, {size(rate)}/s, {left} left)"
