"""If these fail, one rank's death costs the whole allocation, or the run's status lies about it."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.integration.jobs import TRAIN, Workspace, clean_environment, free_port

PLAIN = ("training.engine=torch", "parallel.zero_stage=0")


@pytest.mark.parametrize("engine", [PLAIN, ("parallel.zero_stage=3",)], ids=["torch", "zero3"])
def test_an_exception_on_one_rank_ends_all_with_its_traceback_first(workspace: Workspace, engine: tuple[str, ...]) -> None:
    """Within seconds; said once, by the rank that failed; code 1 in status.json (B148)."""
    job = workspace.start(*engine, world=2, fault="raise:3:1")
    job.wait_for("failed:")
    began = time.monotonic()
    assert all(job.wait()) and time.monotonic() - began < 20
    assert job.output.count("failed:") == 1 and "rank 1 failed: RuntimeError: a planted fault at step 3" in job.output
    assert job.output.index("Traceback") < job.output.index("a planted fault at step 3\n", job.output.index("Traceback"))
    status = workspace.status("a")
    assert (status["state"], status["code"], status["failed_rank"]) == ("failed", 1, 1)
    assert workspace.run(*engine, world=2)[0] == 0


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_a_rank_that_dies_without_a_word_is_named(workspace: Workspace, how: str) -> None:
    """os._exit or SIGKILL on rank 1: the others say which rank died and leave at once (B148)."""
    job = workspace.start("parallel.tp=2", world=2, fault=f"{how}:3:1")
    codes = job.wait()
    assert all(codes)
    assert "rank 1 died without a word" in job.output and job.output.count("failed:") == 1
    assert workspace.status("a")["code"] == 1


def test_a_hang_is_exit_5_with_the_stacks(workspace: Workspace) -> None:
    """Rank 1 makes no progress while rank 0 waits for it in a collective: both end, and the log says where they stood."""
    job = workspace.start(*PLAIN, "run.hang_timeout_s=4", world=2, fault="hang:3:1")
    assert job.wait() == [5, 5]
    assert "no progress for" in job.output and "in step 3" in job.output and job.output.count("failed:") == 1
    assert workspace.status("a")["code"] == 5
    logs = workspace.path("a") / "attempts/0001/log"
    assert "_strike" in (logs / "rank_00001.log").read_text()
    assert "train_step" in (logs / "rank_00000.log").read_text()


@pytest.mark.parametrize("engine", [PLAIN, ("parallel.zero_stage=2",)], ids=["torch", "zero2"])
def test_a_loss_that_is_not_finite_is_exit_6_and_touches_no_checkpoint(workspace: Workspace, engine: tuple[str, ...]) -> None:
    """The checkpoint of the last sound step stays, and nothing that is not finite is logged."""
    assert workspace.run(*engine, "training.steps=4", world=2)[0] == 0
    code, output = workspace.run(*engine, "optimizer.lr=1e30", "optimizer.max_grad_norm=0", world=2)
    assert code == 6 and output.count("failed:") == 1 and "optimizer.lr" in output, output
    assert workspace.status("a")["code"] == 6
    assert all(math.isfinite(record["loss"]) for record in workspace.metrics("a") if "loss" in record)
    last = workspace.metrics("a")[-1]["step"]
    assert all(int(name[5:13]) <= last for name in workspace.checkpoints("a"))


def test_no_space_for_a_checkpoint_is_said_and_the_older_one_stays(workspace: Workspace) -> None:
    """Exit 4 on all ranks; what was half-written is gone."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000)); import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)"
    program = f"import sys; sys.path.insert(0, ''); {limit}; from launcher.train import main; import os; os._exit(main(sys.argv[1:]))"
    assert workspace.run(*PLAIN, "training.steps=2")[0] == 0
    result = workspace.command("python", "-c", program, "--config", str(workspace.config), *PLAIN)
    assert result.returncode == 4 and "no space left" in result.stderr, result.stderr
    assert workspace.checkpoints("a") == ["step_00000002"]
    assert workspace.run(*PLAIN)[0] == 0


@pytest.mark.parametrize("starter", ["deepspeed", "torchrun", "mlite"])
def test_a_failing_rank_ends_every_launcher(workspace: Workspace, starter: str) -> None:
    """Not zero, and the first error is on the screen, once (B148)."""
    port, run = str(free_port()), (TRAIN, "--config", str(workspace.config), *PLAIN)
    command = {
        "deepspeed": ("deepspeed", "--num_gpus", "2", "--master_port", port, *run),
        "torchrun": ("torchrun", "--nproc_per_node", "2", "--master_port", port, *run),
        "mlite": ("mlite", "train", str(workspace.config), "-n", "2", *PLAIN),
    }[starter]
    output = workspace.folder / "tree.txt"
    with open(output, "wb") as file:
        process = subprocess.Popen(
            command, cwd=workspace.folder, env={**clean_environment(), "MLITE_FAULT": "raise:3:1"}, stdout=file, stderr=subprocess.STDOUT
        )
    assert process.wait(120) != 0
    text = output.read_text()
    assert text.count("rank 1 failed: RuntimeError: a planted fault at step 3") == 1 and "rank 0 failed" not in text, text
    assert workspace.status("a")["code"] == 1


def test_a_refusal_is_seen_under_every_launcher(workspace: Workspace) -> None:
    """A launcher ends all ranks with the first that exits: the sentence must be out before that."""
    for command in (
        ("deepspeed", "--num_gpus", "2", "--master_port", str(free_port()), TRAIN, "--config", str(workspace.config), "traning.steps=3"),
        ("mlite", "train", str(workspace.config), "-n", "2", "traning.steps=3"),
    ):
        result = workspace.command(*command)
        assert result.returncode == 2 and "did you mean training?" in result.stdout + result.stderr


def test_a_failed_start_is_in_status_json(workspace: Workspace, tmp_path: Path) -> None:
    """A requeue that reads the status of the attempt before would start a refused run for ever."""
    assert workspace.run(*PLAIN, "training.steps=2")[0] == 0
    assert workspace.run(*PLAIN, "data.path=nowhere")[0] == 3
    status = json.loads((workspace.path("a") / "status.json").read_text())
    assert (status["state"], status["code"], status["attempt"], status["checkpoint"]) == ("failed", 3, 2, 2)


def test_a_flipped_byte_in_a_shard_is_exit_3_before_it_is_trained_on(workspace: Workspace, dataset: Path, tmp_path: Path) -> None:
    """Named with its file, on whichever rank met it."""
    shutil.copytree(dataset, tmp_path / "data")
    for shard in (tmp_path / "data" / "shards").glob("tiny-*.bin"):
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    code, output = workspace.run(*PLAIN, f"data.path={tmp_path / 'data'}", "training.steps=30", world=2)
    assert code == 3 and "shards/" in output and output.count("failed:") == 1, output
    assert workspace.status("a")["code"] == 3
