"""A build that is killed where it is told to: `python -m tests.proofs.killed_build CONFIG WORKERS [WHO:POINT:N] [STAGE_FILE]`.

WHO is `parent` or `worker`: the process that SIGKILLs itself when it comes to POINT for the N-th time. Spawned workers import this module
as their `__mp_main__`, so what stands outside `main` holds in them too: small tasks, parts and shards, and the points.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from data_pipeline import ingest, inputs, sharding
from data_pipeline.blockfile import BlockWriter
from data_pipeline.dedup import columns, external
from tests.build_stages import tell_stages

POINTS = ("in_a_write", "before_fsync", "before_rename", "after_rename", "before_link")

# small enough that a small corpus makes several of each
inputs.TASK_BYTES, ingest.PART_BYTES, sharding.MIN_SHARD_BYTES = 64 << 10, 96 << 10, 96 << 10
external.RUN_RECORDS, external.BUDGET_BYTES, columns.BATCH_BYTES = 1 << 12, 1 << 16, 64 << 10

_seen: dict[str, int] = {}


def _reached(point: str) -> None:
    who, wanted, number = os.environ.get("KILLED_BUILD", "nobody:nothing:0").split(":")
    _seen[point] = _seen.get(point, 0) + 1
    is_worker = multiprocessing.parent_process() is not None
    if (who, wanted, int(number)) == ("worker" if is_worker else "parent", point, _seen[point]):
        os.kill(os.getpid(), signal.SIGKILL)


def _around(real: Callable[..., Any], *, before: str | None = None, after: str | None = None) -> Callable[..., Any]:
    def call(*arguments: Any, **more: Any) -> Any:
        if before:
            _reached(before)
        result = real(*arguments, **more)
        if after:
            _reached(after)
        return result

    return call


def _torn_write(real: Callable[[BlockWriter, bytes], None]) -> Callable[[BlockWriter, bytes], None]:
    """Half of the bytes are in the file, and in the kernel's hands, when the process goes."""

    def write(self: BlockWriter, chunk: bytes) -> None:
        half = len(chunk) // 2
        real(self, chunk[:half])
        if half and os.environ.get("KILLED_BUILD", "").split(":")[1:2] == ["in_a_write"]:
            self._file.flush()
            _reached("in_a_write")
        real(self, chunk[half:])

    return write


def _arm() -> None:
    os.fsync = _around(os.fsync, before="before_fsync")
    os.replace = _around(os.replace, before="before_rename", after="after_rename")
    os.rename = _around(os.rename, before="before_rename", after="after_rename")
    os.link = _around(os.link, before="before_link")
    BlockWriter._write = _torn_write(BlockWriter._write)  # type: ignore[method-assign]


def main(config: str, workers: str, point: str = "", stage_file: str = "") -> None:
    from data_pipeline.build import build
    from data_pipeline.config import load_data_config

    if point:
        os.environ["KILLED_BUILD"] = point
    if stage_file:
        tell_stages(stage_file)
    build(load_data_config(config, [f"workers={workers}"]), quiet=True)


_arm()
if __name__ == "__main__":
    main(*sys.argv[1:])
