"""Starts real ranks of the real entry, quickly: they are forked from a server that has loaded torch and DeepSpeed already."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.paths import ROOT
from tests.ranks import forkserver

TIMES = ("tokens_per_second", "step_time_s", "data_wait_s", "mfu")  # of metrics: all that may differ between equal runs
TRAIN = str(ROOT / "launcher" / "train.py")

_context = forkserver()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Job:
    """The ranks of one start, and what they print."""

    ranks: list[Any]
    output_file: Path

    def wait(self, timeout_s: float = 150.0) -> list[int]:
        """The exit codes, by rank (-9: killed); everything is killed, and the test fails, after the time-out."""
        deadline = time.monotonic() + timeout_s
        for process in self.ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        late = [rank for rank, process in enumerate(self.ranks) if process.is_alive()]
        self.kill()
        assert not late, f"ranks {late} were still there after {timeout_s} s\n{self.output}"
        return [process.exitcode for process in self.ranks]

    def kill(self) -> None:
        for process in self.ranks:
            if process.is_alive():
                process.kill()
                process.join()

    def signal(self, number: int, *ranks: int) -> None:
        for rank in ranks or range(len(self.ranks)):
            os.kill(self.ranks[rank].pid, number)

    @property
    def output(self) -> str:
        return self.output_file.read_text(errors="replace")

    def wait_for(self, text: str, timeout_s: float = 150.0) -> None:
        """Until the job has printed this."""
        deadline = time.monotonic() + timeout_s
        while text not in self.output:
            if time.monotonic() > deadline or not any(process.is_alive() for process in self.ranks):
                self.kill()
                raise AssertionError(f"{text!r} was not printed\n{self.output}")
            time.sleep(0.02)


def _rank(folder: str, argv: list[str], environ: dict[str, str], output: str) -> None:
    """In a fresh child: become a process that somebody started as `python launcher/train.py ARGV`."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = [TRAIN, *argv]
    from launcher.train import main

    code = main(argv)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@dataclass
class Workspace:
    """A folder with a config, where runs are started."""

    folder: Path
    config: Path
    environ: dict[str, str] = field(default_factory=dict)
    starts: int = 0

    def start(self, *overrides: str, world: int = 1, fault: str = "") -> Job:
        """Start `world` ranks of the run, as a launcher would."""
        self.starts += 1
        output = self.folder / f"output-{self.starts}.txt"
        output.touch()
        environ, ranks, port = {**clean_environment(), **self.environ, "MLITE_FAULT": fault}, [], free_port()
        for rank in range(world):
            own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
            given = {**{name: str(value) for name, value in own.items()}, "MASTER_ADDR": "127.0.0.1"} if world > 1 else {}
            process = _context.Process(
                target=_rank, args=(str(self.folder), [str(self.config), *overrides], {**environ, **given}, str(output)), daemon=True
            )
            process.start()
            ranks.append(process)
        return Job(ranks, output)

    def run(self, *overrides: str, world: int = 1, fault: str = "", timeout_s: float = 150.0) -> tuple[int, str]:
        """Start and wait: (rank 0's exit code, what was printed)."""
        job = self.start(*overrides, world=world, fault=fault)
        codes = job.wait(timeout_s)
        return codes[0], job.output

    def command(self, *words: str, timeout_s: float = 300.0, **environ: str) -> subprocess.CompletedProcess[str]:
        """A command line as a user types it, here."""
        return subprocess.run(
            list(words),
            cwd=self.folder,
            env={**clean_environment(), **self.environ, **environ},
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def path(self, name: str) -> Path:
        return self.folder / "runs" / name

    def status(self, name: str) -> dict[str, Any]:
        return json.loads((self.path(name) / "status.json").read_text())

    def metrics(self, name: str) -> list[dict[str, Any]]:
        """metrics.jsonl without what is measured in seconds."""
        lines = (self.path(name) / "metrics.jsonl").read_text().splitlines()
        return [{key: value for key, value in json.loads(line).items() if key not in TIMES} for line in lines]

    def events(self, name: str, kind: str) -> list[dict[str, Any]]:
        lines = (self.path(name) / "events.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["event"] == kind]

    def checkpoints(self, name: str) -> list[str]:
        return sorted(path.name for path in (self.path(name) / "checkpoints").iterdir())


def clean_environment() -> dict[str, str]:
    """This environment without what would make a rank, a Slurm step or a wandb run of a child."""
    dropped = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "SLURM_", "WANDB_", "TORCHELASTIC_", "MLITE_", "LOCAL_WORLD_SIZE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return {
        **kept,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "PATH": f"{Path(sys.executable).parent}:{kept['PATH']}",
    }


def alive(pids: Sequence[int]) -> list[int]:
    """Those of the processes that still run."""
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            found.append(pid)
    return found


def children(pid: int) -> list[int]:
    """Direct children, in the order of their ids."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == pid:
                found.append(int(entry.name))
    return sorted(found)


KILL = signal.SIGKILL
