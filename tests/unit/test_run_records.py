"""If these fail, metrics are lost, doubled or not readable, or the status of a run is not its last word."""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path

import pytest

from data_pipeline.errors import ConfigError
from launcher.checkpointing import saved_config
from launcher.console import duration
from launcher.devices import mfu, peak_flops
from launcher.environment import Environment
from launcher.metrics import Events, Metrics, perplexity, to_line
from launcher.plot import draw_losses
from launcher.run_folder import RunFolder, commit_of
from launcher.watchdog import FailureMark, explain


def step(number: int) -> dict[str, object]:
    return {"step": number, "loss": 1.0 / (number + 1)}


def test_rewind_moves_later_lines_once(tmp_path: Path) -> None:
    """Also when it is killed half-way and begun again, and when the last line is torn."""
    events, path = Events(tmp_path / "events.jsonl", attempt=2), tmp_path / "metrics.jsonl"
    whole = "".join(to_line(step(number)) for number in range(1, 6)) + to_line({"step": 4, "eval/loss": 2.0})
    path.write_text(whole + '{"step": 6, "lo')
    for _ in range(2):  # the second: as after a kill between the two files
        metrics = Metrics(path)
        assert metrics.rewind(3, events) == 4
        assert [value["step"] for _, value in metrics.lines() if value] == [1, 2, 3]
        path.write_text(whole + '{"step": 6, "lo')
    events.close()
    moved = [record for _, record in events.lines() if record]
    assert [record["event"] for record in moved] == ["superseded"] * 4 and {record["attempt"] for record in moved} == {2}
    assert [record["line"] for record in moved] == [*whole.splitlines()[3:], '{"step": 6, "lo']


def test_rewind_knows_what_was_evaluated(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    for record in (step(1), step(2), {"step": 2, "eval/loss": 3.0}, step(3)):
        metrics.append(record)
    events = Events(tmp_path / "events.jsonl", attempt=1)
    assert metrics.rewind(2, events) == 1
    events.close()
    assert metrics.evaluated(2) and not metrics.evaluated(1)
    assert metrics.series("eval/loss") == ([2], [3.0])


def test_the_saved_config_is_whole_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that is cut off leaves the one before; a torn or empty file is a fault with what to do, not a traceback or changes that
    nobody made."""
    folder = RunFolder(tmp_path)
    folder.write_config("run: {name: a}\n")
    with monkeypatch.context() as patch:
        patch.setattr("data_pipeline.storage.os.fsync", lambda descriptor: (_ for _ in ()).throw(OSError("killed here")))
        with pytest.raises(OSError, match="killed here"):
            folder.write_config("run: {name: b}\n")
    assert saved_config(folder) == {"run": {"name": "a"}} and len(list(tmp_path.iterdir())) == 2
    for torn in ("run: {name: a", ""):
        folder.config.write_text(torn)
        with pytest.raises(ConfigError, match=r"config\.yaml.*put a copy back"):
            saved_config(folder)


@pytest.mark.parametrize(("loss", "expected"), [(0.0, 1.0), (710.0, math.inf), (1e4, math.inf), (math.inf, math.inf)])
def test_perplexity_of_a_large_loss_is_infinite(loss: float, expected: float) -> None:
    """And no error (B153); the record is still JSON, read back by float()."""
    assert perplexity(loss) == expected
    record = json.loads(to_line({"step": 1, "eval/loss": loss, "eval/perplexity": perplexity(loss)}))
    assert float(record["eval/perplexity"]) == expected and float(record["eval/loss"]) == loss


def test_perplexity_of_nan_is_nan() -> None:
    assert math.isnan(perplexity(math.nan)) and math.isnan(float(json.loads(to_line({"loss": math.nan}))["loss"]))


def test_log_of_perplexity_is_the_loss() -> None:
    """B079."""
    assert math.log(perplexity(9.26)) == pytest.approx(9.26, abs=1e-12)


def test_status_within_an_attempt(tmp_path: Path) -> None:
    """A failure is the last word, `stopping` never follows an end, and the saved step outlives both."""
    folder = RunFolder(tmp_path / "run")
    folder.begin(Environment())
    folder.write_status("running", step=4, checkpoint=4)
    folder.write_status("stopped", code=75)
    folder.write_status("stopping")
    assert folder.status()["state"] == "stopped"
    folder.lock.release()
    folder.begin(Environment())
    assert (folder.attempt, folder.status()["state"], folder.status()["checkpoint"]) == (2, "starting", 4)
    mark = FailureMark(folder, rank=1)
    assert mark.claim(6, "not finite") and not FailureMark(folder, rank=0).claim(1, "lost a connection")
    folder.write_status("running", step=5)
    assert (folder.status()["state"], folder.status()["code"], folder.status()["failed_rank"]) == ("failed", 6, 1)
    folder.lock.release()


def test_a_run_is_in_use_while_a_job_holds_it_here_or_touches_it_elsewhere(tmp_path: Path) -> None:
    """If this fails, a second job is submitted for a run, or a run that died on another host is never let go."""
    folder, other = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    assert not other.in_use()
    folder.begin(Environment())
    assert other.in_use()
    folder.lock.release()
    assert not other.in_use()
    folder.lock.path.write_text('{"host": "elsewhere"}')  # no flock is seen across hosts: the time of the last touch counts
    assert other.in_use()
    os.utime(folder.lock.path, (0, 0))
    assert not other.in_use()
    os.utime(folder.lock.path)
    assert other.in_use()
    folder.write_status("failed", code=1)
    assert not other.in_use()


def test_errors_for_users_have_no_traceback_and_ours_have() -> None:
    from data_pipeline.errors import DataError

    assert explain(DataError("no")) == (3, "no", "")
    try:
        raise ZeroDivisionError("ours")
    except ZeroDivisionError as error:
        code, message, details = explain(error)
    assert code == 1 and message == "ZeroDivisionError: ours" and "Traceback" in details


def test_plot_of_a_run_without_evaluations(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    for number in range(3):
        metrics.append(step(number))
    metrics.close()
    draw_losses(metrics.path, tmp_path / "loss.png", title="x")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir() if "tmp" in path.name] == []


def test_mfu_formula() -> None:
    """1,000 tokens/s of 312 MFLOP each on two devices of 312 TFLOP/s are 0.05 % of the peak."""
    peak = peak_flops("NVIDIA A100-SXM4-80GB", "bf16")
    assert peak == 312e12 and peak_flops("NVIDIA A100-SXM4-80GB", "fp32") is None and peak_flops("cpu", "bf16") is None
    assert mfu(tokens_per_second=1000, flops_per_token=312e6, num_devices=2, peak=peak) == pytest.approx(0.0005)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (59.6, "1 m 00 s"), (125, "2 m 05 s"), (3720, "1 h 02 m"), (3 * 86400 + 4 * 3600, "3 d 04 h")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_commit_of_the_code_is_on_record(tmp_path: Path) -> None:
    """In environment.json of each attempt; code outside of git, or without git, has none, and trains all the same."""

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@y", *words], capture_output=True, text=True
        )
        return done.stdout.strip()

    assert commit_of(tmp_path / "gone") is None
    git("init", "-q")
    (tmp_path / "file").write_text("a")
    git("add", "file")
    git("commit", "-q", "-m", "first")
    git("tag", "-a", "v1", "-m", "a tag")
    assert commit_of(tmp_path) == git("rev-parse", "HEAD") and len(git("rev-parse", "HEAD")) == 40
    (tmp_path / "file").write_text("b")
    assert commit_of(tmp_path) == git("rev-parse", "HEAD") + "-dirty"
