"""If this fails, the check that is prepared for a GPU breaks on a machine that is lent by the minute."""

import json
import subprocess
from pathlib import Path

from tests.integration.jobs import clean_environment
from tests.paths import ROOT


def test_dry_run_on_cpu(tmp_path: Path) -> None:
    """Every group goes through, on small models; what needs CUDA is skipped, and said so."""
    groups = ["kernels", "training", "determinism", "launcher", "speed-1b"]  # speed-8b-width is speed-1b with other numbers
    done = subprocess.run(
        [str(ROOT / "tests" / "gpu" / "run.sh"), "--device", "cpu", "--tiny", "--out", str(tmp_path), "--only", *groups],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=560,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "results.json").read_text())["findings"]
    states = {state: [finding["name"] for finding in found if finding["state"] == state] for state in ("ok", "skipped", "measured")}
    assert len(states["ok"]) >= 20 and len(states["measured"]) >= 7
    needs_cuda = (
        "varlen",
        "flex",
        "attention alone, varlen",
        "attention alone, flex",
        "attention alone, causal, CUDNN",
        "forward and backward never wait",
    )
    assert all(name.startswith(needs_cuda) for name in states["skipped"]), states["skipped"]
    assert "# GPU check" in (tmp_path / "summary.md").read_text()


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    """A machine whose driver is missing must not pass for one that was checked."""
    done = subprocess.run(
        [str(ROOT / "tests" / "gpu" / "run.sh"), "--out", str(tmp_path)], env=clean_environment(), capture_output=True, text=True
    )
    assert done.returncode == 2 and "no CUDA device" in done.stderr and not list(tmp_path.iterdir())
