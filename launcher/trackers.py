"""Where what a run measures goes: its file, the console, wandb, TensorBoard, each behind the same two methods.

The last two run in threads of their own: slow, absent or failing, they never hold training up. A new tracker is a class here
and a line in `open_trackers`.
"""

from __future__ import annotations

import netrc
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import yaml

from launcher.config import LoggingConfig, WandbConfig
from launcher.console import duration
from launcher.metrics import Metrics
from launcher.run_folder import read_json, write_json

INIT_TIMEOUT_S = 60.0  # of wandb's own start; training goes on meanwhile
FINISH_TIMEOUT_S = 20.0  # the most that the end of a run waits for wandb
UNREACHED_TIMEOUT_S = 8.0  # the same online, where the server has not answered by then


class Tracker:
    """Takes records and drops them: the base of all, and the tracker of a run that has none."""

    def log(self, record: Mapping[str, Any]) -> None:
        """A step's record (with `loss`) or an evaluation's (with `eval/loss`), each with its `step`."""

    def finish(self, timeout_s: float = FINISH_TIMEOUT_S) -> bool:
        """Whether everything was handed over in time."""
        return True


class Several(Tracker):
    """One tracker made of several."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self.trackers = list(trackers)

    def log(self, record: Mapping[str, Any]) -> None:
        for tracker in self.trackers:
            tracker.log(record)

    def finish(self, timeout_s: float = FINISH_TIMEOUT_S) -> bool:
        """All within the time, so the slowest should stand last."""
        deadline = time.monotonic() + timeout_s
        finished = [tracker.finish(max(0.1, deadline - time.monotonic())) for tracker in self.trackers]
        return all(finished)


class FileTracker(Tracker):
    """metrics.jsonl, which a resume reads back."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def log(self, record: Mapping[str, Any]) -> None:
        self._metrics.append(record)


class ConsoleTracker(Tracker):
    """A line for people."""

    def __init__(self, say: Callable[[str], None], *, total_steps: int, seconds_left: Callable[[int], float]) -> None:
        self._say, self._total, self._seconds_left = say, total_steps, seconds_left

    def log(self, record: Mapping[str, Any]) -> None:
        head = f"step {record['step']:>{len(str(self._total))}}/{self._total} | "
        if "loss" in record:
            self._say(
                f"{head}loss {record['loss']:.4f} | grad {record['grad_norm']:.3f} | lr {record['lr']:.2e} | "
                f"{record['tokens_per_second']:,.0f} tok/s | {duration(self._seconds_left(record['step']))} left"
            )
        if "eval/loss" in record:
            self._say(
                f"{head}held-out loss {record['eval/loss']:.4f} | perplexity {record['eval/perplexity']:.2f} | "
                f"{record['eval/bits_per_byte']:.4f} bits a byte"
            )


