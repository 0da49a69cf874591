"""The run folder: where its files are, its attempts, and `status.json`, the one record of how the run stands."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from data_pipeline.errors import CheckpointError
from data_pipeline.storage import atomic_write
from launcher.environment import Environment
from launcher.lock import RunLock

FINAL_STATES = ("done", "stopped", "failed")
LIVE_STATES = ("starting", "running", "stopping")


class RunFolder:
    """Paths of one run. Only the process that holds the lock writes, but for a rank's own log and the mark of a failure."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.deepspeed = path / "deepspeed.json"
        self.status_file = path / "status.json"
        self.metrics = path / "metrics.jsonl"
        self.events = path / "events.jsonl"
        self.plot = path / "loss.png"
        self.checkpoints = path / "checkpoints"
        self.attempt = 0
        self.lock = RunLock(path / ".lock")
        self._writing = threading.Lock()

    @property
    def attempt_folder(self) -> Path:
        return self.path / "attempts" / f"{self.attempt:04d}"

    def log_file(self, rank: int) -> Path:
        return self.attempt_folder / "log" / f"rank_{rank:05d}.log"

    def begin(self, environment: Environment) -> None:
        """Take the lock and open the next attempt. Raises RunInUseError."""
        self.lock.acquire(job_id=environment.job_id, leaving=lambda: self.status().get("state") == "stopping")
        attempts = self.path / "attempts"
        attempts.mkdir(parents=True, exist_ok=True)
        self.attempt = 1 + max((int(entry.name) for entry in attempts.iterdir() if entry.name.isdigit()), default=0)
        (self.attempt_folder / "log").mkdir(parents=True)
        write_json(self.attempt_folder / "environment.json", describe(environment))
        self.write_status("starting")

    def status(self) -> dict[str, Any]:
        """status.json as it stands; empty where there is none."""
        return read_json(self.status_file)

    def write_config(self, text: str) -> None:
        """Keep the config of this attempt, in its own folder and as the run's."""
        for path in (self.attempt_folder / "config.yaml", self.config):
            with atomic_write(path) as file:
                file.write(text.encode())

    def in_use(self) -> bool:
        """Whether a job is at the run now: it holds the lock on this host, or, on another, it touched the lock just now."""
        return self.lock.held_by_somebody() or (self.status().get("state") in LIVE_STATES and self.lock.touched_lately())

    def keep_tokenizer(self, file: Path, *, begin_id: int, end_id: int) -> None:
        """What text needs besides a checkpoint, as a Hugging Face folder has it: the run stays of use where its data is not."""
        write_json(self.path / "generation_config.json", {"bos_token_id": begin_id, "eos_token_id": end_id, "pad_token_id": end_id})
        with atomic_write(self.path / "tokenizer.json") as copy:  # last: a tokenizer without its ids is of no use
            copy.write(file.read_bytes())

    def write_status(self, state: str, *, code: int | None = None, **more: Any) -> None:
        """Replace status.json; fields that are None stay as they were. Within an attempt the first end is the last word."""
        with self._writing:
            status = self.status()
            before = status.get("state") if status.get("attempt") == self.attempt else None
            if before in FINAL_STATES:
                return
            status.update({key: value for key, value in more.items() if value is not None})
            for key in ("seconds_left",) if state in FINAL_STATES else ("message", "failed_rank"):
                status.pop(key, None)
            status.update(state=state, code=code, attempt=self.attempt, time=time.time())
            write_json(self.status_file, status)

    def refuse(self, environment: Environment, *, code: int, message: str) -> None:
        """An attempt that ended before it could begin: its own number, and in status.json why. Raises RunInUseError and OSError."""
        self.begin(environment)
        try:
            self.write_status("failed", code=code, message=message)
        finally:
            self.lock.release()

    def require_checkpoints_that_were_saved(self, newest: int | None) -> None:
        """A folder whose status names a saved step must still have it, or training would begin again unasked."""
        saved = self.status().get("checkpoint")
        if newest is None and saved is not None:
            raise CheckpointError(
                f"{self.status_file} says that step {saved} was saved, but {self.checkpoints} has no complete checkpoint. "
                f"Put it back; to train from the beginning, delete {self.path} or choose another run.name"
            )


def describe(environment: Environment) -> dict[str, Any]:
    """What an attempt ran on."""
    packages: dict[str, str | None] = {}
    for name in ("megatron-lite", "torch", "deepspeed", "numpy"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = None
    return {
        "command": sys.argv,
        "cwd": str(Path.cwd()),
        "host": platform.node(),
        "platform": platform.platform(),
        "commit": commit_of(Path(__file__).parent),
        "python": platform.python_version(),
        "packages": packages,
        "cpus": os.cpu_count(),
        "world_size": environment.world_size,
        "starter": environment.starter,
        "job": environment.job_id,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def commit_of(checkout: Path) -> str | None:
    """The commit that the code stands at, with `-dirty` where files differ from it; None where git can't say."""
    words = ["git", "--no-optional-locks", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=10, check=True).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    with atomic_write(path) as file:
        file.write((json.dumps(dict(value), indent=1, ensure_ascii=False) + "\n").encode())
