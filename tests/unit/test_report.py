"""If these fail, `report.html` shows what was not measured, hides a spike, or can't be written when a run most needs one."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from data_pipeline.errors import ConfigError
from launcher.commands.report import report_run
from launcher.report import write_report
from launcher.report_curves import Axis, Curve, chart, round_step, short, smoothed, thin_out
from launcher.report_facts import read_run
from tests.data_fixtures import tiny_dataset
from tests.paths import ROOT

CONFIG: dict[str, Any] = {
    "run": {"name": "a<b>"},
    "model": {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    "data": {"path": "gone/<data>"},
    "training": {"steps": 8, "sequence_length": 16, "global_batch_size": 2},
}


def step(number: int, **more: Any) -> dict[str, Any]:
    measured = {"loss": 3.0 - 0.1 * number, "grad_norm": 1.0, "lr": 1e-3, "tokens_per_second": 64.0, "step_time_s": 0.5, "data_wait_s": 0.0}
    return {"step": number, "tokens": 32 * number, **measured, "batch_id": "0" * 16, **more}


def lines(*records: dict[str, Any]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Killed once, failed once, then done: steps 5 and 6 were done twice."""
    folder = tmp_path / "run"
    for attempt in (1, 2, 3):
        (folder / "attempts" / f"{attempt:04d}").mkdir(parents=True)
    environment = {"host": "here", "world_size": 2, "starter": "srun", "command": ["a", "b"], "packages": {"torch": "2"}}
    (folder / "attempts/0003/environment.json").write_text(json.dumps(environment))
    (folder / "attempts/0002/failed.json").write_text(json.dumps({"rank": 1, "code": 6, "message": "nan <& more", "time": 60.0}))
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    (folder / "status.json").write_text(
        json.dumps({"state": "done", "code": 0, "attempt": 3, "message": "done: 8 steps", "total_steps": 8})
    )
    (folder / "metrics.jsonl").write_text(
        lines(*map(step, range(1, 9)), {"step": 4, "eval/loss": 2.5, "eval/perplexity": 12.2, "eval/bits_per_byte": 1.5})
    )
    layout = {"world": 2, "dp": 1, "tp": 2, "zero_stage": 1}
    (folder / "events.jsonl").write_text(
        lines(
            {"time": 1.0, "attempt": 1, "event": "started", "step": 0, "layout": layout},
            {"time": 5.0, "attempt": 1, "event": "saved", "step": 4, "seconds": 0.25},
            *({"time": 50.0, "attempt": 2, "event": "superseded", "line": json.dumps(step(number))} for number in (5, 6)),
            {"time": 51.0, "attempt": 2, "event": "started", "step": 4, "layout": layout},
            {"time": 52.0, "attempt": 2, "event": "changed", "key": "optimizer.lr", "old": 1, "new": "<2>"},
            {"time": 61.0, "attempt": 3, "event": "started", "step": 4, "layout": layout},
            {"time": 69.0, "attempt": 3, "event": "memory", "planned_bytes": 3 << 20, "measured_bytes": 4 << 20}
            | {"planned_with_kept_bytes": 9 << 19},
            {"time": 70.0, "attempt": 3, "event": "done", "message": "done: 8 steps"},
        )
    )
    return folder


def test_the_page_has_what_the_folder_says_and_fetches_nothing(run: Path) -> None:
    page = write_report(run).read_text()
    for words in (
        "8 of 8",
        "2.2000",
        "killed",
        "failed with code 6",
        "dp 1 × tp 2, ZeRO 1",
        "2 logged steps, 1.0 s",
        "2 by srun",
        "planned 3.0 MiB, 4.5 MiB with what the allocator keeps; measured 4.0 MiB",
        "optimizer.lr",
    ):
        assert words in page, words
    assert "a&lt;b&gt;" in page and "nan &lt;&amp; more" in page and "&lt;2&gt;" in page and "gone/&lt;data&gt;" in page
    assert not re.search(r"<script|src=|href=|url\(|@import|https?:", page)
    charts = re.findall(r"<svg.*?</svg>", page)
    assert len(charts) == 3 * 6 and all(ElementTree.fromstring(svg) is not None for svg in charts)
    assert write_report(run, run / "again.html").read_text() == page


def test_time_and_tokens_come_from_the_records(run: Path) -> None:
    """0.5 s a step: step 4 stands at 2 s and 128 tokens; a metric that was logged every other step covers both."""
    facts = read_run(run)
    assert facts.clock_s.tolist() == [0.5 * number for number in range(1, 9)]
    assert facts.at([0, 4, 4.5], facts.column("tokens")).tolist() == [0, 128, 144]
    (run / "metrics.jsonl").write_text(lines(step(2), step(4)))
    assert read_run(run).clock_s.tolist() == [1.0, 2.0] and read_run(run).steps_each.tolist() == [2, 2]
    assert [attempt.seconds for attempt in facts.attempts] == [4.0, 9.0, 9.0]


