"""If these fail, a run on a cluster stops before it is done, or is started again for ever."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.integration.jobs import Job
from tests.paths import ROOT
from tests.slurm.site import PRETRAIN, Site

STEPS = ("training.steps=24", "checkpoint.interval_steps=4", "evaluation.interval_steps=12")
ONE = ("training.engine=torch", "parallel.zero_stage=0", "evaluation.max_sequences=0")
SAID = "cluster.setup=[echo set up for $SLURM_JOB_ID]"
TP2_DP2 = ("parallel.tp=2", "parallel.zero_stage=1", "cluster.nodes=1-2")


@pytest.fixture(scope="module")
def alone(make_site: Callable[[str], Site]) -> tuple[Site, Job]:
    """The same run on one process that nobody touches, on its way."""
    site = make_site("alone")
    return site, site.start(*STEPS, "training.engine=torch", "parallel.zero_stage=0")


@dataclass(frozen=True)
class SmallJobs:
    """Three jobs that ran side by side: a site and a job's id each."""

    refused: tuple[Site, str]  # Slurm refuses its requeue, and its time limit comes before it is done
    broken: tuple[Site, str]  # rank 1 raises an exception before the first checkpoint, in every attempt
    cancelled: tuple[Site, str]


@pytest.fixture(scope="module")
def jobs(make_site: Callable[[str], Site]) -> SmallJobs:
    sites = [make_site(name) for name in ("refused", "broken", "cancelled")]
    refused, broken, cancelled = sites
    one, slow = (*STEPS, *ONE), {"MLITE_FAULT": "slow_step:0.4"}
    # on the node that stays up, with an environment that sbatch hands nothing of on: what the job needs of it is in files
    limited = ("cluster.requeue=false", "cluster.time=1", "cluster.sbatch_args=[--nodelist=node1]")
    setup = f"cluster.setup=['export PYTHONPATH={ROOT}', 'if [ ! -e runs/a/status.json ]; then export MLITE_FAULT=slow_step:2.5; fi']"
    ids = [
        refused.submit("bash", PRETRAIN, str(refused.config), *one, *limited, setup, SBATCH_EXPORT="NONE"),
        broken.submit("sbatch", "--ntasks-per-node=2", PRETRAIN, str(broken.config), *one, SAID, MLITE_FAULT="raise:2:1"),
        cancelled.submit("bash", PRETRAIN, str(cancelled.config), *one, "training.steps=1000", **slow),
    ]
    cancelled.wait_for_step("a", 2)
    assert cancelled.command("scancel", ids[2]).returncode == 0
    return SmallJobs(*zip(sites, ids))


def test_a_bad_config_is_refused_at_once_and_fails_once(make_site: Callable[[str], Site]) -> None:
    """On the login node within five seconds, every fault named, nothing queued; given to sbatch all the same, one job fails, once."""
    site = make_site("bad")
    bad = (str(site.config), "parallel.tp=2", "training.global_batch_size=5", "optimizer.lrr=1")
    for command in (("bash", PRETRAIN), ("mlite", "submit")):
        began = time.monotonic()
        result = site.command(*command, *bad, "cluster.nodes=2", "cluster.tasks_per_node=2")
        assert time.monotonic() - began < 5
        assert result.returncode == 2 and "did you mean optimizer.lr?" in result.stderr and "use 4 or 6" in result.stderr
        assert not site.path("a").exists()
    job = site.submit("sbatch", "--nodes=2", "--ntasks-per-node=2", PRETRAIN, *bad)
    facts = site.wait_for_end(job, 60)
    assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("FAILED", "2:0", "0")
    assert "use 4 or 6" in (site.folder / f"slurm-{job}.out").read_text()
    here = shlex.join(["bash", PRETRAIN, *bad])
    result = site.command(
        "bash", "-c", f"cd / && salloc --nodes=2 --ntasks-per-node=2 bash -c {shlex.quote(f'cd {site.folder} && {here}')}"
    )
    assert result.returncode == 2 and "use 4 or 6" in result.stderr  # in the folder where one is, not where salloc was typed


def test_a_cancelled_job_saves_and_stays_cancelled(jobs: SmallJobs) -> None:
    """Requeueing it, as after any other TERM, would bring it back."""
    site, job = jobs.cancelled
    facts = site.wait_for_end(job)
    assert (facts["JobState"], facts["Restarts"]) == ("CANCELLED", "0")
    site.wait_until("the save", lambda: site.status("a")["state"] == "stopped")
    assert site.status("a")["checkpoint"] == site.status("a")["step"] >= 2


