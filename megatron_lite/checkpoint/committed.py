"""Which folders are committed checkpoints, by name and manifest alone. No torch: login nodes and reports ask too."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

_NAME = re.compile(r"step_(\d{8,})")


def step_of(name: str) -> int | None:
    """The step of a checkpoint's folder name; None for any other name, step_N.bad, .tmp-K and .deleting among them."""
    named = _NAME.fullmatch(name)
    return int(named[1]) if named else None


def committed(root: Path) -> dict[int, Path]:
    """Step -> folder of each checkpoint below `root` that was committed, oldest first. None is opened, so one may be damaged."""
    paths = Path(root).iterdir() if Path(root).is_dir() else ()
    found = [(step, path) for path in paths if (step := step_of(path.name)) is not None and (path / "manifest.json").is_file()]
    return dict(sorted(found))


def stored_state(path: Path) -> dict[str, Any] | None:
    """The run state of the checkpoint `path`, or of the newest of the run `path`, as its manifest has it; None where there is none
    yet, or none that can be read: what loads it will say more."""
    folder = [path, *committed(path / "checkpoints").values()][-1]
    try:
        state = json.loads((folder / "manifest.json").read_bytes())["state"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return state if isinstance(state, dict) else None
