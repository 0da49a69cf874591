"""Machines on one machine: each "machine" is a set of Linux namespaces held by a first process, and lives as long as that."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # not the clients of another cluster
NAMESPACES = {"n": "--net", "u": "--uts", "i": "--ipc", "m": "--mount", "p": "--pid"}
# The first process of a namespace: it reaps orphans, nothing else.
REAPER = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
while True:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]: pass
    except ChildProcessError: pass
    signal.sigtimedwait([signal.SIGCHLD], 1)
"""


class ClusterError(RuntimeError):
    """The cluster can't be what was asked for."""


class Machines:
    """The head, and machines inside it; their processes are known by id and start time, in a file of the folder `state`."""

    def __init__(self, state: Path) -> None:
        self.state = state.resolve()
        self.file = self.state / "cluster.json"
        self.environ: dict[str, str] = {}  # of what is run in them
        self.dies_with_us = False  # however this process ends
        self._launchers: list[subprocess.Popen[bytes]] = []  # reaped when all is over
        self.facts: dict[str, Any] = json.loads(self.file.read_text()) if self.file.exists() else {}

    def end_all(self) -> None:
        """Kill the head: the kernel kills everything in it."""
        self.kill("head")
        for key in list(self.facts.get("processes", {})):
            wait_for(f"{key} to end", lambda key=key: not self.alive(key), 20)
        while self._launchers:
            self._launchers.pop().wait(20)
        self.facts = {}
        self.file.unlink(missing_ok=True)

    def boot(self, name: str) -> None:
        """A new "machine": namespaces that live as long as their first process."""
        ready = self.state / "run" / f"{name}.ready"
        ready.unlink(missing_ok=True)
        script = "\n".join(
            [
                "set -e",
                f"hostname {name}",
                f"mount --bind {shlex.quote(str(self.state / 'etc' / 'hosts'))} /etc/hosts",
                "mount -t tmpfs -o mode=1777 tmpfs /dev/shm",
                "ip link set lo up",
                f"touch {shlex.quote(str(ready))}",
                f"exec {shlex.quote(sys.executable)} -I -S -c {shlex.quote(REAPER)}",
            ]
        )
        command = ["unshare", *NAMESPACES.values(), "--fork", "--kill-child=KILL", "--mount-proc", "sh", "-c", script]
        if name != "head":  # inside the head's, so that its death takes every node along
            command = [*self.enter("head", "mp"), *command]
        elif self.dies_with_us:
            command = ["setpriv", "--pdeathsig", "KILL", *command]
        with open(self.state / "log" / f"{name}.boot", "ab") as log:
            top = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", start_new_session=True)

        def first_process() -> int | None:
            if top.poll() is not None:
                raise ClusterError(f"{name} does not start: {(self.state / 'log' / f'{name}.boot').read_text()}")
            pid: int | None = top.pid
            for _ in range(1 if name == "head" else 2):  # unshare, the first process; or nsenter, unshare, the first process
                pid = next(iter(children(pid)), None) if pid else None
            return pid if ready.exists() else None

        pid = wait_for(f"the namespace of {name}", first_process, 15)
        self._launchers.append(top)
        self.record(f"{name}.launcher", top.pid)
        self.record(name, pid)

    def daemon(self, key: str, command: list[str], pid_file: Path, *, where: str = "head") -> None:
        """Start something that puts itself into the background."""
        pid_file.unlink(missing_ok=True)
        self.run(*command, where=where, namespaces="nuimp")

        def inner() -> int:
            try:
                return int(pid_file.read_text())
            except (OSError, ValueError):
                return 0

        self.record(key, self.outside(where, wait_for(f"{key}'s pid file", inner, 20)))

    def outside(self, where: str, inner: int) -> int:
        """The id out here of a process that is `inner` in there."""
        namespace = Path(f"/proc/{self.pid(where)}/ns/pid").readlink()
        for pid in process_ids():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/ns/pid").readlink() == namespace:
                    match = re.search(r"^NSpid:(.*)$", Path(f"/proc/{pid}/status").read_text(), re.M)
                    if match is not None and int(match[1].split()[-1]) == inner:
                        return pid
        raise ClusterError(f"no process {inner} on {where}; see {self.state / 'log'}")

    def enter(self, where: str, namespaces: str) -> list[str]:
        return ["nsenter", "-t", str(self.pid(where)), *[NAMESPACES[letter] for letter in namespaces], "--"]

    def run(self, *command: str, where: str = "head", namespaces: str = "n", check: bool = True) -> str:
        """Run to its end; a daemon must not keep our pipe open, so the output goes through a file."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
        output = self.state / "log" / "commands.txt"
        with open(output, "ab+") as log:
            begin = log.seek(0, os.SEEK_END)
            result = subprocess.run(
                [*self.enter(where, namespaces), *command],
                env={**kept, "PATH": PATH, **self.environ},
                cwd="/",
                timeout=60,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            log.seek(begin)
            text = log.read().decode(errors="replace")
        if check and result.returncode:
            raise ClusterError(f"`{shlex.join(command)}` on {where} ended with {result.returncode}: {text.strip()}")
        return text

    def record(self, key: str, pid: int) -> None:
        began = began_at(pid)
        if began is None:
            raise ClusterError(f"{key} died at once; see {self.state / 'log'}")
        self.facts["processes"][key] = [pid, began]
        self.file.write_text(json.dumps(self.facts))

    def alive(self, key: str) -> bool:
        record = self.facts.get("processes", {}).get(key)
        return record is not None and began_at(record[0]) == record[1]

    def pid(self, key: str) -> int:
        if not self.alive(key):
            raise ClusterError(f"{key} is not running")
        return int(self.facts["processes"][key][0])

    def kill(self, key: str) -> None:
        if self.alive(key):
            os.kill(self.pid(key), signal.SIGKILL)
            wait_for(f"{key} to end", lambda: not self.alive(key), 20)
        self.facts.get("processes", {}).pop(key, None)


def began_at(pid: int) -> int | None:
    """The kernel's start time of a process that is alive."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def process_ids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def children(pid: int) -> list[int]:
    found = []
    for each in process_ids():
        with contextlib.suppress(OSError, IndexError):
            if int(Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(each)
    return found


def wait_for(what: str, test: Callable[[], T | None], timeout_s: float) -> T:
    deadline = time.monotonic() + timeout_s
    while not (found := test()):
        if time.monotonic() > deadline:
            raise ClusterError(f"waited {timeout_s:g} s in vain for {what}")
        time.sleep(0.05)
    return found
