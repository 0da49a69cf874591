"""If this fails, a run says of its plan what is not so: an allocator's habit is taken for the plan's mistake."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from launcher.config import load_config
from launcher.memory_check import MemoryCheck
from launcher.plan import plan_run
from tests.benchmarks.bench_plan import BAND, CASES, config_of
from tests.paths import ROOT

MIB = 1 << 20
RESULTS = "tests/benchmarks/results/plan.json"


class Told:
    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.lines: list[str] = []

    def event(self, kind: str, **what: Any) -> None:
        self.events.append({"event": kind, **what})

    def say(self, line: str) -> None:
        self.lines.append(line)


@pytest.mark.parametrize(
    ("device", "kept", "said"),
    [("cpu", {"planned_with_kept_bytes": 150 * MIB}, "100.0 MiB, 150.0 MiB with what the allocator keeps; "), ("cuda", {}, "100.0 MiB; ")],
)
def test_resident_memory_is_compared_with_the_allocators_share(
    device: str, kept: dict[str, int], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CPU the C library keeps freed memory; on a GPU what PyTorch allocated is counted, without what it keeps."""
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    plan: Any = SimpleNamespace(memory=SimpleNamespace(peak_bytes=100 * MIB))
    check, told = MemoryCheck(plan, torch.device(device)), Told()
    monkeypatch.setattr(check, "measured_bytes", lambda: 125 * MIB)
    check.report(told)  # type: ignore[arg-type]
    assert told.events == [{"event": "memory", "planned_bytes": 100 * MIB, "measured_bytes": 125 * MIB, "plan_over_measured": -0.2, **kept}]
    assert told.lines == [f"peak memory of a rank: planned {said}measured 125.0 MiB"]


def test_recorded_plans_are_todays(tmp_path: Path) -> None:
    """Eight runs that the docs point to: of a formula that changed since, its distance to what was measured says nothing."""
    record = json.loads((ROOT / RESULTS).read_text())
    assert [row["case"] for row in record["rows"]] == list(CASES) and record["worst"] <= BAND
    for row in record["rows"]:
        ranks, shape, overrides = CASES[row["case"]]
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(config_of(shape, overrides, tmp_path / "no-data")))
        plan = plan_run(load_config(path, world_size=ranks), world=ranks, device_type="cpu")
        assert plan.memory.peak_bytes == row["planned_bytes"], f"{row['case']}: python -m tests.benchmarks.bench_plan --json {RESULTS}"
