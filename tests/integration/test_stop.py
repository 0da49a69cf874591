"""If these fail, a job that is told to stop loses work, or leaves processes behind."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.jobs import TRAIN, Workspace, alive, children, clean_environment, free_port

PLAIN = ("training.engine=torch", "parallel.zero_stage=0")
SLOW = "slow_step:0.15"
DP2 = (*PLAIN, "training.steps=60")


def require_stopped(workspace: Workspace, name: str = "a") -> int:
    """The run stopped on request, and its last step is saved and logged; returns the step."""
    status = workspace.status(name)
    assert (status["state"], status["code"]) == ("stopped", 75), status
    assert status["checkpoint"] == status["step"] == workspace.metrics(name)[-1]["step"]
    assert f"step_{status['step']:08d}" in workspace.checkpoints(name)
    return int(status["step"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_each_signal_finishes_the_step_and_saves(workspace: Workspace, number: signal.Signals) -> None:
    job = workspace.start(*DP2, fault=SLOW)
    job.wait_for("step  3/60")
    job.signal(number)
    assert job.wait() == [75]
    assert f"on request ({number.name}); start the same command again to go on" in job.output
    step = require_stopped(workspace)
    code, output = workspace.run(*PLAIN, f"training.steps={step + 2}")
    assert code == 0 and f"from step {step} " in output


def test_a_signal_to_one_rank_stops_all_at_the_same_step(workspace: Workspace) -> None:
    """Rank 1 alone hears it, in the middle of a step of two micro-batches; and a second signal cuts nothing short (B143)."""
    job = workspace.start(*DP2, "training.micro_batch_size=1", world=2, fault=SLOW)
    job.wait_for("step  3/60")
    job.signal(signal.SIGTERM, 1)
    job.signal(signal.SIGTERM, 1)
    assert job.wait() == [75, 75]
    require_stopped(workspace)


def test_a_signal_cuts_an_evaluation_short(workspace: Workspace) -> None:
    """The step is saved at once, not after the evaluation, which the next attempt makes good: before training, and at its end (B144)."""
    few = (*PLAIN, "training.steps=4", "training.micro_batch_size=1", "evaluation.max_sequences=40")
    job = workspace.start(*few, fault="slow_eval:0.5")  # all of it would take 20 s
    job.wait_for("attempt 1 from step 0")
    asked = time.time()
    job.signal(signal.SIGTERM)
    assert job.wait() == [75]
    assert workspace.events("a", "stopped")[0]["time"] < asked + 12
    assert workspace.status("a")["state"] == "stopped" and not (workspace.path("a") / "metrics.jsonl").exists()
    job = workspace.start(*few, fault="slow_step:2")
    job.wait_for("step 1/4 | loss")
    job.signal(signal.SIGTERM)
    assert job.wait() == [75]
    job = workspace.start(*few, "evaluation.interval_steps=null", fault="slow_eval:0.5")
    job.wait_for("step 4/4 | loss")
    asked = time.time()
    job.signal(signal.SIGUSR1)
    assert job.wait() == [75]
    assert require_stopped(workspace) == 4 and workspace.events("a", "saved")[-1]["time"] < asked + 12
    assert workspace.run(*few)[0] == 0
    assert workspace.run(*few, "run.name=whole")[0] == 0
    assert workspace.metrics("a") == workspace.metrics("whole")


def test_a_signal_during_a_save_waits_for_it_and_stops_there(workspace: Workspace) -> None:
    """The step being saved is the one that the run stops at (B145)."""
    job = workspace.start(*DP2, "checkpoint.interval_steps=4", world=2, fault="slow_save:2")
    job.wait_for("step  4/60 | held-out")
    time.sleep(0.5)
    job.signal(signal.SIGUSR1, 0)
    assert job.wait() == [75, 75]
    assert require_stopped(workspace) == 4


def start_tree(workspace: Workspace, *command: str) -> subprocess.Popen[bytes]:
    environ = {**clean_environment(), "MLITE_FAULT": SLOW}
    with open(workspace.folder / "tree.txt", "wb") as output:
        return subprocess.Popen(command, cwd=workspace.folder, env=environ, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)


def wait_for_step(workspace: Workspace, process: subprocess.Popen[bytes], text: str = "step  2/60") -> None:
    deadline = time.monotonic() + 180
    while text not in (workspace.folder / "tree.txt").read_text(errors="replace"):
        assert time.monotonic() < deadline and process.poll() is None, (workspace.folder / "tree.txt").read_text(errors="replace")
        time.sleep(0.05)


def tree_of(pid: int) -> list[int]:
    """The process and all that descends from it, top down."""
    found = [pid]
    for each in found:
        found += children(each)
    return found


def require_gone(pids: list[int], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while left := alive(pids):
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.1)


def kill_tree(pids: list[int]) -> None:
    for pid in alive(pids):
        subprocess.run(["kill", "-9", str(pid)], check=False)


def deepspeed_command(workspace: Workspace) -> tuple[str, ...]:
    port = ("--master_port", str(free_port()))
    return ("deepspeed", "--num_gpus", "2", *port, TRAIN, "--config", str(workspace.config), *DP2)


def torchrun_command(workspace: Workspace) -> tuple[str, ...]:
    return ("torchrun", "--nproc_per_node", "2", "--master_port", str(free_port()), TRAIN, "--config", str(workspace.config), *DP2)


def mlite_command(workspace: Workspace) -> tuple[str, ...]:
    return ("mlite", "train", str(workspace.config), "-n", "2", *DP2)


# (command, place in its tree from the top, signal, whether the command's own exit code is the run's)
TREES: list[tuple[Callable[[Workspace], tuple[str, ...]], int, signal.Signals, bool]] = [
    (deepspeed_command, 0, signal.SIGTERM, False),  # the deepspeed command itself dies at once; its launcher is not told
    (deepspeed_command, 1, signal.SIGTERM, False),  # the launcher tells rank 0 only
    (deepspeed_command, 1, signal.SIGKILL, False),  # ranks are orphaned, and the command ends with 0
    (torchrun_command, 0, signal.SIGTERM, False),
    (torchrun_command, 0, signal.SIGUSR1, False),  # which torchrun does not hand on: it dies of it (B142)
    (mlite_command, 0, signal.SIGTERM, True),
    (mlite_command, 0, signal.SIGKILL, False),
]


@pytest.mark.parametrize(("command", "place", "number", "own_code"), TREES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_signal_to_any_process_of_the_tree(
    workspace: Workspace, command: Callable[[Workspace], tuple[str, ...]], place: int, number: signal.Signals, own_code: bool
) -> None:
    """Wherever the signal lands, the ranks save, stop with 75 in status.json, and nobody is left (B145)."""
    process = start_tree(workspace, *command(workspace))
    pids = [process.pid]
    try:
        wait_for_step(workspace, process)
        pids = tree_of(process.pid)
        subprocess.run(["kill", f"-{number.value}", str(pids[place])], check=True)
        code = process.wait(90)
        require_gone(pids)
        require_stopped(workspace)
        assert not own_code or code == 75
    finally:
        kill_tree(pids)


def test_a_closed_terminal_does_not_end_a_run(workspace: Workspace) -> None:
    """Nobody reads the output any more: training goes on, and a signal still saves."""
    command = ("python", TRAIN, "--config", str(workspace.config), *DP2)
    environ = {**clean_environment(), "MLITE_FAULT": SLOW}
    process = subprocess.Popen(command, cwd=workspace.folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    while "step  2/60" not in (line := process.stdout.readline()):
        assert line, "it ended"
    process.stdout.close()
    deadline = time.monotonic() + 60
    while workspace.metrics("a")[-1]["step"] < 6:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.terminate()
    assert process.wait(60) == 75
    assert require_stopped(workspace) >= 6


def test_the_entry_hides_no_library_of_the_same_name(tmp_path: Path) -> None:
    """A script's folder comes first on sys.path, where launcher/config.py and others would stand in for libraries."""
    program = f"import sys, runpy; sys.argv = ['train.py', '--help']; sys.path.insert(0, {str(Path(TRAIN).parent)!r})\n"
    program += f"try: runpy.run_path({TRAIN!r}, run_name='entry')\nexcept SystemExit: pass\n"
    program += f"assert {str(Path(TRAIN).parent)!r} not in sys.path, sys.path"
    result = subprocess.run(["python", "-c", program], cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
