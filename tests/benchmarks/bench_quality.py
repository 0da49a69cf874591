"""How well a small model learns, side by side with `transformers` in a plain torch loop: equal steps, shape and optimizer.

    python -m tests.benchmarks.bench_quality [--text FILE] [--steps 2000] [--seeds 1 2 3] [--output FILE]

The text is taken as bytes, its last tenth held out. Ours is the whole command: `mlite data build`, then
`launcher/train.py` with DeepSpeed ZeRO-1 and default logging, saving at the end; the peer trains on random windows of the
same bytes. Both are scored on the held-out windows of 64 that don't overlap, in nats a byte. `train_s` is the time of the
steps; `process_s` and `cpu_s` are of the whole process, start-up included. Runs alternate. "ours" draws its initial weights
as transformers does; "ours with scaled residual" as our default has it, which four layers don't need.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.benchmarks.bench_dedup import cpu_name, version
from tests.benchmarks.peers import make_peer
from tests.benchmarks.turns import ROOT

HERE = Path(__file__).resolve().parent
TEXT = ROOT.parent / "shared" / "corpora" / "tinyshakespeare" / "input.txt"
SHAPE: dict[str, Any] = {
    "vocab_size": 257,  # the bytes and the end of a document
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 344,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
}
RECIPE: dict[str, Any] = {
    "sequence_length": 64,
    "batch_size": 12,
    "lr": 1e-3,
    "betas": [0.9, 0.99],
    "eps": 1e-8,
    "weight_decay": 0.1,
    "max_grad_norm": 1.0,
    "warmup_steps": 100,
    "min_lr_ratio": 0.1,
    "precision": "fp32",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peer-venvs", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if not options.text.exists():
        print(f"skipped: {options.text.name} is not there; give another text with --text")
        return
    peer = make_peer("transformers", options.peer_venvs)
    found: dict[str, list[dict[str, float]]] = {"ours": [], "transformers": [], "ours with scaled residual": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data_s = build_data(folder, options.text)
        for seed in options.seeds:
            found["ours"].append(run_ours(folder, options, seed))
            found["transformers"].append(run_peer(peer, options, seed))
            found["ours with scaled residual"].append(run_ours(folder, options, seed, scaled_residual=True))
            print(json.dumps({side: runs[-1] for side, runs in found.items()}), flush=True)
    report = {
        "command": "python -m tests.benchmarks.bench_quality " + " ".join(sys.argv[1:]),
        "hardware": {"cpu": cpu_name(), "threads": options.threads},
        "transformers": version(str(peer), "transformers"),
        "shape": SHAPE,
        "recipe": {**RECIPE, "steps": options.steps},
        "build_data_s": round(data_s, 2),
        **{side: {key: round(statistics.mean(run[key] for run in runs), 4) for key in runs[0]} for side, runs in found.items()},
        "runs": found,
    }
    if options.output:
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    for side in found:
        print(side, json.dumps(report[side]))


def build_data(folder: Path, text: Path) -> float:
    """The first nine tenths as one document of bytes; seconds."""
    content = text.read_bytes()
    (folder / "train.txt").write_bytes(content[: len(content) - len(content) // 10])
    (folder / "data.yaml").write_text(
        f"output: {folder}/data\nsources: [{{name: text, files: {folder}/train.txt, format: txt}}]\n"
        "tokenizer: {type: bytes}\nvalidation: {fraction: 0}\npacking: [{sequence_length: 64, method: concat}]\n"
    )
    began = time.perf_counter()
    timed([sys.executable, "-m", "launcher.cli", "data", "build", str(folder / "data.yaml")], threads=1)
    return time.perf_counter() - began


def run_ours(folder: Path, options: argparse.Namespace, seed: int, *, scaled_residual: bool = False) -> dict[str, float]:
    """The command, then the score of what it saved."""
    run = folder / f"run-{seed}{'-scaled' * scaled_residual}"
    init = {"std": 0.02, "scaled_residual": scaled_residual}
    model = {**SHAPE, "max_position_embeddings": RECIPE["sequence_length"], "init": init}
    config = {
        "run": {"name": f"quality-{seed}", "dir": str(run), "seed": seed},
        "model": model,
        "data": {"path": str(folder / "data"), "packing": "concat"},
        "training": {"steps": options.steps, "sequence_length": RECIPE["sequence_length"], "global_batch_size": RECIPE["batch_size"]},
        "optimizer": {key: RECIPE[key] for key in ("lr", "betas", "eps", "weight_decay", "max_grad_norm")},
        "lr_scheduler": {key: RECIPE[key] for key in ("warmup_steps", "min_lr_ratio")},
        "checkpoint": {"interval_steps": None},
        "evaluation": {"max_sequences": 0},
    }
    path = folder / f"{run.name}.yaml"
    path.write_text(json.dumps(config))
    _, times = timed([sys.executable, str(ROOT / "launcher" / "train.py"), "--config", str(path)], threads=options.threads)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    score, _ = timed([sys.executable, "-m", "tests.benchmarks.own_score", str(run), str(options.text)], threads=options.threads)
    return {"loss": score["loss"], "train_s": sum(line["step_time_s"] for line in lines if "step_time_s" in line), **times}


def run_peer(python: Path, options: argparse.Namespace, seed: int) -> dict[str, float]:
    described = {**SHAPE, **RECIPE, "steps": options.steps, "seed": seed, "threads": options.threads, "text": str(options.text)}
    command = [str(python), "-m", "tests.benchmarks.peer_llama", "transformers", "train", json.dumps(described)]
    answer, times = timed(command, threads=options.threads)
    return {"loss": answer["loss"], "train_s": answer["train_s"], **times}


def timed(command: list[str], *, threads: int, timeout_s: float = 1800) -> tuple[dict[str, Any], dict[str, float]]:
    """The JSON object on the command's last line, if it is one, and its times."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT), "WANDB_MODE": "disabled"}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if finished.returncode != 0:
        sys.exit(f"{command} failed:\n{finished.stdout[-2000:]}\n{finished.stderr[-3000:]}")
    last = (finished.stdout.strip().splitlines() or [""])[-1]
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return (json.loads(last) if last.startswith("{") else {}), {"process_s": seconds, "cpu_s": cpu_s}


if __name__ == "__main__":
    main()
