"""`mlite status`: where a run stands."""

from __future__ import annotations

import time
from pathlib import Path

from data_pipeline.errors import ConfigError, Fault
from launcher.metrics import to_line
from launcher.run_folder import RunFolder

LIVE = ("starting", "running", "stopping")


def show_status(run: Path) -> None:
    """status.json as one line of JSON, with `alive`: whether a job holds the folder on this host, or touched it just now."""
    folder = RunFolder(run)
    status = folder.status()
    if not status:
        raise ConfigError([Fault("RUN", str(run), "a run folder, with a status.json in it", "it is printed when a run starts: runs/NAME")])
    age_s = time.time() - status.pop("time", 0.0)
    alive = folder.lock.held_by_somebody() or (status["state"] in LIVE and folder.lock.touched_lately())
    print(to_line({"run": str(run), **status, "alive": alive, "age_s": round(age_s)}), end="")
