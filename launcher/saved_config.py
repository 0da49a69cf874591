"""The config that a run left in its folder. Loads nothing heavy: a wrong path is refused before torch is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_pipeline.errors import ConfigError, Fault
from data_pipeline.schema import apply_override, override_name, validate
from data_pipeline.yaml_text import read_yaml
from launcher.config import RunConfig
from launcher.run_folder import read_json


def run_of(path: Path) -> Path:
    """The run folder that `path` is, or that it is a checkpoint of. Raises ConfigError where it is neither."""
    run = path.parent.parent if (path / "manifest.json").is_file() else path
    if not (run / "config.yaml").is_file():
        fix = "it is printed when a run starts: runs/NAME"
        if (path / "config.json").is_file():
            fix = "a Hugging Face folder is opened in Python: megatron_lite.load(DIR).generate(PROMPT), or .logprobs(TEXT)"
        raise ConfigError([Fault("RUN", str(path), "a run folder, with a config.yaml in it", fix)])
    return run


def read_config(run: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The run's saved config; `data.path=DIR` takes the place of its sources. Data paths that were relative to the folder
    where the run was started are found from anywhere. Raises ConfigError."""
    tree = read_yaml(run / "config.yaml")
    if names_data(overrides):
        tree["data"].update(sources=None, temperature=None, schedule=[])
    _find_data(tree["data"], run)
    for override in overrides:
        apply_override(tree, override)
    config = validate(RunConfig, tree)
    return config.model_copy(update={"run": config.run.model_copy(update={"dir": str(run)})})


def names_data(overrides: Sequence[str]) -> bool:
    """Whether they put other data in the place of the run's."""
    return any(override_name(override) == "data.path" for override in overrides)


def _find_data(data: dict[str, Any], run: Path) -> None:
    attempts = sorted((run / "attempts").glob("[0-9]*"))
    started = read_json(attempts[-1] / "environment.json").get("cwd") if attempts else None
    for place in [data, *(data.get("sources") or [])]:
        path = place.get("path")
        if path and started and not Path(path).exists() and (Path(started) / path).exists():
            place["path"] = str(Path(started) / path)
