"""If these fail, two jobs write one run folder, or a dead job keeps it."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import threading
import time
from pathlib import Path

import pytest

from data_pipeline.errors import RunInUseError
from launcher import lock as module
from launcher.lock import RunLock


def hold(path: str, ready: str) -> None:
    held = RunLock(Path(path))
    held.acquire(job_id=None)
    Path(ready).touch()
    time.sleep(60)


def test_a_killed_holder_holds_nothing(tmp_path: Path) -> None:
    path, ready = tmp_path / ".lock", tmp_path / "ready"
    process = multiprocessing.get_context("spawn").Process(target=hold, args=(str(path), str(ready)), daemon=True)
    process.start()
    while not ready.exists():
        assert process.is_alive()
        time.sleep(0.05)
    assert RunLock(path).held_by_somebody()
    with pytest.raises(RunInUseError, match=f"in use by process {process.pid} on {socket.gethostname()}"):
        RunLock(path).acquire(job_id=None, wait_s=0.3)
    process.kill()
    process.join()
    assert not RunLock(path).held_by_somebody()
    again = RunLock(path)
    again.acquire(job_id="9", wait_s=0.3)
    assert json.loads(path.read_text())["pid"] == os.getpid()
    again.release()
    assert path.read_text() == ""


def test_a_holder_that_is_leaving_is_waited_for(tmp_path: Path) -> None:
    """A job that was stopped a moment ago would make the same command, typed again, fail."""
    first = RunLock(tmp_path / ".lock")
    first.acquire(job_id=None)
    threading.Timer(1.0, first.release).start()
    second = RunLock(tmp_path / ".lock")
    began = time.monotonic()
    second.acquire(job_id=None, wait_s=0.2, leaving=lambda: True)
    assert time.monotonic() - began > 0.5, "it was taken while the first still held it"
    assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
    second.release()


def test_another_hosts_touch_counts_where_flock_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system whose flock ends at the node: a lock touched just now by another host is not taken, a stale one is."""
    monkeypatch.setattr(module, "STALE_AFTER_S", 1.5)
    path = tmp_path / ".lock"
    path.write_text(json.dumps({"host": "elsewhere", "pid": 1, "since": "now", "job": "77"}))
    beating = threading.Event()

    def beat() -> None:
        while not beating.wait(0.2):
            path.touch()

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(RunInUseError, match=r"on elsewhere .* Slurm job 77"):
            RunLock(path).acquire(job_id=None)
    finally:
        beating.set()
        thread.join()
    began = time.monotonic()
    taken = RunLock(path)
    taken.acquire(job_id=None)
    assert time.monotonic() - began < 4
    taken.release()
