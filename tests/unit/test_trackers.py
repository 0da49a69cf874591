"""If these fail, a tracker can stop or delay a training run, one run becomes many, or what was measured is shown wrong."""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.config import LoggingConfig, WandbConfig
from launcher.metrics import Metrics
from launcher.trackers import ConsoleTracker, FileTracker, Several, choose_mode, named, open_trackers


class FakeWandb(types.ModuleType):
    """A wandb that records its calls, and fails or waits where it is told to."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.inits: list[dict[str, Any]] = []
        self.logged: list[dict[str, Any]] = []
        self.axes: list[tuple[str, str | None]] = []
        self.finished = 0
        self.fail_init: BaseException | None = None
        self.fail_at = -1
        self.wait_s = 0.0

    def Settings(self, **given: Any) -> dict[str, Any]:
        return given

    def init(self, **given: Any) -> FakeWandb:
        time.sleep(self.wait_s)
        if self.fail_init is not None:
            raise self.fail_init
        self.inits.append(given)
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes.append((name, step_metric))

    def log(self, record: dict[str, Any]) -> None:
        if len(self.logged) == self.fail_at:
            raise OSError("the network is gone")
        self.logged.append(record)

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeWandb]:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    yield fake


def open_one(
    folder: Path, warnings: list[str], environ: dict[str, str] | None = None, *, board: str = "disabled", step: int = 0, **config: Any
) -> Several:
    logging = LoggingConfig.model_validate({"wandb": WandbConfig(**config), "tensorboard": {"mode": board}})
    environ = environ or {"HOME": str(folder)}
    return Several(open_trackers(folder, logging, name="x", config={"a": 1}, step=step, environ=environ, warn=warnings.append))


def test_ten_steps_reach_wandb_on_one_axis(tmp_path: Path, wandb: FakeWandb) -> None:
    """train/ and eval/ names, both over `step` (B152); one init (B150)."""
    warnings: list[str] = []
    tracker = open_one(tmp_path, warnings)
    for step in range(1, 11):
        tracker.log({"step": step, "loss": 1.0})
    tracker.log({"step": 10, "eval/loss": 2.0})
    assert tracker.finish()
    assert len(wandb.inits) == 1 and wandb.inits[0]["mode"] == "offline" and wandb.finished == 1 and not warnings
    assert wandb.logged[0] == {"step": 1, "train/loss": 1.0} and wandb.logged[-1] == {"step": 10, "eval/loss": 2.0}
    assert wandb.axes == [("step", None), ("*", "step")]


def test_every_attempt_is_the_same_wandb_run(tmp_path: Path, wandb: FakeWandb) -> None:
    """B147; another run folder is another run."""
    (tmp_path / "other").mkdir()
    for folder in (tmp_path, tmp_path, tmp_path / "other"):
        open_one(folder, [], {"WANDB_API_KEY": "x"}).finish()
    ids = [init["id"] for init in wandb.inits]
    assert ids[0] == ids[1] != ids[2]
    assert wandb.inits[1]["resume"] == "allow" and wandb.inits[1]["mode"] == "online"


@pytest.mark.parametrize("error", [RuntimeError("timed out"), SystemExit(1), ImportError("no module named wandb")])
def test_a_failing_start_is_one_warning(tmp_path: Path, wandb: FakeWandb, error: BaseException) -> None:
    """B149: records are dropped, nothing is raised, metrics.jsonl is named."""
    wandb.fail_init = error
    warnings: list[str] = []
    tracker = open_one(tmp_path, warnings)
    for step in range(10):
        tracker.log({"step": step, "loss": 1.0})
        time.sleep(0.01)
    assert tracker.finish()
    assert len(warnings) == 1 and "metrics.jsonl" in warnings[0]


def test_a_network_that_goes_away_is_one_warning(tmp_path: Path, wandb: FakeWandb) -> None:
    """B149: at step 5."""
    wandb.fail_at = 5
    warnings: list[str] = []
    tracker = open_one(tmp_path, warnings)
    for step in range(10):
        tracker.log({"step": step, "loss": 1.0})
    assert tracker.finish()
    assert len(warnings) == 1 and "the network is gone" in warnings[0] and len(wandb.logged) == 5


def test_a_slow_start_delays_nothing_and_a_stuck_end_is_left(tmp_path: Path, wandb: FakeWandb) -> None:
    wandb.wait_s = 3.0
    warnings: list[str] = []
    began = time.monotonic()
    tracker = open_one(tmp_path, warnings)
    tracker.log({"step": 1, "loss": 1.0})
    assert time.monotonic() - began < 0.5
    assert not tracker.finish(timeout_s=0.2) and time.monotonic() - began < 1.5
    assert "did not finish" in warnings[0]


def test_disabled_loads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it raises
    warnings: list[str] = []
    tracker = open_one(tmp_path, warnings, mode="disabled")
    tracker.log({"step": 1})
    assert tracker.finish() and tracker.trackers == [] and not list(tmp_path.iterdir())


def test_not_installed_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    warnings: list[str] = []
    tracker = open_one(tmp_path, warnings)
    assert tracker.finish() and len(warnings) == 1


def test_auto(tmp_path: Path) -> None:
    """WANDB_MODE first, then a key from the environment or netrc, else offline."""
    auto, home = WandbConfig(), {"HOME": str(tmp_path)}
    assert choose_mode(auto, home) == "offline"
    assert choose_mode(auto, {**home, "WANDB_API_KEY": "k"}) == "online"
    assert choose_mode(auto, {**home, "WANDB_API_KEY": "k", "WANDB_MODE": "disabled"}) == "disabled"
    assert choose_mode(WandbConfig(mode="offline"), {**home, "WANDB_API_KEY": "k"}) == "offline"
    (tmp_path / ".netrc").write_text("machine wandb.example login user password k\n")
    assert choose_mode(auto, home) == "offline"
    assert choose_mode(auto, {**home, "WANDB_BASE_URL": "https://wandb.example:8080"}) == "online"


def test_names() -> None:
    assert named({"step": 3, "loss": 1.0, "eval/loss": 2.0}) == {"step": 3, "train/loss": 1.0, "eval/loss": 2.0}


def test_console_and_file_say_the_same(tmp_path: Path) -> None:
    """The line that people read has the numbers of metrics.jsonl."""
    said: list[str] = []
    metrics = Metrics(tmp_path / "metrics.jsonl")
    trackers = Several([FileTracker(metrics), ConsoleTracker(said.append, total_steps=100, seconds_left=lambda step: 2.0 * (100 - step))])
    trackers.log({"step": 7, "loss": 2.5, "grad_norm": 0.25, "lr": 1e-3, "tokens_per_second": 1234.5})
    trackers.log({"step": 7, "eval/loss": 2.0, "eval/perplexity": 7.389, "eval/bits_per_byte": 1.5})
    metrics.close()
    assert said == [
        "step   7/100 | loss 2.5000 | grad 0.250 | lr 1.00e-03 | 1,234 tok/s | 3 m 06 s left",
        "step   7/100 | held-out loss 2.0000 | perplexity 7.39 | 1.5000 bits a byte",
    ]
    assert metrics.series("loss") == ([7], [2.5]) and metrics.series("eval/loss") == ([7], [2.0])


def test_one_tracker_that_fails_leaves_the_others(tmp_path: Path, wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch) -> None:
    """B149, for TensorBoard: not installed is one warning, and wandb has every record."""
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    warnings: list[str] = []
    tracker = open_one(tmp_path, warnings, board="enabled")
    for step in range(5):
        tracker.log({"step": step, "loss": 1.0})
    assert tracker.finish() and len(wandb.logged) == 5
    assert len(warnings) == 1 and warnings[0].startswith("tensorboard failed")


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path) -> None:
    """Steps that an attempt logged after the checkpoint that the next goes on from are purged; eval/ stands on the same axis (B152)."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for step, values in ((0, {1: 5.0, 2: 4.0, 3: 99.0}), (2, {3: 3.0, 4: 2.0})):
        warnings: list[str] = []
        tracker = open_one(tmp_path, warnings, board="enabled", mode="disabled", step=step)
        for at, loss in values.items():
            tracker.log({"step": at, "loss": loss, "batch_id": "0123"})
        tracker.log({"step": max(values), "eval/loss": 1.0})
        assert tracker.finish(timeout_s=60.0) and not warnings
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(event.step, event.value) for event in found.Scalars("train/loss")] == [(1, 5.0), (2, 4.0), (3, 3.0), (4, 2.0)]
    assert [event.step for event in found.Scalars("eval/loss")] == [4]
    assert set(found.Tags()["scalars"]) == {"train/loss", "eval/loss"}
