"""If these fail, a run on a cluster stops before it is done, or is started again for ever."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.slurm.site import PRETRAIN, Site

TWO_BY_TWO = ("parallel.tp=2", "parallel.zero_stage=1", "cluster.nodes=1-2", "cluster.tasks_per_node=2")
STEPS = ("training.steps=24", "checkpoint.interval_steps=4", "evaluation.interval_steps=12", "lr_scheduler.warmup_steps=2")
ONE = ("training.engine=torch", "parallel.zero_stage=0", "evaluation.max_sequences=0")
PRETRAIN_BASH = ("bash", PRETRAIN)
SUBMIT = ("mlite", "submit")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> list[dict[str, object]]:
    """The same run on one process that nobody interrupted."""
    import yaml

    from tests.integration.conftest import CONFIG
    from tests.integration.jobs import Workspace

    folder = tmp_path_factory.mktemp("one")
    (folder / "run.yaml").write_text(yaml.safe_dump({**CONFIG, "data": {"path": str(dataset)}}))
    workspace = Workspace(folder, folder / "run.yaml")
    code, output = workspace.run(*STEPS, "training.engine=torch", "parallel.zero_stage=0")
    assert code == 0, output
    return workspace.metrics("a")


@pytest.mark.parametrize("command", [PRETRAIN_BASH, SUBMIT], ids=["sbatch", "submitit"])
def test_requeued_by_a_signal_and_by_a_crashed_node(site: Site, command: tuple[str, ...], expected: list[dict[str, object]]) -> None:
    """Two nodes of two ranks, stopped by USR1 and started again; then a node dies, and it goes on with one: the same batches and
    losses as one process that nobody touched (B138, B142, B146, B147)."""
    assert site.cluster is not None
    job = site.submit(*command, str(site.config), *STEPS, *TWO_BY_TWO, MLITE_FAULT="slow_step:0.25")
    site.wait_for_step("a", 2)
    site.signal_job(job)
    site.wait_until("a requeue", lambda: site.job(job).get("Restarts") == "1")
    stopped = site.status("a")
    assert (stopped["state"], stopped["code"], stopped["step"]) == ("stopped", 75, stopped["checkpoint"])
    site.wait_for_step("a", stopped["step"] // 4 * 4 + 6)
    try:
        site.cluster.crash("node2")
        assert site.wait_for_end(job)["JobState"] == "COMPLETED", site.outputs()
    finally:
        site.cluster.start("node2")
    assert site.job(job)["Restarts"] == "2" and site.status("a")["state"] == "done"
    assert [event["layout"]["world"] for event in site.events("a", "started")] == [4, 4, 2]
    found = site.metrics("a")
    assert [line.get("batch_id") for line in found] == [line.get("batch_id") for line in expected]
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    for mine, wanted in zip(found, expected):
        key = "loss" if "loss" in wanted else "eval/loss"
        assert abs(mine[key] - wanted[key]) <= 1e-4, (mine, wanted)  # type: ignore[operator]


def test_a_bad_config_is_refused_at_once_and_fails_once(site: Site) -> None:
    """On the login node within five seconds, every fault named, nothing queued; given to sbatch all the same, one job fails, once."""
    bad = (str(site.config), "parallel.tp=2", "training.global_batch_size=5", "optimizer.lrr=1")
    began = time.monotonic()
    result = site.command("bash", PRETRAIN, *bad, "cluster.nodes=2", "cluster.tasks_per_node=2")
    assert time.monotonic() - began < 5
    assert result.returncode == 2 and "did you mean optimizer.lr?" in result.stderr and "use 4 or 6" in result.stderr
    assert not site.path("a").exists()
    job = site.submit("sbatch", "--nodes=2", "--ntasks-per-node=2", PRETRAIN, *bad)
    facts = site.wait_for_end(job, 30)
    assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("FAILED", "2:0", "0")
    assert "use 4 or 6" in (site.folder / f"slurm-{job}.out").read_text()


def test_where_slurm_refuses_requeues_the_next_job_waits_for_this_one(site: Site) -> None:
    """`--no-requeue` is a site's word: the next job is queued behind this one, and finishes the run."""
    job = site.submit("bash", PRETRAIN, str(site.config), *STEPS, *ONE, "cluster.requeue=false", MLITE_FAULT="slow_step:0.3")
    site.wait_for_step("a", 3)
    site.signal_job(job)
    assert site.wait_for_end(job)["JobState"] == "COMPLETED"
    following = str(int(job) + 1)
    assert site.wait_for_end(following)["JobState"] == "COMPLETED"
    assert site.status("a")["state"] == "done" and site.status("a")["attempt"] == 2


def test_two_attempts_without_a_checkpoint_end_the_chain(make_site: Callable[[str], Site]) -> None:
    """Started once more, and no more; the traceback of the rank that failed stands at the end of the job's output (B148)."""
    site = make_site("stuck")
    job = site.submit("sbatch", "--ntasks=2", "--ntasks-per-node=2", PRETRAIN, str(site.config), *STEPS, *ONE, MLITE_FAULT="raise:2:1")
    facts = site.wait_for_end(job)
    assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("FAILED", "1:0", "1")
    text = (site.folder / f"slurm-{job}.out").read_text()
    assert "the first to fail was rank 1" in text[-2000:] and "RuntimeError: a planted fault at step 2" in text[-2000:]
    assert "2 attempts in a row without a checkpoint" in text
