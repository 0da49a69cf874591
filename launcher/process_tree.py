"""Which processes started this one, and whether they and its siblings are alive. Reads /proc; elsewhere nothing is watched.

Under the `deepspeed` command stand runner, launcher, ranks. When the runner dies, neither the launcher nor a rank is told and
a rank's parent stays the same, so the whole chain is watched. A plain parent (a shell, nohup, slurmstepd) is none of ours:
its death is no reason to stop.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

LAUNCHERS = (
    b"deepspeed.launcher.launch",
    b"deepspeed.launcher.runner",
    b"/deepspeed\0",
    b"torch.distributed.run",
    b"/torchrun\0",
    b"torch.distributed.launch",
)
OURS = (b"/mlite\0train\0", b"launcher.cli\0train\0")


@dataclass(frozen=True)
class Process:
    """A process and when it began, by which a reused id is told apart."""

    pid: int
    began: int


@dataclass(frozen=True)
class Link:
    child: Process
    parent: Process
    name: str


def stat(pid: int) -> tuple[int, int, str] | None:
    """(parent's id, start time in clock ticks, state), or None where there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[1]), int(fields[19]), fields[0]


def this_process() -> Process:
    found = stat(os.getpid())
    return Process(os.getpid(), found[1] if found else 0)


def alive(process: Process) -> bool:
    """Whether it runs still; a zombie does not."""
    if not sys.platform.startswith("linux"):
        return True
    found = stat(process.pid)
    return found is not None and found[1] == process.began and found[2] not in "ZX"


def launcher_chain() -> list[Link]:
    """This process and its parents, as far up as they are launchers."""
    chain: list[Link] = []
    child = this_process()
    while (found := stat(child.pid)) is not None:
        parent_found = stat(found[0])
        try:
            command = Path(f"/proc/{found[0]}/cmdline").read_bytes()
        except OSError:
            break
        name = next((mark.strip(b"/\0").replace(b"\0", b" ").decode() for mark in (*LAUNCHERS, *OURS) if mark in command), None)
        if name is None or parent_found is None:
            break
        parent = Process(found[0], parent_found[1])
        chain.append(Link(child, parent, name))
        child = parent
    return chain


def broken(chain: Iterable[Link]) -> Link | None:
    """The first link whose child was given another parent, or whose parent is dead."""
    for link in chain:
        found = stat(link.child.pid)
        if found is None or found[0] != link.parent.pid or not alive(link.parent):
            return link
    return None
