"""How fast a whole training step is on CPU, side by side with `transformers` and `litgpt` in plain torch loops.

    python -m tests.benchmarks.bench_speed [--rounds 20] [--only NAME ...] [--threads 2] [--start-rounds 5] [--output FILE]

One process, the same shape, rows, optimizer and fp32 master weights for all; forward, backward, clipping and update are
timed. All programs of a precision stand at once and take turns step by step; a peer's number is its best way to train in that precision
(bf16 weights with fp32 masters, or autocast). `ratio` is the median over the rounds of the peer's time by ours, so that
what disturbs the machine for a while disturbs both; `cpu_ratio` the same of processor time. Peers are installed into
environments of their own. What starting costs beside a bare DeepSpeed script (bench_start.py) is measured after it and printed
with it; `--start-rounds 0` leaves that out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.benchmarks.bench_dedup import cpu_name, version
from tests.benchmarks.bench_start import medians
from tests.benchmarks.peers import PEERS, make_peer
from tests.benchmarks.turns import Runner, median_ratio, take_turns

HERE = Path(__file__).resolve().parent
SHAPE: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 1024,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "sequence_length": 512,
    "batch_size": 8,
    "lr": 3e-4,
    "betas": [0.9, 0.95],
    "eps": 1e-8,
    "weight_decay": 0.1,
    "max_grad_norm": 1.0,
    "seed": 1,
}
KEPT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "2147483647"}  # as launcher/memory.py has it
# name -> (whose, what differs)
PROGRAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "transformers fp32": ("transformers", {"precision": "fp32"}),
    "litgpt fp32": ("litgpt", {"precision": "fp32"}),
    "ours fp32": ("own", {"precision": "fp32", "engine": "torch"}),
    "ours fp32 DeepSpeed": ("own", {"precision": "fp32", "engine": "deepspeed"}),
    "ours fp32 compile": ("own", {"precision": "fp32", "engine": "torch", "compile": True}),
    "transformers bf16": ("transformers", {"precision": "bf16"}),
    "transformers bf16 autocast": ("transformers", {"precision": "autocast"}),
    "litgpt bf16": ("litgpt", {"precision": "bf16"}),
    "litgpt bf16 autocast": ("litgpt", {"precision": "autocast"}),
    "ours bf16": ("own", {"precision": "bf16", "engine": "torch"}),
    "ours bf16 DeepSpeed": ("own", {"precision": "bf16", "engine": "deepspeed"}),
    "ours bf16 compile": ("own", {"precision": "bf16", "engine": "torch", "compile": True}),
    "ours bf16 4 documents a row": ("own", {"precision": "bf16", "engine": "torch", "pieces": 4}),
    "ours fp32 4 documents a row": ("own", {"precision": "fp32", "engine": "torch", "pieces": 4}),
    "transformers fp32 keeping memory": ("transformers", {"precision": "fp32", "environment": KEPT}),
    "transformers bf16 keeping memory": ("transformers", {"precision": "bf16", "environment": KEPT}),
    "transformers fp32 compile": ("transformers", {"precision": "fp32", "compile": True}),
    "transformers bf16 compile": ("transformers", {"precision": "bf16", "compile": True}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--start-rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--peer-venvs", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    runners: list[Runner] = []
    for precision in ("fp32", "bf16"):  # one after the other: all at once would need 20 GB
        runners += (at_once := [start(name, options) for name in options.only if precision in name])
        take_turns(at_once, rounds=options.rounds, warm_up=options.warm_up)
        for runner in at_once:
            runner.close()
    report = {**summary(runners, options), "start_up": medians(options.start_rounds) if options.start_rounds else {}}
    if options.output:
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    show(report)


def start(name: str, options: argparse.Namespace) -> Runner:
    whose, what = PROGRAMS[name][0], dict(PROGRAMS[name][1])
    environment = {"OMP_NUM_THREADS": str(options.threads), **what.pop("environment", {})}
    shape = {**SHAPE, "compile": False, "pieces": 0, **what, "threads": options.threads}
    if whose == "own":
        return Runner(name, [sys.executable, "-m", "tests.benchmarks.own_steps", json.dumps(shape)], environment=environment)
    python = make_peer(whose, options.peer_venvs)
    return Runner(name, [str(python), "-m", "tests.benchmarks.peer_llama", whose, "steps", json.dumps(shape)], environment=environment)


def summary(runners: list[Runner], options: argparse.Namespace) -> dict[str, Any]:
    tokens = SHAPE["batch_size"] * SHAPE["sequence_length"]
    programs = {
        runner.name: {
            "step_s": round(statistics.median(runner.times), 4),
            "tokens_per_second": round(tokens / statistics.median(runner.times)),
            "cpu_s": round(statistics.median(runner.cpu_times), 4),
            "first_loss": round(runner.losses[0], 4),
            "last_loss": round(runner.losses[-1], 4),
            **runner.about,
        }
        for runner in runners
    }
    by_name = {runner.name: runner for runner in runners}
    ratios = {}
    for ours in (runner for runner in runners if runner.name.startswith("ours")):
        precision = "bf16" if "bf16" in ours.name else "fp32"
        against = [runner for runner in runners if precision in runner.name and runner is not ours]
        ratios[ours.name] = {
            peer.name: {
                "ratio": round(median_ratio(peer.times, ours.times), 3),
                "cpu_ratio": round(median_ratio(peer.cpu_times, ours.cpu_times), 3),
            }
            for peer in against
        }
    return {
        "command": "python -m tests.benchmarks.bench_speed " + " ".join(sys.argv[1:]),
        "hardware": {"cpu": cpu_name(), "threads": options.threads},
        "peers": {peer: version(str(make_peer(peer, options.peer_venvs)), peer) for peer in PEERS},
        "shape": SHAPE,
        "rounds": options.rounds,
        "programs": {name: programs[name] for name in by_name},
        "ratios": ratios,
    }


def show(report: dict[str, Any]) -> None:
    for name, row in report["programs"].items():
        print(
            f"{name:32} {row['step_s']:8.3f} s {row['tokens_per_second']:7,} tok/s  cpu {row['cpu_s']:7.3f} s  loss {row['first_loss']} -> {row['last_loss']}"
        )
    for name, ratios in report["ratios"].items():
        print(f"{name}: " + ", ".join(f"{value['ratio']} ({value['cpu_ratio']}) x {peer}" for peer, value in ratios.items()))
    for side, times in report["start_up"].items():
        print(f"to the end of the first step, {side}: {times['process_s']} s (cpu {times['cpu_s']} s)")


if __name__ == "__main__":
    main()
