"""If these fail, a dead launcher goes unnoticed, or a shell that ends takes training with it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.process_tree import Process, alive, broken, launcher_chain, stat, this_process

CHAIN = "import sys, time; sys.path.insert(0, {root!r}); from launcher.process_tree import launcher_chain; print([link.name for link in launcher_chain()], flush=True)"
ROOT = str(Path(__file__).resolve().parents[2])
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def chain_under(*words: str) -> str:
    """The chain that a child sees whose parent's command line has these words."""
    child = [sys.executable, "-c", CHAIN.format(root=ROOT)]
    parent = f"import subprocess; subprocess.run({child!r})"
    return subprocess.run([sys.executable, "-c", parent, *words], capture_output=True, text=True, timeout=30, check=True).stdout.strip()


def test_a_plain_parent_is_not_watched() -> None:
    """nohup, tmux, a closed terminal: no reason to stop."""
    assert chain_under("bash") == "[]" and launcher_chain() == []


@pytest.mark.parametrize("name", ["deepspeed.launcher.launch", "deepspeed.launcher.runner", "torch.distributed.run"])
def test_launchers_are(name: str) -> None:
    assert chain_under("-m", name, "x").startswith(f"['{name}'")


def test_a_process_is_known_by_its_start(tmp_path: Path) -> None:
    """Ids are used again: a process of the same id that began later is another one. A zombie is dead."""
    me = this_process()
    assert alive(me) and not alive(Process(me.pid, me.began + 1))
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    found = stat(child.pid)
    assert found is not None and found[0] == os.getpid()
    process = Process(child.pid, found[1])
    assert alive(process)
    child.kill()
    deadline = time.monotonic() + 10
    while alive(process):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert stat(child.pid) is not None  # a zombie still
    child.wait()
    assert not alive(process)


def test_an_unbroken_chain_is_not_broken() -> None:
    assert broken([]) is None
