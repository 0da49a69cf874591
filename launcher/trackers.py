"""Where metrics go beside the run folder. wandb runs in a thread of its own: slow, absent or failing, it never holds training up."""

from __future__ import annotations

import netrc
import queue
import secrets
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from launcher.config import WandbConfig
from launcher.run_folder import read_json, write_json

INIT_TIMEOUT_S = 60.0  # of wandb's own start; training goes on meanwhile
FINISH_TIMEOUT_S = 20.0  # the most that the end of a run waits for wandb
UNREACHED_TIMEOUT_S = 8.0  # the same online, where the server has not answered by then
Mode = str


class Tracker:
    """Takes records and drops them: the tracker of a run that has none, and of every rank but the first."""

    def log(self, record: Mapping[str, Any]) -> None:
        pass

    def finish(self, timeout_s: float = FINISH_TIMEOUT_S) -> bool:
        """Whether everything was handed over in time."""
        return True


class WandbTracker(Tracker):
    """One wandb run, the same one for every attempt of the run folder. Failures are said once, then records are dropped."""

    def __init__(
        self, folder: Path, wandb_config: WandbConfig, *, mode: Mode, name: str, config: dict[str, Any], warn: Callable[[str], None]
    ) -> None:
        self._settings: dict[str, Any] = {
            "project": wandb_config.project,
            "entity": wandb_config.entity,
            "name": name,
            "mode": mode,
            "config": config,
        }
        self._folder, self._mode, self._warn = folder, mode, warn
        self._id = run_id(folder, wandb_config.project)
        self._queue: queue.Queue[Mapping[str, Any] | None] = queue.Queue()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self._thread.start()

    def log(self, record: Mapping[str, Any]) -> None:
        self._queue.put(dict(record))

    def finish(self, timeout_s: float = FINISH_TIMEOUT_S) -> bool:
        self._queue.put(None)
        if self._mode == "online" and not self._started.is_set():
            timeout_s = min(timeout_s, UNREACHED_TIMEOUT_S)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._warn(f"wandb did not finish within {timeout_s:.0f} s; what it has not sent is in {self._folder / 'metrics.jsonl'}")
        return not self._thread.is_alive()

    def _work(self) -> None:
        try:
            run = self._open()
            self._started.set()
            while (record := self._queue.get()) is not None:
                run.log(named(record))
            run.finish()
        except BaseException as error:  # also SystemExit, which wandb raises in places
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            self._warn(f"wandb failed ({reason}); training goes on, metrics are in {self._folder / 'metrics.jsonl'}")

    def _open(self) -> Any:
        import wandb

        settings = wandb.Settings(init_timeout=INIT_TIMEOUT_S, console="off", silent=True)
        resume: dict[str, Any] = {"resume": "allow"} if self._mode == "online" else {}
        run = wandb.init(id=self._id, dir=str(self._folder), settings=settings, **self._settings, **resume)
        run.define_metric("step")
        run.define_metric("*", step_metric="step")  # wandb's own step can't go back, as a resume from an older checkpoint does
        return run


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


def choose_mode(wandb_config: WandbConfig, environ: Mapping[str, str]) -> Mode:
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


def open_tracker(
    folder: Path, wandb_config: WandbConfig, *, name: str, config: dict[str, Any], environ: Mapping[str, str], warn: Callable[[str], None]
) -> Tracker:
    """The run's tracker, on the world's first rank only."""
    mode = choose_mode(wandb_config, environ)
    if mode == "disabled":
        return Tracker()
    return WandbTracker(folder, wandb_config, mode=mode, name=name, config=config, warn=warn)
