"""Decoding with a cache beside `transformers.generate` on the same weights, in turns, and the time a token up to the end of the context, as
JSON: `python -m tests.benchmarks.bench_generate [--write] [--threads N] [--rounds N] [--only NAME] [--flat-only]`. Greedy, fp32, prompts of
equal length; a round is one call of generate on each side, and the answers must be the same tokens. Ratios are theirs over ours: medians over
rounds, of wall and of processor time, and that of the least of each. `flat` is the least processor time a token over the last 64 tokens of the
context, over that of the first 64 after a short prompt; `flat_median` is the median of the ratios of one round each."""

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

from megatron_lite.inference.generate import start_sampling
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


def flatness(folder: Path, config: ModelConfig, *, rounds: int) -> dict[str, Any]:
    """Milliseconds a token, over WINDOW tokens after prompts of growing length, the last window ending where the context does."""
    model, context = opened(folder), config.max_position_embeddings
    lengths = [4, context // 4, context // 2, 3 * context // 4, context - WINDOW]
    times: dict[int, list[float]] = {length: [] for length in lengths}
    for _ in range(rounds):
        for length in lengths:
            ends: list[float] = []
            start_sampling(
                model,
                [list(range(length))],
                max_new_tokens=WINDOW + 1,
                sampling=SamplingOptions(temperature=0),
                on_token=lambda _, __, ends=ends: ends.append(time.process_time()),  # type: ignore[misc]
            ).finish()
            times[length].append((ends[-1] - ends[0]) / (len(ends) - 1) * 1e3)
    least = {length: round(min(found), 2) for length, found in times.items()}
    return {
        "context": context,
        "ms_a_token_after": least,
        "flat": round(min(times[lengths[-1]]) / min(times[4]), 3),
        "flat_median": round(median_ratio(times[lengths[-1]], times[4]), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"into {RESULTS.name}")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--flat-only", action="store_true", help="leave the turns as they were")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--only", choices=MODELS, action="append", help="a model, may be repeated; the others' results stay")
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
    asked = arguments.only or list(MODELS)
    if (arguments.only or arguments.flat_only) and RESULTS.exists():
        before = json.loads(RESULTS.read_text())
        result["beside"] = [row for row in before["beside"] if arguments.flat_only or row["model"] not in asked]
        result["flat"] = {name: row for name, row in before["flat"].items() if name not in asked}
    for name in asked:
        config = MODELS[name]
        with tempfile.TemporaryDirectory() as place:
            folder = export(checkpoint(Path(place) / "checkpoints", trained(config, noise=0.02)), Path(place) / "hf")
            options = {"python": python, "threads": arguments.threads, "rounds": arguments.rounds}
            if not arguments.flat_only:
                rows = beside_transformers(name, folder, config, **options)  # type: ignore[arg-type]
                result["beside"] += [{**row, "parameters": num_parameters(config)} for row in rows]
            result["flat"][name] = flatness(folder, config, rounds=5 if num_parameters(config) > 1e8 else 15)
            print(name, result["flat"][name], flush=True)
    if arguments.write:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