def test_two_attempts_without_a_checkpoint_end_the_chain(jobs: SmallJobs) -> None:
    """Started once more, and no more; the traceback of the rank that failed stands at the end of the job's output (B148)."""
    site, job = jobs.broken
    facts = site.wait_for_end(job)
    assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("FAILED", "1:0", "1"), site.outputs()
    text = (site.folder / f"slurm-{job}.out").read_text()
    assert "the first to fail was rank 1" in text[-2000:] and "RuntimeError: a planted fault at step 2" in text[-2000:]
    assert "2 attempts in a row without a checkpoint" in text
    assert text.count(f"set up for {job}") == 2  # the cluster's words, of which this one counts for sbatch's own jobs too


# (command, what the cluster is asked for, whether USR1 goes to the job's own process or to the ranks)
SUBMISSIONS = [
    pytest.param(("bash", PRETRAIN), ("cluster.tasks_per_node=2",), False, id="sbatch"),
    pytest.param(("mlite", "submit"), ("cluster.tasks_per_node=1", "cluster.gpus_per_node=2"), True, id="submitit-one-task-two-gpus"),
]


@pytest.mark.parametrize(("command", "asked", "to_batch"), SUBMISSIONS)
def test_requeued_by_a_signal_and_by_a_crashed_node(
    make_site: Callable[[str], Site], alone: tuple[Site, Job], command: tuple[str, ...], asked: tuple[str, ...], to_batch: bool
) -> None:
    """Two nodes of two ranks, stopped by USR1 and started again; then a node dies, and it goes on with one: the same batches and
    losses as one process that nobody touched (B138, B142, B146, B147)."""
    site = make_site(command[0])
    job = site.submit(*command, str(site.config), *STEPS, *TP2_DP2, *asked, MLITE_FAULT="slow_step:0.25")
    site.wait_for_step("a", 2)
    site.signal_job(job, to_batch=to_batch)
    site.wait_until("a requeue", lambda: site.job(job).get("Restarts") == "1")
    stopped = site.status("a")
    assert (stopped["state"], stopped["code"], stopped["step"]) == ("stopped", 75, stopped.get("checkpoint")), (stopped, site.outputs())
    site.wait_for_step("a", stopped["step"] // 4 * 4 + 6)  # two steps after a checkpoint of the second attempt
    site.cluster.crash("node2")
    try:
        assert site.wait_for_end(job)["JobState"] == "COMPLETED", site.outputs()
    finally:
        site.cluster.start("node2")
    assert site.job(job)["Restarts"] == "2" and site.status("a")["state"] == "done"
    assert [event["layout"]["world"] for event in site.events("a", "started")] == [4, 4, 2]
    require_same_run(site, *alone)
    shown = site.command("mlite", "status", "runs/a").stdout
    assert f'"id": "{job}", "state": "COMPLETED", "restarts": 2' in shown, shown


def require_same_run(site: Site, reference: Site, reference_job: Job) -> None:
    """Every step once, the same batches, losses within 1e-4."""
    assert reference_job.wait() == [0], reference_job.output
    found, expected = site.metrics("a"), reference.metrics("a")
    assert [(line["step"], line.get("batch_id")) for line in found] == [(line["step"], line.get("batch_id")) for line in expected]
    for mine, wanted in zip(found, expected):
        key = "loss" if "loss" in wanted else "eval/loss"
        assert abs(mine[key] - wanted[key]) <= 1e-4, (mine, wanted)


def test_before_its_time_limit_a_job_hands_over_to_the_next_one(jobs: SmallJobs) -> None:
    """Last of all, since a minute is the shortest limit. It saved and ended by itself; where Slurm refuses requeues, the next job,
    queued behind this one with the same options, finishes the run (B146)."""
    site, job = jobs.refused
    facts = site.wait_for_end(job)
    assert (facts["JobState"], facts["TimeLimit"]) == ("COMPLETED", "00:01:00"), site.outputs()
    following = ""
    while (newest := str(site.submission("a")["job"])) != following:  # a third one where the machine is so slow that the second hands over
        following = newest
        assert site.wait_for_end(following)["JobState"] == "COMPLETED", site.outputs()
    assert following != job and site.job(following)["TimeLimit"] == "00:01:00"
    assert site.status("a")["state"] == "done" and len(site.events("a", "started")) >= 2
    assert "the time limit is near" in (site.path("a") / "submissions" / "0001" / f"job-{job}.txt").read_text()
