"""`make quickstart`: the whole job on the Python standard library's own source, by the commands that a user would type.

Raw text, deduplicated, tokenised and packed; a model trained over tensor-parallel processes with a sharded optimizer; stopped by
a signal half-way and resumed; scored and sampled. Everything lies in the folder `quickstart`.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import tokenize
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.errors import MegatronLiteError
from data_pipeline.loader import Dataset
from data_pipeline.storage import atomic_write
from launcher.commands.train import ENTRY, num_gpus

NAME = "stdlib"
SKIPPED_FOLDERS = {"site-packages", "__pycache__", "test", "tests", "idle_test"}
BIN = Path(sys.executable).parent
ENVIRONMENT = {**os.environ, **({} if num_gpus() else {"DS_ACCELERATOR": "cpu"})}  # else a warning from each of DeepSpeed's processes


@dataclass(frozen=True)
class Scores:
    """What the quickstart shows at its end; all in nats a token."""

    unigram_entropy: float
    before: float
    after: float


def run_quickstart(folder: Path, *, steps: int) -> None:
    """Do it all in `folder`, which is made anew. Raises MegatronLiteError where a step of it fails or learns too little."""
    began = time.monotonic()
    if folder.exists() and any(folder.iterdir()) and not (folder / "raw" / f"{NAME}.jsonl").exists():
        raise MegatronLiteError(f"{folder} holds something else: move it away, or start from another folder")
    shutil.rmtree(folder, ignore_errors=True)
    raw = folder / "raw" / f"{NAME}.jsonl"
    say(f"1. Text: the Python standard library's source, one JSON object a file, into {raw}")
    num_files, num_bytes = write_corpus(Path(sysconfig.get_paths()["stdlib"]), raw)
    say(f"   {num_files} files, {num_bytes / 1e6:.1f} MB", big=False)

    say("2. Configs for it")
    call(["mlite", "init", NAME, "--text", f"raw/{NAME}.jsonl"], folder, quiet=True)
    say("3. Dedup, byte-level BPE, token shards, packing")
    call(["mlite", "data", "build", f"configs/data/{NAME}.yaml"], folder)

    processes = num_gpus() or 2
    tp = 2 if processes % 2 == 0 else 1
    say(f"4. Train on {processes} processes: tensor parallel {tp}, ZeRO-1. Half-way it is told to stop")
    train = [
        *("deepspeed", "-q", "--num_gpus", str(processes), str(ENTRY), "--config", f"configs/run/{NAME}.yaml"),
        *(f"parallel.tp={tp}", "parallel.zero_stage=1", f"training.steps={steps}", "lr_scheduler.warmup_steps=20"),
        *(
            "training.global_batch_size=8",
            "optimizer.lr=3e-3",
            f"evaluation.interval_steps={steps // 2}",
            f"checkpoint.interval_steps={steps // 4}",
        ),
        *("logging.interval_steps=10", "logging.wandb.mode=disabled"),
    ]
    stop_half_way(train, folder, at_step=steps // 2)
    say("5. The same command again: it goes on where it stopped")
    call(train, folder)
    run = folder / "runs" / NAME
    status = json.loads((run / "status.json").read_text())
    if status["state"] != "done":
        raise MegatronLiteError(f"the run ended as {status}")

    say("6. What it writes")
    call(
        ["mlite", "generate", f"runs/{NAME}", "--prompt", "def read(self, path):\n", "--max-tokens", "120", "--temperature", "0.7"], folder
    )

    scores = scores_of(folder / "data" / NAME, run / "metrics.jsonl")
    say("7. How well")
    say(f"   held-out loss   before {scores.before:.3f}   after {scores.after:.3f}   nats a token", big=False)
    say(f"   to compare: {scores.unigram_entropy:.3f} is the best that can be had from token frequencies alone", big=False)
    say(f"   curves          {run / 'loss.png'}", big=False)
    say(f"   everything else {run} and {folder / 'data' / NAME / 'report.html'}", big=False)
    say(f"   took            {time.monotonic() - began:.0f} s", big=False)
    say("Your own text, in the same four commands:")
    for line in (
        "mlite init mine --text PATH",
        "mlite data build configs/data/mine.yaml",
        "mlite train configs/run/mine.yaml",
        "mlite generate runs/mine",
    ):
        say(f"   {line}", big=False)
    if scores.after > scores.unigram_entropy - 1.0:
        raise MegatronLiteError(
            f"the model learnt too little: {scores.after:.3f} is not 1.0 below the unigram entropy of {scores.unigram_entropy:.3f}"
        )


def write_corpus(library: Path, target: Path) -> tuple[int, int]:
    """Every .py file below `library` as {"path", "text"}; files and UTF-8 bytes. A file that is no valid text is left out, and said."""
    num_files = num_bytes = 0
    with atomic_write(target) as file:
        for path in sorted(library.rglob("*.py")):
            name = path.relative_to(library)
            if SKIPPED_FOLDERS.intersection(name.parts):
                continue
            try:
                with tokenize.open(path) as source:  # the encoding that the file itself declares
                    text = source.read()
            except (UnicodeDecodeError, SyntaxError) as error:
                print(f"   left out: {name}: {error}")
                continue
            file.write((json.dumps({"path": str(name), "text": text}) + "\n").encode())
            num_files, num_bytes = num_files + 1, num_bytes + len(text.encode())
    return num_files, num_bytes


def call(command: Sequence[str], folder: Path, *, quiet: bool = False) -> None:
    """Run a command of ours in `folder`, shown as a user would type it."""
    show(command)
    done = subprocess.run(resolved(command), cwd=folder, env=ENVIRONMENT, stdout=subprocess.DEVNULL if quiet else None, check=False)
    if done.returncode:
        raise MegatronLiteError(f"`{shlex.join(command)}` ended with {done.returncode}")


def stop_half_way(command: Sequence[str], folder: Path, *, at_step: int) -> None:
    """Start training, tell it to stop once `at_step` is logged, and wait until it has saved and left."""
    show(command)
    metrics, status = folder / "runs" / NAME / "metrics.jsonl", folder / "runs" / NAME / "status.json"
    process = subprocess.Popen(resolved(command), cwd=folder, env=ENVIRONMENT)
    while process.poll() is None and last_step(metrics) < at_step:
        time.sleep(0.2)
    if process.poll() is None:
        print(f"   > kill -TERM {process.pid}", flush=True)
        process.send_signal(signal.SIGTERM)
    process.wait()
    deadline = time.monotonic() + 120  # the signal ends the deepspeed command at once; the ranks save first
    while (state := json.loads(status.read_text())["state"]) in ("running", "stopping") and time.monotonic() < deadline:
        time.sleep(0.2)
    if state != "stopped":
        raise MegatronLiteError(f"the run was to stop and be saved, but is {state!r}")
    while time.monotonic() < deadline and lock_is_held(folder):
        time.sleep(0.2)


def lock_is_held(folder: Path) -> bool:
    """Whether the job that was stopped is still letting go of the run folder."""
    from launcher.run_folder import RunFolder

    return RunFolder(folder / "runs" / NAME).lock.held_by_somebody()


def last_step(metrics: Path) -> int:
    steps = [record["step"] for record in records(metrics) if "loss" in record]
    return max(steps, default=0)


def records(metrics: Path) -> list[Mapping[str, Any]]:
    if not metrics.exists():
        return []
    return [json.loads(line) for line in metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]


def scores_of(dataset: Path, metrics: Path) -> Scores:
    evaluations = [record["eval/loss"] for record in records(metrics) if "eval/loss" in record]
    return Scores(unigram_entropy(dataset), evaluations[0], evaluations[-1])


def unigram_entropy(dataset: Path) -> float:
    """Of the held-out shards' own token frequencies, in nats: no model that sees no context can do better on them."""
    counts = np.zeros(Dataset.open(dataset).vocab_size, dtype=np.int64)
    for source in Dataset.open(dataset).validation:
        for shard in source.shards:
            counts += np.bincount(shard.tokens(0, shard.num_tokens), minlength=counts.size)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def resolved(command: Sequence[str]) -> list[str]:
    """The command's program from this environment, whatever PATH says."""
    program = BIN / command[0]
    return [sys.executable, str(program), *command[1:]] if program.exists() else list(command)


def show(command: Sequence[str]) -> None:
    shown = ["launcher/train.py" if word == str(ENTRY) else word for word in command]
    print(f"   $ {shlex.join(shown)}", flush=True)


def say(text: str, *, big: bool = True) -> None:
    print(f"\n{text}" if big else text, flush=True)
