"""What a run folder says, read once for its report. Whatever is missing or torn is left out: a report of a broken run is worth most."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.dataset import Dataset
from data_pipeline.errors import MegatronLiteError
from data_pipeline.manifest import Manifest
from data_pipeline.mixture import Mixture
from data_pipeline.yaml_text import read_yaml
from launcher.config import RunConfig
from launcher.metrics import JsonLines
from launcher.mixture import phases_of_run
from launcher.run_folder import RunFolder, read_json
from launcher.saved_config import read_config
from launcher.step_samples import samples_of_steps
from megatron_lite.checkpoint.committed import committed

Record = dict[str, Any]


@dataclass(frozen=True)
class Attempt:
    """One start of the run."""

    number: int
    environment: Record  # environment.json
    started: Record  # its event; empty where it got no further than its checks
    ended: Record  # the event of its end; empty where it was killed or still runs
    failure: Record  # failed.json
    seconds: float  # from its start to the last thing known of it


@dataclass(frozen=True)
class RunFacts:
    """Everything on disk about a run but its weights."""

    folder: RunFolder
    tree: Record  # config.yaml as it stands
    status: Record
    steps: list[Record]  # training records, in order
    evaluations: list[Record]
    events: list[Record]  # without those that hold moved metrics
    num_moved: int  # steps that were done, lost at a resume, and done again
    moved_s: float
    attempts: list[Attempt]
    _columns: dict[str, np.ndarray] = field(default_factory=dict)

    @cached_property
    def config(self) -> RunConfig | None:
        """None where this version can't read the run's config."""
        try:
            return read_config(self.folder.path)
        except MegatronLiteError:
            return None

    @cached_property
    def clock_s(self) -> np.ndarray:
        """Seconds of training at each of `steps`: sums of step times; saves, evaluations and pauses don't count."""
        return np.cumsum(self.steps_each * np.nan_to_num(self.column("step_time_s")))

    @cached_property
    def steps_each(self) -> np.ndarray:
        """How many steps each training record stands for."""
        return np.maximum(np.diff([0, *self.column("step")]), 1)

    def column(self, key: str) -> np.ndarray:
        """A value of each training record as float64, of each evaluation for a key of those; nan where it has none."""
        if key not in self._columns:
            records = self.evaluations if key.startswith("eval/") else self.steps
            self._columns[key] = np.array([number(record.get(key)) for record in records], dtype=np.float64)
        return self._columns[key]

    @cached_property
    def evaluated_steps(self) -> np.ndarray:
        """The step of each evaluation."""
        return np.array([record["step"] for record in self.evaluations], dtype=np.float64)

    def at(self, steps: Sequence[float] | np.ndarray, what: np.ndarray) -> np.ndarray:
        """`what` (one value a training record) at other steps, by straight lines between; 0 at step 0."""
        return np.interp(steps, [0.0, *self.column("step")], [0.0, *what])

    @cached_property
    def num_samples(self) -> int:
        """Samples that the steps so far consumed."""
        if self.config is None or not self.steps:
            return 0
        return samples_of_steps(self.events, self.config.training.global_batch_size).after(int(self.steps[-1]["step"]))

    def shares(self) -> list[float]:
        """The part of the samples so far that came from each dataset of the mixture; of those to come, where there are none."""
        weights: Sequence[float] = [source.weight for source in self.config.data.mixture] if self.config else []
        phases = phases_of_run(self.folder)
        if phases and len(phases[0].weights) == len(weights):
            served = Mixture(phases).served(self.num_samples).tolist()
            weights = served if any(served) else phases[0].weights
        return [weight / sum(weights) for weight in weights]

    def datasets(self) -> list[tuple[str, float, Manifest | str]]:
        """(path, share, its manifest, or why it can't be read) for each dataset of the mixture."""
        found: list[tuple[str, float, Manifest | str]] = []
        if self.config is None:
            return found
        for source, share in zip(self.config.data.mixture, self.shares()):
            try:
                found.append((source.path, share, Dataset.open(source.path, cache=self.config.data.cache).manifest))
            except MegatronLiteError as error:
                found.append((source.path, share, str(error)))
        return found

    def checkpoints(self) -> list[tuple[str, int]]:
        """(name, bytes) of each committed checkpoint, oldest first."""
        paths = committed(self.folder.checkpoints).values()
        return [(path.name, sum(file.stat().st_size for file in path.iterdir() if file.is_file())) for path in paths]


def number(value: Any) -> float:
    """A value of a metrics record as a float: "inf" and "nan" are written as strings; nan for what is no number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")


def read_run(path: Path) -> RunFacts:
    """Raises ConfigError where there is no config to read."""
    folder = RunFolder(path)
    tree = read_yaml(folder.config)
    records = [value for _, value in JsonLines(folder.metrics).lines() if value is not None and isinstance(value.get("step"), int)]
    everything = [value for _, value in JsonLines(folder.events).lines() if value is not None]
    moved = [record for record in map(_moved, everything) if "loss" in record]
    events = [event for event in everything if event.get("event") != "superseded"]
    numbers = sorted(int(entry.name) for entry in (path / "attempts").glob("*") if entry.name.isdigit())
    return RunFacts(
        folder=folder,
        tree=tree,
        status=folder.status(),
        steps=[record for record in records if "loss" in record],
        evaluations=[record for record in records if "eval/loss" in record],
        events=events,
        num_moved=len(moved),
        moved_s=float(np.nansum([number(record.get("step_time_s")) for record in moved])),
        attempts=[_attempt(path, attempt, events) for attempt in numbers],
    )


def _moved(event: Record) -> Record:
    if event.get("event") != "superseded":
        return {}
    try:
        value = json.loads(event.get("line", ""))
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _attempt(path: Path, attempt: int, events: list[Record]) -> Attempt:
    inside = path / "attempts" / f"{attempt:04d}"
    own = [event for event in events if event.get("attempt") == attempt]
    failure = read_json(inside / "failed.json")
    started = next((event for event in own if event.get("event") == "started"), {})
    times = [float(record["time"]) for record in (*own, failure) if isinstance(record.get("time"), int | float)]
    return Attempt(
        number=attempt,
        environment=read_json(inside / "environment.json"),
        started=started,
        ended=next((event for event in reversed(own) if event.get("event") in ("done", "stopped")), {}),
        failure=failure,
        seconds=max(times) - started["time"] if times and isinstance(started.get("time"), int | float) else 0.0,
    )
