"""If these fail, a job on a cluster ends before its run is done, or starts what can't succeed again and again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.slurm.chain import Attempt, Chain, decide, lead_s, newest_step, stuck
from megatron_lite.checkpoint.committed import committed


def attempt(checkpoint: int | None, restart: int = 0) -> Attempt:
    return Attempt("7", restart, checkpoint, nodes=2, world=4)


def after(status: dict[str, Any], **more: Any) -> tuple[str, int]:
    known: dict[str, Any] = {"is_new": True, "srun_code": 1, "attempts": [attempt(None)], "checkpoint": 4, "ended_by": "itself"}
    decision = decide(status, **{**known, **more})
    return decision.action, decision.code


def test_a_run_that_is_done_is_not_started_again() -> None:
    """Though srun's own code says otherwise: status.json is the truth."""
    assert after({"state": "done", "code": 0}, srun_code=143) == ("end", 0)


@pytest.mark.parametrize("state", ["stopped", "failed", "starting", "running", "stopping"])
def test_whatever_ended_before_it_was_done_is_started_again(state: str) -> None:
    """Killed while starting or running, too, when nobody was left to write how it ended."""
    code = {"stopped": 75, "failed": 1}.get(state)
    assert after({"state": state, "code": code}) == ("again", 75)
    assert after({"state": "failed", "code": 5}) == ("again", 75)


@pytest.mark.parametrize("code", [2, 3, 4, 6, 7])
def test_what_would_fail_again_is_not_started_again(code: int) -> None:
    assert after({"state": "failed", "code": code}) == ("end", code)
    assert after({"state": "done", "code": 0}, is_new=False, srun_code=code) == ("end", code)  # refused before an attempt was opened


def test_an_old_status_is_not_believed() -> None:
    assert after({"state": "done", "code": 0}, is_new=False, srun_code=143) == ("again", 75)


def test_a_cancelled_job_stays_so_and_slurms_own_requeues_are_left_to_slurm() -> None:
    assert after({"state": "stopped", "code": 75}, ended_by="slurm")[0] == "leave"
    assert after({"state": "done", "code": 0}, ended_by="slurm") == ("end", 0)
    assert after({"state": "running", "code": None}, ended_by="time limit") == ("again", 75)
    assert after({"state": "stopped", "code": 75}, ended_by="") == ("again", 75)  # Slurm did not answer


def test_two_attempts_in_a_row_without_a_new_checkpoint_are_enough() -> None:
    failed = {"state": "failed", "code": 1}
    assert after(failed, attempts=[attempt(None)], checkpoint=None) == ("again", 75)
    assert after(failed, attempts=[attempt(None), attempt(None)], checkpoint=None) == ("end", 1)
    assert after(failed, attempts=[attempt(None), attempt(4)], checkpoint=4) == ("again", 75)  # the first one brought it
    assert after(failed, attempts=[attempt(None), attempt(4), attempt(4)], checkpoint=4) == ("end", 1)
    assert after(failed, attempts=[attempt(4), attempt(4)], checkpoint=8) == ("again", 75)
    assert after({"state": "stopped", "code": 75}, attempts=[attempt(4), attempt(4)], checkpoint=4) == ("end", 1)
    assert not stuck([attempt(4)], 4) and stuck([attempt(0), attempt(0)], 0)


def test_the_chain_outlives_its_jobs(tmp_path: Path) -> None:
    chain = Chain(tmp_path / "attempts.json")
    assert chain.attempts() == []
    chain.add(attempt(None))
    chain.add(attempt(4, restart=1))
    assert Chain(tmp_path / "attempts.json").attempts() == [attempt(None), attempt(4, restart=1)]


def test_only_committed_checkpoints_count(tmp_path: Path) -> None:
    assert newest_step(tmp_path / "none") is None
    others = ("step_00000008.tmp-2", "step_00000012.bad", "step_00000013.bad-2", "step_00000014.deleting", "step_99", "best")
    for name in ("step_00000004", "step_00000006", "step_123456789", *others):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").touch()
    (tmp_path / "step_200000000").mkdir()
    (tmp_path / "step_00000030").touch()
    assert newest_step(tmp_path) == 123456789
    assert [(step, path.name) for step, path in committed(tmp_path).items()] == [
        (4, "step_00000004"),
        (6, "step_00000006"),
        (123456789, "step_123456789"),
    ]
    for path in committed(tmp_path).values():
        (path / "manifest.json").unlink()
    assert newest_step(tmp_path) is None


def test_the_lead_follows_the_measured_time_to_save() -> None:
    """Seconds: three saves, two steps, half a minute; five minutes where nothing was measured; never most of a short job."""
    day = 86400.0
    assert lead_s({}, step_s=0.0, limit_s=day) == 300
    assert lead_s({"save_s": 0.5}, step_s=0.25, limit_s=day) == 32
    assert lead_s({"save_s": 200.0}, step_s=15.0, limit_s=day) == 660
    assert lead_s({"save_s": 200.0}, step_s=15.0, limit_s=600.0) == 200
