"""Peak memory of real CPU runs beside what `mlite plan` said, over eight configs.

    python -m tests.benchmarks.bench_plan [--only WORDS] [--exact-only] [--json FILE]

Each run is started by `python launcher/train.py` in processes of their own: 3 steps, an evaluation, a checkpoint. Measured is how
far the first rank's resident memory rose above what it was before the model was built (VmHWM - VmRSS, Linux), as the run itself
writes it to events.jsonl. Twice: with MALLOC_MMAP_THRESHOLD_=65536 MALLOC_MMAP_MAX_=1000000, where the C library gives back every
freed tensor, so that resident is what was asked for; and as it comes, where it keeps what is freed, for speed. The band that the
plan promises is of the first.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml

from tests.data_fixtures import tiny_dataset, tiny_texts
from tests.integration.jobs import TRAIN, clean_environment, free_port

BAND = 0.15
EXACT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_MMAP_MAX_": "1000000"}
WIDE = {"vocab_size": 8192, "hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4}
SHAPES: dict[str, dict[str, Any]] = {
    "wide": {**WIDE, "intermediate_size": 1536},
    "deep": {**WIDE, "hidden_size": 256, "num_hidden_layers": 12, "intermediate_size": 768},
    "tied": {**WIDE, "vocab_size": 32768, "hidden_size": 384, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2}
    | {"intermediate_size": 1024, "tie_word_embeddings": True},
    "large": {**WIDE, "hidden_size": 1024, "num_hidden_layers": 4, "intermediate_size": 4096},
}
# name -> (ranks, shape, overrides)
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "torch fp32": (1, "wide", {"training.engine": "torch", "parallel.zero_stage": 0, "training.micro_batch_size": 4}),
    "torch bf16, tied": (1, "tied", {"training.engine": "torch", "parallel.zero_stage": 0, "training.precision": "bf16"}),
    "zero 1 fp32, accumulating": (1, "wide", {"parallel.zero_stage": 1}),
    "zero 1 bf16, selective": (
        1,
        "wide",
        {"training.precision": "bf16", "training.activation_checkpointing": "selective", "training.micro_batch_size": 4},
    ),
    "zero 1 fp32, full": (1, "deep", {"training.activation_checkpointing": "full", "training.micro_batch_size": 4}),
    "zero 1 fp32, tp 2 split": (2, "wide", {"parallel.tp": 2, "parallel.sequence_parallel": True}),
    "zero 2 fp32, dp 2, parameters": (2, "large", {"parallel.zero_stage": 2, "training.sequence_length": 128}),
    "zero 3 bf16, dp 2": (2, "wide", {"parallel.zero_stage": 3, "training.precision": "bf16"}),
}


def config_of(shape: str, overrides: dict[str, Any], dataset: Path) -> dict[str, Any]:
    tree: dict[str, Any] = {
        "run": {"name": "a"},
        "model": {**SHAPES[shape], "max_position_embeddings": 512},
        "data": {"path": str(dataset)},
        "training": {"steps": 3, "sequence_length": 512, "global_batch_size": 4, "micro_batch_size": 2},
        "evaluation": {"max_sequences": 4},
        "logging": {"wandb": {"mode": "disabled"}},
    }
    if overrides.get("training.micro_batch_size") == 4:
        tree["training"]["global_batch_size"] = 4
    for path, value in overrides.items():
        section, key = path.split(".")
        tree.setdefault(section, {})[key] = value
    return tree


def measure(case: str, folder: Path, dataset: Path, environ: dict[str, str]) -> dict[str, Any]:
    """The run's own `memory` event. Raises CalledProcessError where the run fails."""
    ranks, shape, overrides = CASES[case]
    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text(yaml.safe_dump(config_of(shape, overrides, dataset)))
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    started = [
        subprocess.Popen(
            [sys.executable, TRAIN, "run.yaml"],
            cwd=folder,
            env={**clean_environment(), **environ, **(shared if ranks > 1 else {}), "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate(timeout=600)[0] for process in started]
    if any(process.returncode for process in started):
        raise RuntimeError(f"{case}: {outputs[0]}")
    lines = (folder / "runs" / "a" / "events.jsonl").read_text().splitlines()
    event: dict[str, Any] = next(record for record in map(json.loads, lines) if record["event"] == "memory")
    return event


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--exact-only", action="store_true", help="not with the allocator as it comes")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        dataset = Path(temporary) / "data"
        tiny_dataset(dataset, tiny_texts(400, seed=3))
        for number, case in enumerate(name for name in CASES if arguments.only in name):
            exact = measure(case, Path(temporary) / f"{number}-exact", dataset, EXACT)
            row = {"case": case, "planned_bytes": exact["planned_bytes"], "measured_bytes": exact["measured_bytes"]}
            row["plan_over_measured"] = round(row["planned_bytes"] / row["measured_bytes"] - 1, 4)
            if not arguments.exact_only:
                row["measured_as_it_comes_bytes"] = measure(case, Path(temporary) / f"{number}-plain", dataset, {})["measured_bytes"]
            rows.append(row)
            as_it_comes = row.get("measured_as_it_comes_bytes", 0) / 2**20
            print(
                f"{case:<32} planned {row['planned_bytes'] / 2**20:7.0f} MiB, measured {row['measured_bytes'] / 2**20:7.0f} "
                f"({row['plan_over_measured']:+.1%}), as it comes {as_it_comes:7.0f}",
                flush=True,
            )
    worst = max(abs(row["plan_over_measured"]) for row in rows)
    print(f"worst {worst:.1%}, promised {BAND:.0%}")
    if arguments.json is not None:
        record = {
            "rows": rows,
            "worst": worst,
            "band": BAND,
            "settings": EXACT,
            "torch": torch.__version__,
            "machine": f"{platform.machine()} {platform.system()}, {os.cpu_count()} cores",
            "command": "python -m tests.benchmarks.bench_plan",
            "date": time.strftime("%Y-%m-%d"),
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    return int(worst > BAND)


if __name__ == "__main__":
    sys.exit(main())
