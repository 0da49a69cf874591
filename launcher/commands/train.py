"""`mlite train`: one process a GPU, or one a tp rank, on this machine; and the run's own exit code."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from launcher.config import load_config, parse_arguments
from launcher.run_folder import RunFolder

USAGE = "Usage: mlite train CONFIG [section.key=value ...]"
ENTRY = Path(__file__).resolve().parent.parent / "train.py"
PATIENCE_S = {True: 1.0, False: 5.0}  # after a rank failed, for the others to say what they know; True: it was the first rank


def train_here(argv: Sequence[str], *, processes: int = 0) -> int:
    """Check, start the ranks, hand signals on to them, wait; the exit code that status.json gives, where it gives one."""
    arguments = parse_arguments(argv, usage=USAGE)
    config = load_config(arguments.config, arguments.overrides)
    world = processes or num_gpus() or config.parallel.tp
    config = load_config(arguments.config, arguments.overrides, world_size=world)
    folder = RunFolder(config.run.folder)
    before = folder.status().get("attempt", 0)
    command = [sys.executable, str(ENTRY), "--config", str(arguments.config), *arguments.overrides]
    ranks = [subprocess.Popen(command, env=_environment(rank, world, port)) for port in [_free_port()] for rank in range(world)]

    def hand_on(number: int, frame: FrameType | None) -> None:
        for process in ranks:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, hand_on)
    code = _wait(ranks)
    status = folder.status()
    if status.get("attempt", 0) > before and isinstance(status.get("code"), int):
        return int(status["code"])
    return code


def _wait(ranks: list[subprocess.Popen[bytes]]) -> int:
    """Until all have ended; the first failure's code. The ranks watch each other: what is left after that is ended here."""
    first: int | None = None
    deadline = float("inf")
    while any(process.poll() is None for process in ranks):
        for rank, process in enumerate(ranks):
            if first is None and process.poll() not in (None, 0, 75):
                first, deadline = process.poll(), time.monotonic() + PATIENCE_S[rank == 0]
        if time.monotonic() > deadline:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
        time.sleep(0.05)
    codes = [process.returncode for process in ranks]
    code = first if first is not None else next((code for code in codes if code), 0)
    return code if code >= 0 else 1


def _environment(rank: int, world: int, port: int) -> dict[str, str]:
    if world == 1:
        return dict(os.environ)
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    return {**os.environ, **{name: str(value) for name, value in own.items()}, "MASTER_ADDR": "127.0.0.1"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def num_gpus() -> int:
    """GPUs that this process may use, without loading torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = len(list(Path("/dev").glob("nvidia[0-9]*")))
    if visible is None or not present:
        return present
    return min(present, len([part for part in visible.split(",") if part.strip() and part.strip() != "-1"]))
