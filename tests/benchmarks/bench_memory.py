"""How peak memory grows with the corpus: whole builds of a small and a large generated corpus, exact and MinHash dedup on.

    python -m tests.benchmarks.bench_memory [--megabytes 50 500] [--workers 2] [--output FILE]

Memory is the proportional set size (/proc/PID/smaps_rollup) of the build's process and all its workers together, sampled some 30 times a
second: pages that several processes share count once, and so do pages of mapped files. Stages are those that the build itself shows, with
what comes after each until the next begins counted under `after`. The corpus is made of words by a Zipf law, documents of about 2 kB; one
in twenty is an exact duplicate, one in twenty a near one; the tokenizer is trained on some 50 MB of it. results/memory.json keeps the last
run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

HERE = Path(__file__).resolve().parent
NUM_WORDS, FILE_BYTES = 50_000, 25 << 20
EVERY_S = 0.03


def main() -> None:
    parser = argparse.ArgumentParser(description="memory by size of corpus, measured")
    parser.add_argument("--megabytes", type=int, nargs="+", default=[50, 500])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "memory.json")
    parser.add_argument("--build", nargs=2, metavar=("CONFIG", "STAGE_FILE"), help="build once (used by the benchmark itself)")
    options = parser.parse_args()
    if options.build:
        build_once(*options.build)
        return
    runs = {}
    for megabytes in options.megabytes:
        with tempfile.TemporaryDirectory() as folder:
            runs[f"{megabytes} MB"] = measure(Path(folder), megabytes, options.workers)
        print(megabytes, json.dumps(runs[f"{megabytes} MB"], indent=1), flush=True)
    peaks = [run["peak_mb"] for run in runs.values()]
    result = {
        "runs": runs,
        "ratio": round(peaks[-1] / peaks[0], 3),
        "command": f"python -m tests.benchmarks.bench_memory --megabytes {' '.join(map(str, options.megabytes))} --workers {options.workers}",
        "machine": f"{platform.machine()} {platform.system()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "date": datetime.date.today().isoformat(),
    }
    options.output.parent.mkdir(exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"peak {' -> '.join(f'{peak:.0f} MB' for peak in peaks)}: {result['ratio']} times")


def write_corpus(folder: Path, num_bytes: int) -> tuple[int, int]:
    """Files of JSON lines, some 25 MB each; (documents, bytes of text)."""
    random = np.random.default_rng(1)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = np.array(sorted({"".join(random.choice(letters, size=int(random.integers(2, 11)))) for _ in range(NUM_WORDS)}))
    shares = np.cumsum(1.0 / np.arange(5, len(words) + 5))
    recent: list[str] = []
    written = number = place = 0
    while written < num_bytes:
        with open(folder / f"part-{place:04d}.jsonl", "w") as file:
            until = min(written + FILE_BYTES, num_bytes)
            while written < until:
                chosen = np.searchsorted(shares, random.random(size=int(random.lognormal(5.6, 0.7)) + 20) * shares[-1])
                kind = random.random()
                text = " ".join(words[chosen])
                if recent and kind < 0.05:
                    text = recent[int(random.integers(len(recent)))]
                elif recent and kind < 0.10:
                    text = f"{recent[int(random.integers(len(recent)))]} and {words[chosen[0]]} {number}"
                recent = [*recent[-199:], text]
                file.write(json.dumps({"text": text}) + "\n")
                written, number = written + len(text), number + 1
        place += 1
    return number, written


def measure(folder: Path, megabytes: int, workers: int) -> dict[str, Any]:
    raw, stage_file, config = folder / "raw", folder / "stage", folder / "config.json"
    raw.mkdir()
    documents, num_bytes = write_corpus(raw, megabytes * 1_000_000)
    tree = {
        "output": str(folder / "out"),
        "sources": [{"name": "web", "files": str(raw)}],
        "dedup": {"exact": True, "minhash": {}},
        "tokenizer": {"type": "bpe", "vocab_size": 2048, "max_train_bytes": 50_000_000},
        "packing": [{"sequence_length": 1024}],
        "workers": workers,
    }
    config.write_text(json.dumps(tree))
    stage_file.write_text("start")
    began = time.monotonic()
    peaks: dict[str, int] = {}
    stage = "start"
    command = [sys.executable, "-m", "tests.benchmarks.bench_memory", "--build", str(config), str(stage_file)]
    with subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
        try:
            while process.poll() is None:
                used = proportional_bytes(process.pid)
                stage = stage_file.read_text() or stage  # empty for a moment while it is written
                peaks[stage] = max(peaks.get(stage, 0), used)
                time.sleep(EVERY_S)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        sys.exit(f"the build ended with code {process.returncode}")
    return {
        "documents": documents,
        "text_mb": round(num_bytes / 1e6, 1),
        "seconds": round(time.monotonic() - began, 1),
        "peak_mb": round(max(peaks.values()) / 1e6, 1),
        "peak_by_stage_mb": {stage: round(peak / 1e6, 1) for stage, peak in peaks.items()},
    }


def proportional_bytes(pid: int) -> int:
    """PSS of a process and all its descendants."""
    try:
        family = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return 0
    total = 0
    for each in family:
        try:
            lines = Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()
        except OSError:  # it is gone
            continue
        total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    return total


def build_once(config: str, stage_file: str) -> None:
    """In a process of its own: the build, which says in a file what it is at."""
    from data_pipeline.build import build
    from data_pipeline.config import DataConfig
    from data_pipeline.schema import validate
    from tests.build_stages import tell_stages

    tell_stages(stage_file)
    build(validate(DataConfig, json.loads(Path(config).read_text())), quiet=True)


if __name__ == "__main__":
    main()