class BackgroundTracker(Tracker):
    """A service, opened and written to by a thread of its own. The first failure is said once; later records are dropped."""

    name = "tracker"

    def __init__(self, folder: Path, *, warn: Callable[[str], None]) -> None:
        self.folder, self._warn = folder, warn
        self._queue: queue.Queue[Mapping[str, Any] | None] = queue.Queue()
        self.started = threading.Event()
        self._thread = threading.Thread(target=self._work, name=self.name, daemon=True)
        self._thread.start()

    def open(self) -> Any:
        """The service's own run."""
        raise NotImplementedError

    def write(self, run: Any, record: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def close(self, run: Any) -> None:
        raise NotImplementedError

    def log(self, record: Mapping[str, Any]) -> None:
        self._queue.put(dict(record))

    def finish(self, timeout_s: float = FINISH_TIMEOUT_S) -> bool:
        self._queue.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._warn(f"{self.name} did not finish within {timeout_s:.0f} s; what it has not sent is in {self.folder / 'metrics.jsonl'}")
        return not self._thread.is_alive()

    def _work(self) -> None:
        try:
            run = self.open()
            self.started.set()
            while (record := self._queue.get()) is not None:
                self.write(run, record)
            self.close(run)
        except BaseException as error:  # also SystemExit, which wandb raises in places
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            self._warn(f"{self.name} failed ({reason}); training goes on, metrics are in {self.folder / 'metrics.jsonl'}")


class WandbTracker(BackgroundTracker):
    """One wandb run, the same one for every attempt of the run folder."""

    name = "wandb"

    def __init__(
        self, folder: Path, wandb_config: WandbConfig, *, mode: str, name: str, config: dict[str, Any], warn: Callable[[str], None]
    ) -> None:
        self._settings: dict[str, Any] = {
            "id": run_id(folder, wandb_config.project),
            "project": wandb_config.project,
            "entity": wandb_config.entity,
            "name": name,
            "mode": mode,
            "config": config,
            "dir": str(folder),
        }
        super().__init__(folder, warn=warn)

    def finish(self, timeout_s: float = FINISH_TIMEOUT_S) -> bool:
        unreached = self._settings["mode"] == "online" and not self.started.is_set()
        return super().finish(min(timeout_s, UNREACHED_TIMEOUT_S) if unreached else timeout_s)

    def open(self) -> Any:
        import wandb

        settings = wandb.Settings(init_timeout=INIT_TIMEOUT_S, console="off", silent=True)
        resume: dict[str, Any] = {"resume": "allow"} if self._settings["mode"] == "online" else {}
        run = wandb.init(settings=settings, **self._settings, **resume)
        run.define_metric("step")
        run.define_metric("*", step_metric="step")  # wandb's own step can't go back, as a resume from an older checkpoint does
        return run

    def write(self, run: Any, record: Mapping[str, Any]) -> None:
        run.log(named(record))

    def close(self, run: Any) -> None:
        run.finish()


class TensorBoardTracker(BackgroundTracker):
    """Event files in tensorboard/ of the run folder. What an attempt before logged after `step` is purged, as in metrics.jsonl."""

    name = "tensorboard"

    def __init__(self, folder: Path, *, config: dict[str, Any], step: int, warn: Callable[[str], None]) -> None:
        self._config, self._step = config, step
        super().__init__(folder, warn=warn)

    def open(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(self.folder / "tensorboard"), purge_step=self._step + 1 if self._step else None)
        lines = yaml.safe_dump(self._config, sort_keys=False).splitlines()
        writer.add_text("config", "\n".join(f"    {line}" for line in lines), self._step)
        return writer

    def write(self, run: Any, record: Mapping[str, Any]) -> None:
        for name, value in named(record).items():
            if name != "step" and isinstance(value, int | float):
                run.add_scalar(name, value, record["step"])

    def close(self, run: Any) -> None:
        run.close()


def named(record: Mapping[str, Any]) -> dict[str, Any]:
    """`loss` becomes `train/loss`; `eval/loss` stays; all stand at `step`."""
    return {key if key == "step" or "/" in key else f"train/{key}": value for key, value in record.items()}


def run_id(folder: Path, project: str) -> str:
    """The wandb id of this run folder: made once, kept in wandb.json."""
    path = folder / "wandb.json"
    known = read_json(path).get("id")
    if isinstance(known, str):
        return known
    new = secrets.token_hex(4)
    write_json(path, {"id": new, "project": project})
    return new


def choose_mode(wandb_config: WandbConfig, environ: Mapping[str, str]) -> str:
    """auto: what WANDB_MODE says, else online where a key is found (WANDB_API_KEY or netrc), else offline."""
    if wandb_config.mode != "auto":
        return wandb_config.mode
    asked = environ.get("WANDB_MODE", "")
    if asked in ("online", "offline", "disabled"):
        return asked
    return "online" if _has_key(environ) else "offline"


def _has_key(environ: Mapping[str, str]) -> bool:
    if environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    file = Path(environ.get("NETRC") or Path(environ.get("HOME", "/")) / ".netrc")
    try:
        return netrc.netrc(str(file)).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def open_trackers(
    folder: Path,
    logging_config: LoggingConfig,
    *,
    name: str,
    config: dict[str, Any],
    step: int,
    environ: Mapping[str, str],
    warn: Callable[[str], None],
) -> list[Tracker]:
    """The services that the config asks for, on the world's first rank only; `step` is the one that this attempt goes on from."""
    opened: list[Tracker] = []
    if logging_config.tensorboard.mode == "enabled":
        opened.append(TensorBoardTracker(folder, config=config, step=step, warn=warn))
    mode = choose_mode(logging_config.wandb, environ)
    if mode != "disabled":
        opened.append(WandbTracker(folder, logging_config.wandb, mode=mode, name=name, config=config, warn=warn))
    return opened