@pytest.mark.parametrize("left", ["events.jsonl", "metrics.jsonl", "status.json", "attempts"])
def test_whatever_is_missing_or_torn_is_left_out(run: Path, left: str) -> None:
    """A killed writer leaves half a line; a run that never began has next to nothing."""
    (run / "metrics.jsonl").write_text(lines(step(1, loss="nan"), step(2, loss="inf", grad_norm=None)) + '{"step": 3, "lo')
    assert "<h1>" in write_report(run).read_text()
    target = run / left
    if target.is_dir():
        for path in sorted(target.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
    else:
        target.write_text("{")
    assert "<h1>" in write_report(run).read_text()


def test_shares_and_epochs_are_those_of_the_samples_drawn(run: Path, tmp_path: Path) -> None:
    """Under a temperature, a schedule and a changed batch size: what the run drew, not what its weights say."""
    paths = []
    for number, count in enumerate((40, 10)):
        paths.append(str(tiny_dataset(tmp_path / f"data{number}", [[number] * 15] * count, num_validation=0).path))
    data = {"sources": [{"path": path} for path in paths], "temperature": 1.0, "schedule": [{"from_step": 5, "weights": [0, 1]}]}
    (run / "config.yaml").write_text(yaml.safe_dump({**CONFIG, "run": {"name": "a"}, "data": data}))
    assert read_run(run).shares() == [0.5, 0.5]  # a run that wrote no mixture down
    phases = [{"from_sample": 0, "weights": [0.8, 0.2], "changes": [{"from_sample": 20, "weights": [0.0, 1.0]}]}]
    with open(run / "events.jsonl", "a") as file:
        file.write(lines({"attempt": 3, "event": "mixture", "step": 4, "phases": phases}))
        file.write(lines({"attempt": 3, "event": "changed", "key": "training.global_batch_size", "old": 5, "new": 2}))
    facts = read_run(run)
    assert facts.num_samples == 4 * 5 + 4 * 2  # 20 samples of which 16 and 4, then 8 of the second alone
    assert facts.shares() == [16 / 28, 12 / 28]
    page = write_report(run).read_text()
    seen, rows = 32 * 8, re.findall(r"<tr>(?:(?!</tr>).)*data[01](?:(?!</tr>).)*</tr>", page)
    for row, share, tokens in zip(rows, facts.shares(), (40 * 16, 10 * 16), strict=True):
        assert f">{share:.1%}<" in row and f">{seen * share / tokens:.2f}<" in row, row
    (run / "metrics.jsonl").unlink()
    assert read_run(run).shares() == [0.8, 0.2]


def test_only_committed_checkpoints_are_listed(run: Path) -> None:
    """What was moved aside, or half written, or half deleted, is no checkpoint of the run."""
    for name in ("step_00000004", "step_00000006.bad", "step_00000008.tmp-2", "step_00000002.deleting"):
        (run / "checkpoints" / name).mkdir(parents=True)
        (run / "checkpoints" / name / "manifest.json").write_text("{}")
    (run / "checkpoints" / "step_00000008").mkdir()
    assert read_run(run).checkpoints() == [("step_00000004", 2)]


def test_a_run_of_another_version_still_has_a_report(run: Path) -> None:
    (run / "config.yaml").write_text(yaml.safe_dump({**CONFIG, "from_the_future": {"x": 1}}))
    assert "from_the_future" in write_report(run).read_text()


def test_the_command_says_where_and_refuses_what_is_no_run(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report_run(run, to=tmp_path / "x.html")
    assert capsys.readouterr().out.strip() == str(tmp_path / "x.html") and (tmp_path / "x.html").stat().st_size > 10_000
    with pytest.raises(ConfigError, match="a run folder"):
        report_run(tmp_path, to=None)


def test_a_report_needs_no_torch() -> None:
    """It is looked at on login nodes, and while a run goes."""
    code = "import sys, launcher.commands.report; sys.exit(bool({'torch', 'deepspeed', 'matplotlib', 'pyarrow'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


def test_no_spike_is_lost_to_thinning() -> None:
    points = np.column_stack([np.arange(10_000.0), np.ones(10_000)])
    points[1234, 1], points[8765, 1] = 9.0, -9.0
    kept = thin_out(points, 100).tolist()
    assert len(kept) <= 202 and [1234.0, 9.0] in kept and [8765.0, -9.0] in kept
    assert kept == sorted(kept) and kept[0] == points[0].tolist() and kept[-1] == points[-1].tolist()
    assert thin_out(points[:200], 100) is not None and len(thin_out(points[:200], 100)) == 200


def test_smoothing_begins_at_the_first_value_and_keeps_a_constant() -> None:
    """Also over the means of buckets, where a long series ends where a short one does."""
    for count in (1, 500, 20_000):
        constant = np.column_stack([np.arange(float(count)), np.full(count, 3.0)])
        assert smoothed(constant)[:, 1] == pytest.approx(np.full(min(count, 800), 3.0))
    assert smoothed(np.array([[0.0, 7.0], [1.0, 1.0]]))[0].tolist() == [0.0, 7.0]
    line = np.column_stack([np.linspace(0, 1, 40_000), np.linspace(0, 1, 40_000)])
    assert smoothed(line)[-1] == pytest.approx(smoothed(line[::50])[-1], abs=2e-3)


def test_ticks_are_round_and_inside() -> None:
    assert [round_step(width) for width in (0.3, 0.2, 1.0, 1.1, 7.0, 30.0)] == pytest.approx([0.5, 0.2, 1.0, 2.0, 10.0, 50.0])
    assert Axis(0.13, 1.02, 0, 1).ticks() == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert [short(value) for value in (0, 1500, 2.5e9, 0.25, 1e-4, -3000)] == ["0", "1.5k", "2.5G", "0.25", "1.0e-04", "-3k"]


def test_charts_of_awkward_values() -> None:
    """One point, one value throughout, nothing finite; a long series lets its start leave the chart and says so."""
    assert "<circle" in chart("t", [Curve("a", [1], [2.0])], x_label="steps")
    assert "<polyline" in chart("t", [Curve("a", [1, 2], [0.0, 0.0])], x_label="steps")
    assert chart("t", [Curve("a", [1, 2], [math.nan, math.inf])], x_label="steps") == ""
    long = Curve("a", range(1000), [10.0] + [1.0 + n % 2 for n in range(999)])
    assert "1 above this, up to 10" in chart("t", [long], x_label="steps", cut=True)
    assert "above this" not in chart("t", [long], x_label="steps")
