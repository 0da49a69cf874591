"""Decoding with a cache beside `transformers.generate` on the same weights, in turns, and the time a token up to the end of the context, as
JSON: `python -m tests.benchmarks.bench_generate [--write] [--threads N] [--rounds N] [--only NAME]`. Greedy, fp32, prompts of equal
length; a round is one call of generate on each side. Ratios are medians over rounds, theirs over ours, of wall and of processor time, and the ratio of the least of each. The
answers must be the same tokens. `flat` is the time of the last 64 tokens of the context over that of the first 64 after a short prompt, the
least of a few runs of each."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from megatron_lite.inference.generate import generate
from megatron_lite.inference.sampling import SamplingOptions
from megatron_lite.model_config import ModelConfig
from megatron_lite.sizes import num_parameters
from tests.benchmarks.bench_dedup import cpu_name
from tests.benchmarks.bench_export import SHAPES
from tests.benchmarks.own_generate import opened
from tests.benchmarks.peers import make_peer
from tests.benchmarks.turns import Runner, median_ratio, take_turns
from tests.huggingface_cases import checkpoint, export, trained

RESULTS = Path(__file__).parent / "results" / "generate.json"
PEER = Path(__file__).parent / "peer_generate.py"
MODELS = {name: config.model_copy(update={"max_position_embeddings": 1024}) for name, config in SHAPES.items()}
PROMPT, NEW, WINDOW = 32, 48, 64  # tokens


def beside_transformers(name: str, folder: Path, config: ModelConfig, *, python: Path, threads: int, rounds: int) -> list[dict[str, Any]]:
    found = []
    for batch_size in (1, 8):
        asked = {"folder": str(folder), "batch_size": batch_size, "prompt_tokens": PROMPT, "new_tokens": NEW, "threads": threads}
        words = json.dumps({**asked, "vocabulary": config.vocabulary})
        environment = {"OMP_NUM_THREADS": str(threads)}
        ours = Runner("ours", [sys.executable, "-m", "tests.benchmarks.own_generate", words], environment=environment)
        theirs = Runner("transformers", [str(python), str(PEER), words], environment=environment)
        take_turns([ours, theirs], rounds=rounds, warm_up=1)
        for runner in (ours, theirs):
            runner.close()
        tokens = batch_size * NEW
        row = {
            "model": name,
            "batch_size": batch_size,
            "ratio": round(median_ratio(theirs.times, ours.times), 2),
            "ratio_cpu": round(median_ratio(theirs.cpu_times, ours.cpu_times), 2),
            "ratio_least": round(min(theirs.times) / min(ours.times), 2),
            "tokens_per_second": round(tokens / statistics.median(ours.times), 1),
            "transformers_tokens_per_second": round(tokens / statistics.median(theirs.times), 1),
            "same_tokens": ours.losses == theirs.losses,
        }
        found.append(row)
        print(row, {**ours.about, **theirs.about}, flush=True)
    return found


def flatness(folder: Path, config: ModelConfig, *, runs: int) -> dict[str, Any]:
    """Milliseconds a token of the first and the last WINDOW of the context, after a prompt of 4."""
    model, context = opened(folder), config.max_position_embeddings
    windows: list[list[float]] = []
    for _ in range(runs):
        ends: list[float] = []
        generate(
            model,
            [[1, 2, 3, 4]],
            max_new_tokens=context,
            sampling=SamplingOptions(temperature=0),
            on_token=lambda _, __, ends=ends: ends.append(time.process_time()),  # type: ignore[misc]
        )
        windows.append([(ends[last] - ends[last - WINDOW]) / WINDOW * 1e3 for last in range(WINDOW, len(ends), WINDOW)])
    least = [min(times) for times in zip(*windows)]
    return {
        "context": context,
        "first_ms": round(least[0], 2),
        "last_ms": round(least[-1], 2),
        "flat": round(least[-1] / least[0], 3),
        "windows_ms": [round(ms, 2) for ms in least],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"into {RESULTS.name}")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--only", choices=MODELS, action="append", help="a model; may be repeated")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    python = make_peer("transformers", Path(tempfile.gettempdir()))
    result: dict[str, Any] = {
        "hardware": {"cpu": cpu_name(), "cores": os.cpu_count()},
        "torch": torch.__version__,
        "threads": arguments.threads,
        "beside": [],
    }
    result |= {"command": "python -m tests.benchmarks.bench_generate --write", "prompt_tokens": PROMPT, "new_tokens": NEW, "flat": {}}
    for name, config in MODELS.items():
        if arguments.only and name not in arguments.only:
            continue
        with tempfile.TemporaryDirectory() as place:
            folder = export(checkpoint(Path(place) / "checkpoints", trained(config, noise=0.02)), Path(place) / "hf")
            options = {"python": python, "threads": arguments.threads, "rounds": arguments.rounds}
            rows = beside_transformers(name, folder, config, **options)  # type: ignore[arg-type]
            result["beside"] += [{**row, "parameters": num_parameters(config)} for row in rows]
            result["flat"][name] = flatness(folder, config, runs=2 if num_parameters(config) > 1e8 else 5)
            print(name, {key: value for key, value in result["flat"][name].items() if key != "windows_ms"}, flush=True)
    if arguments.write:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
