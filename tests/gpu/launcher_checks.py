"""The launcher on the device: a run that goes on where a checkpoint of the other kind of device left off."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from tests.data_fixtures import tiny_dataset, tiny_texts
from tests.gpu.findings import Finding, Recorder, at_most
from tests.paths import ROOT

CONFIG: dict[str, Any] = {
    "model": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "max_position_embeddings": 64,
        "hidden_dropout": 0.1,
    },
    "training": {"steps": 12, "sequence_length": 64, "global_batch_size": 8, "micro_batch_size": 4},
    "optimizer": {"lr": 3e-3, "eps": 1e-6},
    "checkpoint": {"interval_steps": 6},
    "logging": {"interval_steps": 1, "wandb": {"mode": "disabled"}},
}


def run(recorder: Recorder, device: torch.device, *, tiny: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny_dataset(folder / "data", tiny_texts(40, seed=3))
        (folder / "run.yaml").write_text(yaml.safe_dump({**CONFIG, "data": {"path": str(folder / "data")}}))
        alone = partial(train, folder, "alone", "cpu", engine="torch", steps=12)
        recorder.check("a run on the CPU", lambda: Finding("ok", f"loss {alone()[-1]['loss']:.3f} after 12 steps"))
        engine = "torch" if tiny else "deepspeed"
        recorder.check(f"{engine}: 6 steps on the device, then 6 on the CPU", partial(moves, folder, ("device", "cpu"), engine))
        if not tiny:
            recorder.check("torch: 6 steps on the CPU, then 6 on the device", partial(moves, folder, ("cpu", "device"), "torch"))
            recorder.check("bf16, compiled, deterministic, by the deepspeed engine", partial(bf16, folder), needs_s=60)


def moves(folder: Path, places: tuple[str, str], engine: str) -> Finding:
    """The losses, norms and batches of the run that stayed on the CPU."""
    name = f"{engine}-{places[0]}"
    train(folder, name, places[0], engine=engine, steps=6)
    ours, wanted = train(folder, name, places[1], engine=engine, steps=12), metrics(folder, "alone")
    if [line["batch_id"] for line in ours] != [line["batch_id"] for line in wanted]:
        return Finding("FAILED", "other batches")
    loss = max(abs(a["loss"] - b["loss"]) for a, b in zip(ours, wanted, strict=True))
    norm = max(abs(a["grad_norm"] - b["grad_norm"]) / b["grad_norm"] for a, b in zip(ours, wanted, strict=True))
    return at_most({"loss": 1e-4, "grad_norm": 1e-4}, {"loss": loss, "grad_norm": norm})


def bf16(folder: Path) -> Finding:
    """All that a real run on GPUs would switch on, at once; its first losses are those of the run in fp32 to within rounding."""
    options = ("training.precision=bf16", "training.compile=true", "training.deterministic=true")
    ours, wanted = train(folder, "bf16", "device", *options, engine="deepspeed", steps=6), metrics(folder, "alone")
    return at_most({"loss": 0.05}, {"loss": max(abs(a["loss"] - b["loss"]) for a, b in zip(ours, wanted))})


def train(folder: Path, name: str, place: str, *options: str, engine: str, steps: int) -> list[dict[str, Any]]:
    """`launcher/train.py` in a process of its own, seeing the GPU or not; the run's metrics so far."""
    words = [f"run.name={name}", f"training.steps={steps}", f"training.engine={engine}", "lr_scheduler.name=constant", *options]
    words.append(f"parallel.zero_stage={1 if engine == 'deepspeed' else 0}")
    hidden = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"} if place == "cpu" else {}
    done = subprocess.run(
        [sys.executable, str(ROOT / "launcher" / "train.py"), "--config", str(folder / "run.yaml"), *words],
        cwd=folder,
        env={**os.environ, **hidden},
        capture_output=True,
        text=True,
        timeout=240,
    )
    if done.returncode:
        raise RuntimeError(f"train.py ended with {done.returncode}: {(done.stdout + done.stderr)[-1500:]}")
    return metrics(folder, name)


def metrics(folder: Path, name: str) -> list[dict[str, Any]]:
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "loss" in line]
