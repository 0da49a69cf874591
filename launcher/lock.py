"""One run folder, one job: a lock that a dead job does not hold.

flock is given back by the kernel when its holder dies, however it dies. Some cluster file systems honour it only within one
node, so the holder also touches the file every few seconds, and a lock that another host touched just now is not taken.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data_pipeline.errors import RunInUseError

TOUCH_EVERY_S = 10.0
STALE_AFTER_S = 45.0
POLL_S = 0.2


class RunLock:
    """The lock of a run folder. `holder` is what the file says about who has it, or had it last."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        self._done = threading.Event()

    def acquire(
        self, *, job_id: str | None, leaving: Callable[[], bool] = lambda: False, wait_s: float = 3.0, leave_s: float = 120.0
    ) -> None:
        """Take it within `wait_s`, or within `leave_s` where `leaving()` says that the holder is on its way out.
        Raises RunInUseError naming the holder."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        began, touched = time.monotonic(), os.fstat(descriptor).st_mtime
        while not self._try(descriptor):
            waited = time.monotonic() - began
            beats = self._elsewhere(descriptor) and os.fstat(descriptor).st_mtime != touched
            patience = leave_s if leaving() else (STALE_AFTER_S + 5 if self._elsewhere(descriptor) else wait_s)
            if waited > patience or (beats and not leaving()):
                holder = _read(descriptor)
                os.close(descriptor)
                raise RunInUseError(
                    f"{self.path.parent} is in use by {_describe(holder)}. One job at a time writes a run folder: "
                    "wait for it, stop it, or choose another run.name"
                )
            time.sleep(POLL_S)
        _write(descriptor, {"host": socket.gethostname(), "pid": os.getpid(), "job": job_id, "since": time.strftime("%Y-%m-%d %H:%M:%S")})
        self._descriptor = descriptor
        threading.Thread(target=self._touch, name="run-lock", daemon=True).start()

    def release(self) -> None:
        if self._descriptor is not None:
            self._done.set()
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None

    def held_by_somebody(self) -> bool:
        """Whether a process on this host has it now."""
        if not self.path.exists():
            return False
        descriptor = os.open(self.path, os.O_RDWR)
        try:
            return not self._flock(descriptor)
        finally:
            os.close(descriptor)

    def touched_lately(self) -> bool:
        """Whether a holder, on whatever host, has touched it within STALE_AFTER_S by this host's clock."""
        return self.path.exists() and self.path.stat().st_size > 0 and time.time() - self.path.stat().st_mtime < STALE_AFTER_S

    def holder(self) -> dict[str, Any]:
        """What the file says about who has it, or had it last: host, pid, job, since."""
        try:
            return _parse(self.path.read_bytes())
        except OSError:
            return {}

    @staticmethod
    def _flock(descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without flock: the touches alone must do
            return True
        return True

    def _try(self, descriptor: int) -> bool:
        """flock, and no other host has touched the file lately."""
        if not self._flock(descriptor):
            return False
        if self._elsewhere(descriptor) and self._age_s(descriptor) <= STALE_AFTER_S:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            return False
        return True

    @staticmethod
    def _elsewhere(descriptor: int) -> bool:
        host = _read(descriptor).get("host")
        return host is not None and host != socket.gethostname()

    def _age_s(self, descriptor: int) -> float:
        """By the file server's clock, which need not agree with ours."""
        probe = self.path.with_name(f".clock-{socket.gethostname()}-{os.getpid()}")
        probe.touch()
        now = probe.stat().st_mtime
        probe.unlink(missing_ok=True)
        return now - os.fstat(descriptor).st_mtime

    def _touch(self) -> None:
        while not self._done.wait(TOUCH_EVERY_S):
            if self._descriptor is not None:
                os.utime(self._descriptor)


def _read(descriptor: int) -> dict[str, Any]:
    return _parse(os.pread(descriptor, 4096, 0))


def _parse(text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text or b"{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _write(descriptor: int, owner: dict[str, Any]) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(owner).encode(), 0)


def _describe(holder: dict[str, Any]) -> str:
    if "pid" not in holder:
        return "another process"
    job = f", Slurm job {holder['job']}" if holder.get("job") else ""
    return f"process {holder['pid']} on {holder['host']} since {holder['since']}{job}"
