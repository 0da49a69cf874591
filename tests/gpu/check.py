"""Parity of every GPU path with the CPU, then speed beside peers.

Each group of checks runs in a process of its own, so that what breaks one device context leaves the others alone, and what
takes too long is ended and keeps what it had found. On a GPU the groups that compare run at once, those that time alone.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
# group -> (module.function of this package, seconds that it may take on an H200)
GROUPS = {
    "kernels": ("kernel_checks.run", 200),
    "training": ("training_checks.run", 200),
    "determinism": ("training_checks.deterministic", 200),
    "launcher": ("launcher_checks.run", 200),
    "speed-1b": ("speed.one_billion", 220),
    "speed-8b-width": ("speed.eight_billion_wide", 180),
}
TIMED = ("speed-1b", "speed-8b-width")
GRACE_S = 15  # a group stops by itself when its time is over, between two checks


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests/gpu/run.sh", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run of the script's own code")
    parser.add_argument("--tiny", action="store_true", help="few checks, small models")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="folder for results.json and summary.md")
    parser.add_argument("--limit-s", type=float, default=570, help="for everything: what has no time left is skipped, and said so")
    parser.add_argument("--only", nargs="+", choices=list(GROUPS), default=list(GROUPS), help="these groups alone")
    parser.add_argument("--group", choices=list(GROUPS), help=argparse.SUPPRESS)
    parser.add_argument("--stop-at", type=float, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.group:
        return run_group(chosen)
    began = time.time()
    if chosen.device == "cuda" and not has_cuda():
        print("tests/gpu/run.sh: this Python's torch sees no CUDA device; --device cpu --tiny tries the script itself", file=sys.stderr)
        return 2
    chosen.out.mkdir(parents=True, exist_ok=True)
    lines = chosen.out / "findings.jsonl"
    lines.unlink(missing_ok=True)
    lines.touch()
    together = [group for group in chosen.only if group not in TIMED and chosen.device == "cuda"]
    for groups in ([together] if together else []) + [[group] for group in chosen.only if group not in together]:
        run_groups(groups, chosen, lines, stop_at=began + chosen.limit_s)
    findings = sorted(map(json.loads, lines.read_text().splitlines()), key=lambda finding: list(GROUPS).index(finding["group"]))
    environment = describe(chosen.device) | {"seconds": round(time.time() - began, 1)}
    (chosen.out / "results.json").write_text(json.dumps({"environment": environment, "findings": findings}, indent=1) + "\n")
    text = summary(environment, findings)
    (chosen.out / "summary.md").write_text(text)
    print("\n" + text)
    return int(any(finding["state"] == "FAILED" for finding in findings))


def run_groups(groups: list[str], chosen: argparse.Namespace, lines: Path, *, stop_at: float) -> None:
    """The groups, each in a child, at the same time; what went wrong with a child itself is a finding too."""
    children: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
    for group in groups:
        ends = min(stop_at, time.time() + GROUPS[group][1])
        if ends - time.time() < GRACE_S:
            note(lines, group, "skipped", f"{max(stop_at - time.time(), 0):.0f} s are left")
            continue
        words = ["--device", chosen.device, "--out", str(chosen.out), "--group", group, "--stop-at", str(ends - GRACE_S)]
        command = [sys.executable, "-m", "tests.gpu.check", *words, *(["--tiny"] if chosen.tiny else [])]
        children[group] = subprocess.Popen(command, cwd=ROOT, start_new_session=True), ends
    for group, (child, ends) in children.items():
        try:
            code = child.wait(timeout=max(ends - time.time(), 0.1))
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)  # with the processes that it had started
            child.wait()
            note(lines, group, "FAILED", f"ended when its {GROUPS[group][1]} s were over")
            continue
        if code:
            note(lines, group, "FAILED", f"the process of this group ended with code {code}")


def run_group(chosen: argparse.Namespace) -> int:
    import torch

    from launcher.distributed import start_device
    from launcher.environment import Environment
    from tests.gpu.findings import Recorder

    if chosen.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    device = start_device(Environment())
    assert device.type == chosen.device, device
    recorder = Recorder(chosen.out / "findings.jsonl", chosen.group, stop_at=chosen.stop_at)
    module, _, function = GROUPS[chosen.group][0].rpartition(".")
    getattr(importlib.import_module(f"tests.gpu.{module}"), function)(recorder, device, tiny=chosen.tiny)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return 0


def note(lines: Path, group: str, state: str, text: str) -> None:
    line = {"group": group, "name": "the group", "state": state, "text": text, "numbers": {}, "seconds": 0.0}
    with lines.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(f"{state:>8}  {group}: {text}", flush=True)


def has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def describe(device: str) -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__, "device": device}
    for name in ("deepspeed", "transformers", "triton"):
        found[name] = version(name)
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {"device": properties.name, "memory_gib": round(properties.total_memory / 2**30, 1), "cuda": torch.version.cuda}
    return found


def version(name: str) -> str:
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as of

    try:
        return of(name)
    except PackageNotFoundError:
        return "none"


def summary(environment: dict[str, Any], findings: list[dict[str, Any]]) -> str:
    """Markdown: what failed first, then the speeds, then the rest."""
    counts = {state: sum(finding["state"] == state for finding in findings) for state in ("ok", "FAILED", "skipped", "measured")}
    parts = ["# GPU check", "", ", ".join(f"{name} {value}" for name, value in environment.items()), ""]
    parts += [", ".join(f"{number} {state}" for state, number in counts.items()), ""]
    measured = [finding for finding in findings if finding["state"] == "measured"]
    tables: dict[str, list[dict[str, Any]]] = {}
    for finding in measured:
        tables.setdefault(finding["group"], []).append(finding)
    for state in ("FAILED", "skipped"):
        parts += [f"- {state}: {each['group']}: {each['name']}: {each['text']}" for each in findings if each["state"] == state]
    for group, rows in tables.items():
        parts += ["", f"## {group}", "", "| what | numbers |", "|---|---|"]
        parts += [f"| {row['name']} | {row['text']} |" for row in rows]
    parts += ["", "## passed", "", "| group | check | distance |", "|---|---|---|"]
    parts += [f"| {each['group']} | {each['name']} | {each['text']} |" for each in findings if each["state"] == "ok"]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main())
