"""If these fail, a job ends where it should go on, loses what it trained to the time limit, or starts its ranks wrongly."""

from __future__ import annotations

import datetime
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from data_pipeline.errors import ConfigError
from data_pipeline.schema import validate
from launcher.config import RunConfig
from launcher.run_folder import RunFolder
from launcher.slurm import attempt
from launcher.slurm.allocation import Allocation
from launcher.slurm.attempt import TimeLimit, _config_for, srun_command
from launcher.slurm.cluster import ClusterConfig
from launcher.slurm.submission import Submission, freeze
from tests.data_fixtures import tiny_dataset, tiny_texts
from tests.paths import ROOT

# Slurm's commands, as far as an attempt uses them. `requeue` kills the job's process, as Slurm does; what was called is in calls.txt.
FAKES = {
    "scontrol": """#!/bin/sh
echo "scontrol $*" >> calls.txt
if [ "$1" = show ]; then cat job.txt; exit 0; fi
if [ -e refuse ]; then echo "Requested operation is presently disabled" >&2; exit 1; fi
kill -9 $PPID
""",
    "srun": """#!/bin/sh
echo "srun port $MASTER_PORT rank ${RANK:-none} $*" >> calls.txt
mkdir -p runs/a
trap 'cp after.json runs/a/status.json; exit 75' USR1
[ -e wait ] && touch waiting && while :; do sleep 0.05; done
[ -e after.json ] && cp after.json runs/a/status.json
exit 137
""",
    "sbatch": '#!/bin/sh\necho "sbatch $*" >> calls.txt\necho 4712\n',
}
JOB = "JobId=4711 JobName=mlite-a Requeue=1 Restarts=0 BatchFlag=1 JobState={state} RunTime=00:00:04 TimeLimit=UNLIMITED EndTime=Unknown\n"


@pytest.fixture
def config() -> RunConfig:
    tree = {"run": {"name": "a"}, "data": {"path": "data"}, "training": {"steps": 8, "sequence_length": 32, "global_batch_size": 12}}
    return validate(RunConfig, tree)


@pytest.fixture
def submission(tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> Submission:
    monkeypatch.chdir(tmp_path)
    tiny_dataset(tmp_path / "data", tiny_texts(12))
    (tmp_path / "bin").mkdir()
    for name, text in FAKES.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "job.txt").write_text(JOB.format(state="RUNNING"))
    return freeze(config, ClusterConfig(), by="sbatch", options={"ntasks-per-node": "1", "job-name": "mlite-a"}, sbatch_args=[])


def start(submission: Submission) -> subprocess.Popen[str]:
    """The job's own process, as slurm/pretrain.sh becomes it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "MASTER_"))}
    path = f"{Path.cwd() / 'bin'}:{kept['PATH']}"
    return subprocess.Popen(
        [sys.executable, "-m", "launcher.slurm.job", "--submission", str(submission.folder)],
        env={**kept, "PATH": path, "PYTHONPATH": str(ROOT), "SLURM_JOB_ID": "4711", "RANK": "3"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def after(**status: object) -> None:
    Path("after.json").write_text(json.dumps({"attempt": 1, **status}))


def calls() -> str:
    return Path("calls.txt").read_text()


def test_a_killed_attempt_is_requeued_and_a_second_one_ends_the_chain(submission: Submission) -> None:
    """Nobody was left to write how it ended. The ranks had a port of the job's own, and no other launcher's rank."""
    job = start(submission)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == -9 and "scontrol requeue 4711" in calls(), output
    assert "srun port 1" in calls() or "srun port 2" in calls() or "srun port 3" in calls()
    assert "rank none" in calls() and "--kill-on-bad-exit=1" in calls()
    Path("calls.txt").unlink()
    job = start(submission)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 1 and "2 attempts in a row without a checkpoint" in output and "requeue" not in calls()


def test_a_signal_to_the_job_reaches_the_ranks(submission: Submission) -> None:
    """USR1 to the batch script's process: srun is told, status.json says stopped, the job is requeued (B142)."""
    after(state="stopped", code=75, checkpoint=4)
    Path("wait").touch()
    job = start(submission)
    deadline = time.monotonic() + 30
    while not Path("waiting").exists():
        assert time.monotonic() < deadline and job.poll() is None
        time.sleep(0.05)
    job.send_signal(signal.SIGUSR1)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == -9 and "stopped and saved" in output and "scontrol requeue 4711" in calls()


