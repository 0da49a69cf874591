"""If these fail, a job ends where it should go on, loses what it trained to the time limit, or starts its ranks wrongly."""

from __future__ import annotations

import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from data_pipeline.errors import ConfigError, DataError
from data_pipeline.schema import validate
from launcher.commands.status import show_status
from launcher.config import RunConfig
from launcher.run_folder import RunFolder
from launcher.slurm import attempt
from launcher.slurm.allocation import Allocation
from launcher.slurm.attempt import TimeLimit, _config_for, _go_on, run_attempt, srun_command
from launcher.slurm.chain import Attempt, Decision
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
echo "srun port ${MASTER_PORT:-none} rank ${RANK:-none} setup ${FROM_SETUP:-none} $*" >> calls.txt
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
    return begin(sys.executable, "-m", "launcher.slurm.job", "--submission", str(submission.folder))


def begin(*command: str, cwd: Path | None = None, **environ: str) -> subprocess.Popen[str]:
    """A command in a job."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "MASTER_", "MLITE_"))}
    path = f"{Path.cwd() / 'bin'}:{kept['PATH']}"
    return subprocess.Popen(
        command,
        cwd=cwd,
        env={**kept, "PATH": path, "PYTHONPATH": str(ROOT), "SLURM_JOB_ID": "4711", "RANK": "3", **environ},
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
    wait_for("waiting", job)
    job.send_signal(signal.SIGUSR1)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == -9 and "stopped and saved" in output and "scontrol requeue 4711" in calls()


def wait_for(file: str, job: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 30
    while not Path(file).exists():
        assert time.monotonic() < deadline and job.poll() is None
        time.sleep(0.02)


def test_a_signal_while_python_loads_is_kept(submission: Submission, tmp_path: Path) -> None:
    """It neither kills the job nor is lost: the job is requeued, and no rank was started (B142). In the batch script's copy in Slurm's
    spool, with nothing from the environment but what Slurm sets: the interpreter is the submission's."""
    slow = tmp_path / "bin" / "python-that-loads-slowly"
    slow.write_text(f'#!/bin/bash\n[ $1 = -m ] && touch loading && sleep 0.3\nexec {sys.executable} "$@"\n')
    slow.chmod(0o755)
    submission.python.write_text(f"{slow}\n")
    spool = tmp_path / "spool" / "job04711"
    spool.mkdir(parents=True)
    script = shutil.copy(ROOT / "slurm" / "pretrain.sh", spool / "slurm_script")
    folder = str(submission.folder.resolve())
    job = begin("bash", str(script), "--submission", folder, cwd=spool, SLURM_SUBMIT_DIR=str(tmp_path))
    wait_for("loading", job)
    job.send_signal(signal.SIGUSR1)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == -9 and "stopped before the run began" in output, output
    assert "scontrol requeue 4711" in calls() and "srun" not in calls()


def test_in_an_allocation_of_salloc_the_script_trains_here(submission: Submission, tmp_path: Path) -> None:
    """In the folder where one is, not where salloc was typed; what the cluster's setup says comes before the ranks; and no port
    is held on a machine where no rank will be."""
    after(state="done", code=0, message="done")
    (tmp_path / "run.yaml").write_text(submission.config.read_text())
    Path("job.txt").write_text(JOB.format(state="RUNNING").replace("BatchFlag=1", "BatchFlag=0"))
    words = ("run.yaml", "cluster.setup=['export FROM_SETUP=1']", "cluster.srun_args=[--mpi=none]")
    here = {"SLURM_SUBMIT_DIR": "/", "SLURM_JOB_NODELIST": "n[1-2]", "MLITE_PYTHON": sys.executable}
    job = begin("bash", str(ROOT / "slurm" / "pretrain.sh"), *words, **here)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 0, output
    assert "srun port none rank none setup 1 " in calls() and "--export=ALL --mpi=none" in calls()


@pytest.mark.parametrize("end", ["data", "stuck"])
def test_an_end_before_the_ranks_start_is_written_down(
    submission: Submission, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], end: str
) -> None:
    """mlite status must not go on saying that the run was stopped and is to be started again."""
    monkeypatch.setattr(attempt, "StopSignal", lambda already: None)
    monkeypatch.setattr(attempt, "show_job", lambda job_id: {})
    (submission.folder.parent.parent / "status.json").write_text(json.dumps({"state": "stopped", "code": 75, "step": 4, "attempt": 0}))
    environ = {"SLURM_JOB_ID": "4711"}
    if end == "data":
        Path("data").rename("moved")
        with pytest.raises(DataError):
            run_attempt(submission, environ)
    else:
        for restart in (0, 1):
            submission.chain.add(Attempt("4711", restart, None, 1, 1))
        assert (run_attempt(submission, environ).action, submission.chain.attempts()[2:]) == ("end", [])
    show_status(submission.folder.parent.parent)
    shown = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (shown["state"], shown["code"], shown["step"], shown["alive"]) == ("failed", 3 if end == "data" else 1, 4, False)
    assert shown["message"] == shown["job"]["last_start"] and "not started again" in shown["message"]


def test_a_next_job_that_would_not_be_like_this_one_is_not_queued(submission: Submission) -> None:
    submission.note(lost=["TresPerJob=fpga:1"])
    decision = _go_on(Decision("again", 75, "stopped"), submission, Allocation("4711", 0, 1, (1,), None), {"Requeue": "0"})
    assert (decision.action, decision.code) == ("end", 75) and "can't be asked for as this one was (TresPerJob=fpga:1)" in decision.why
    assert not Path("calls.txt").exists()


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
