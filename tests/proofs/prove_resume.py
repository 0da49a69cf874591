"""Runs that are killed ten times each, by SIGKILL: four or more inside a save, the rest at any moment. Into resume.md."""

from __future__ import annotations

import json
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import deepspeed
import torch
import yaml

from launcher.faults import SAVE_POINTS
from tests.data_fixtures import tiny_dataset, tiny_texts
from tests.integration.conftest import CONFIG
from tests.integration.jobs import KILL, Workspace

STEPS, EVERY, SEED = 60, 3, 11
KILLS_IN_A_SAVE, KILLS_ANYWHERE = 5, 5
LAYOUTS = {
    "tp2, ZeRO-1, fp32": (2, ("parallel.tp=2",)),
    "dp2, ZeRO-3, bf16": (2, ("parallel.zero_stage=3", "training.precision=bf16")),
    "tp2, dp2, sequence parallel, ZeRO-1, fp32": (4, ("parallel.tp=2", "parallel.sequence_parallel=true")),
}


@dataclass(frozen=True)
class Kill:
    """Where a run was killed, and what stood when it went on."""

    where: str
    newest_checkpoint: int | None


def prove(folder: Path) -> bool:
    """Write resume.md; True where every killed run's metrics are those of the run that nothing happened to, bit for bit."""
    began, sections, good = time.time(), [], True
    with tempfile.TemporaryDirectory() as temporary:
        dataset = Path(temporary) / "tiny"
        tiny_dataset(dataset, tiny_texts(40, seed=3))
        for name, (world, overrides) in LAYOUTS.items():
            workspace = _workspace(Path(temporary) / name.replace(", ", "-"), dataset)
            kills, equal, compared = killed_and_whole(workspace, world, overrides)
            good &= equal
            print(f"{name}: {len(kills)} kills, {compared} lines of metrics, {'bit-equal' if equal else 'NOT EQUAL'}", flush=True)
            sections.append(_section(name, kills, equal, compared))
    (folder / "resume.md").write_text(
        "\n".join(
            [
                "# Resume: a killed run is the run that it would have been",
                "",
                f"Written by `make prove`. {STEPS} steps with dropout 0.1, a checkpoint every {EVERY}, held-out loss on the way; real ranks over gloo on",
                "CPU. Each run is killed by SIGKILL ten times: at a named point inside a save on a random rank, or at a random moment. Then its",
                "metrics.jsonl (all keys but times and rates) is compared with an uninterrupted run's.",
                f"torch {torch.__version__}, DeepSpeed {deepspeed.__version__}; {(time.time() - began) / 60:.0f} minutes.",
                *sections,
                "",
            ]
        )
    )
    return good


def killed_and_whole(workspace: Workspace, world: int, overrides: tuple[str, ...]) -> tuple[list[Kill], bool, int]:
    """(the kills, whether the metrics are bit-equal, how many lines of them)."""
    code, output = workspace.run(*overrides, "run.name=whole", world=world, timeout_s=600)
    assert code == 0, output
    draw, kills = random.Random(SEED), []
    plan = [True] * KILLS_IN_A_SAVE + [False] * KILLS_ANYWHERE
    draw.shuffle(plan)
    points = list(SAVE_POINTS) + draw.sample(SAVE_POINTS, KILLS_IN_A_SAVE - len(SAVE_POINTS))
    for in_a_save in plan:
        rank = draw.randrange(world)
        if in_a_save:
            point = points.pop()
            at = 0 if point in ("before_manifest", "before_rename", "before_parent_fsync") else rank  # those are the first rank's
            where = f"inside a save: {point}, rank {at}"
            code, output = workspace.run(
                *overrides, "run.name=killed", world=world, fault=f"{point}:{draw.randint(1, 2)}:{at}", timeout_s=600
            )
            assert code != 0, (where, output)
        else:
            where = f"at a random moment, rank {rank}"
            job = workspace.start(*overrides, "run.name=killed", world=world)
            job.wait_for("attempt", 600)
            _wait_for_step(workspace, _last_step(workspace) + draw.randint(0, EVERY))
            time.sleep(draw.uniform(0, 0.5))
            job.signal(KILL, rank)
            codes = job.wait(600)
            assert any(codes), (where, job.output)
        kills.append(Kill(where, workspace.status("killed").get("checkpoint")))
    code, output = workspace.run(*overrides, "run.name=killed", world=world, timeout_s=600)
    assert code == 0, output
    whole = workspace.metrics("whole")
    return kills, workspace.metrics("killed") == whole, len(whole)


def _last_step(workspace: Workspace) -> int:
    metrics = workspace.path("killed") / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return max((json.loads(line)["step"] for line in lines[:-1]), default=0)  # the last line may be half written


def _wait_for_step(workspace: Workspace, step: int) -> None:
    deadline = time.monotonic() + 300
    while _last_step(workspace) < step:
        assert time.monotonic() < deadline, f"step {step} was not reached"
        time.sleep(0.02)


def _workspace(folder: Path, dataset: Path) -> Workspace:
    folder.mkdir()
    config = folder / "run.yaml"
    training = {**CONFIG["training"], "steps": STEPS}
    tree = {**CONFIG, "training": training, "checkpoint": {"interval_steps": EVERY}, "data": {"path": str(dataset)}}
    config.write_text(yaml.safe_dump(tree))
    return Workspace(folder, config)


def _section(name: str, kills: list[Kill], equal: bool, compared: int) -> str:
    lines = [f"| {number} | {kill.where} | {kill.newest_checkpoint} |" for number, kill in enumerate(kills, start=1)]
    return "\n".join(
        [
            "",
            f"## {name}: {'bit-equal' if equal else 'NOT EQUAL'}",
            "",
            f"{compared} lines of metrics compared.",
            "",
            "| kill | where | last checkpoint that status.json knew |",
            "|---|---|---|",
            *lines,
        ]
    )