def test_where_a_requeue_is_refused_the_next_job_is_queued(submission: Submission) -> None:
    after(state="stopped", code=75, checkpoint=4)
    Path("refuse").touch()
    job = start(submission)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 0 and "job 4712 goes on" in output
    assert "--dependency=singleton,afterany:4711" in calls() and "--job-name=mlite-a" in calls()


@pytest.mark.parametrize(
    ("state", "status", "code"), [("RUNNING", {"state": "failed", "code": 6}, 6), ("COMPLETING", {"state": "stopped", "code": 75}, 1)]
)
def test_no_use_or_not_wanted(submission: Submission, state: str, status: dict[str, object], code: int) -> None:
    """Non-finite numbers come again; a job that was cancelled stays so."""
    after(**status)
    Path("job.txt").write_text(JOB.format(state=state))
    job = start(submission)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == code, output
    assert submission.record()["last"] in output  # which mlite status shows, too
    assert "requeue" not in calls() and "sbatch" not in calls()


def test_fewer_nodes_that_can_not_hold_the_layout_are_refused_with_those_that_can(submission: Submission) -> None:
    """dp follows the nodes, accumulation keeps the global batch; a fixed micro batch may forbid it."""
    tree = yaml.safe_load(submission.config.read_text())
    tree["training"]["micro_batch_size"] = 2
    submission.config.write_text(yaml.safe_dump(tree))
    assert _config_for(submission, Allocation("1", 0, 2, (3, 3), None)).training.global_batch_size == 12
    with pytest.raises(ConfigError, match=r"on 4 nodes x 3 ranks(.|\n)*nodes that would do, with 3 ranks each: 1, 2$"):
        _config_for(submission, Allocation("1", 0, 4, (3, 3, 3, 3), None))


def test_ranks_are_started_with_what_the_cluster_asks_for(submission: Submission, config: RunConfig) -> None:
    cluster = ClusterConfig.model_validate({"srun_args": ["--mpi=none"], "container": {"runtime": "pyxis", "image": "i"}})
    words = srun_command(submission, config, cluster, Allocation("1", 0, 2, (4, 4), 6))
    assert words[:5] == ["srun", "--nodes=2", "--ntasks=8", "--ntasks-per-node=4", "--cpus-per-task=6"]
    assert "--mpi=none" in words and "--container-image=i" in words
    assert words[-3:] == [str(ROOT / "launcher" / "train.py"), "--config", str(submission.config)]


def test_a_job_stops_before_its_time_limit_as_long_before_as_a_save_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """32 s before the end with saves of 0.5 s; not where the limit was raised meanwhile."""

    def ends_in(seconds: float) -> dict[str, str]:
        end = datetime.datetime.fromtimestamp(time.time() + seconds).replace(microsecond=0)
        return {"JobState": "RUNNING", "TimeLimit": "01:00:00", "EndTime": end.isoformat()}

    folder = RunFolder(tmp_path)
    (tmp_path / "status.json").write_text(json.dumps({"state": "running", "save_s": 0.5}))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "tokens_per_second": 9, "step_time_s": 0.25}\n')
    monkeypatch.setattr(attempt, "LOOK_EVERY_S", 0.0)
    answers = {"now": ends_in(20)}
    monkeypatch.setattr(attempt, "show_job", lambda job_id: answers["now"])
    assert not TimeLimit("1", ends_in(40), folder).is_near()
    assert TimeLimit("1", ends_in(20), folder).is_near()
    assert TimeLimit("1", {}, folder).is_near()  # Slurm did not answer when the job began
    answers["now"] = ends_in(3000)
    assert not TimeLimit("1", ends_in(20), folder).is_near()
    monkeypatch.setattr(attempt, "LOOK_EVERY_S", 10.0)
    assert not TimeLimit("1", ends_in(20), folder).is_near()  # not at every poll
