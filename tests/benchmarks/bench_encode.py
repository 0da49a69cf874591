"""How fast documents become shards, beside `tokenizers` called bare with the same threads, and with two workers beside one.

    python -m tests.benchmarks.bench_encode [--rounds 5] [--output FILE]

Ours is the whole stage: documents read and verified, encoded, checked, written to shards with checksums, synced, hashed. Theirs is
`encode_batch` of the same texts in memory, 1 MB at a time, its result thrown away. The programs take turns, one whole corpus each; medians of
the ratios of one round count. Text: Python's standard library, in 16 shards. results/encode.json keeps the last run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np

from tests.benchmarks.turns import Runner, median_ratio, serve, take_turns

HERE = Path(__file__).resolve().parent
BATCH_BYTES = 1 << 20
MODES = {"ours, 1 worker": 1, "bare, 1 thread": 1, "ours, 2 workers": 2, "bare, 2 threads": 2}


def main() -> None:
    parser = argparse.ArgumentParser(description="encoding, measured")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--every", type=int, default=1, help="take every so many-th file of the standard library")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "encode.json")
    parser.add_argument("--child", nargs=2, metavar=("MODE", "FOLDER"), help="one of the programs (used by the benchmark itself)")
    options = parser.parse_args()
    if options.child:
        mode, folder = options.child[0], Path(options.child[1])
        serve(ours(folder, MODES[mode]) if mode.startswith("ours") else bare(folder), {})
        return
    with tempfile.TemporaryDirectory() as temporary:
        megabytes = prepare(Path(temporary), every=options.every)
        runners = [
            Runner(
                mode,
                [sys.executable, "-m", "tests.benchmarks.bench_encode", "--child", mode, temporary],
                environment={"RAYON_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "true" if threads > 1 else "false"},
            )
            for mode, threads in MODES.items()
            if threads in options.threads or mode == "ours, 1 worker"
        ]
        take_turns(runners, rounds=options.rounds, warm_up=1)
        for runner in runners:
            runner.close()
    times = {runner.name: runner.times for runner in runners}
    cpu_times = {runner.name: runner.cpu_times for runner in runners}
    ratios = {}
    if 1 in options.threads:
        ratios["ours_of_bare_1"] = round(median_ratio(times["bare, 1 thread"], times["ours, 1 worker"]), 3)
        ratios["ours_of_bare_1_by_processor_time"] = round(median_ratio(cpu_times["bare, 1 thread"], cpu_times["ours, 1 worker"]), 3)
    if 2 in options.threads:
        ratios["ours_of_bare_2"] = round(median_ratio(times["bare, 2 threads"], times["ours, 2 workers"]), 3)
        ratios["two_workers_of_one"] = round(median_ratio(times["ours, 1 worker"], times["ours, 2 workers"]), 3)
    result = {
        "megabytes": round(megabytes, 2),
        "mb_s": {name: round(megabytes / statistics.median(each), 2) for name, each in times.items()},
        **ratios,
        "load_average": os.getloadavg()[0],
        "command": f"python -m tests.benchmarks.bench_encode --rounds {options.rounds} --every {options.every}",
        "machine": f"{platform.machine()} {platform.system()}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("tokenizers", "numpy")},
        "date": datetime.date.today().isoformat(),
    }
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def prepare(folder: Path, *, every: int) -> float:
    """A built dataset of the corpus, with its work folder; megabytes of text."""
    from data_pipeline.build import build
    from data_pipeline.config import DataConfig
    from data_pipeline.schema import validate

    texts = [path.read_text(errors="replace") for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*/*.py"))[::every]]
    (folder / "raw.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tree = {
        "output": str(folder / "out"),
        "sources": [{"name": "stdlib", "files": str(folder / "raw.jsonl")}],
        "dedup": {"minhash": None},
        "validation": {"fraction": 0.0},
        "tokenizer": {"vocab_size": 4096},
        "workers": 1,
    }
    dataset = build(validate(DataConfig, tree), quiet=True)
    return sum(source.text_bytes for source in [*dataset.sources, *dataset.validation]) / 1e6


def ours(folder: Path, workers: int) -> Callable[[], float]:
    """One step encodes all documents, by the stage of the build."""
    from data_pipeline import sharding
    from data_pipeline.dataset import Dataset
    from data_pipeline.pool import Workers
    from data_pipeline.sharding import make_shard, plan_shards
    from data_pipeline.store import DocumentStore, Part

    sharding.MIN_SHARD_BYTES = 1 << 16  # a larger corpus has 16 shards by itself
    store = DocumentStore([("stdlib", Part(path)) for path in sorted((folder / "out.work" / "documents").glob("*.documents"))])
    (tokenizer,) = (folder / "out.work" / "tokenizer").glob("*.json")
    jobs = plan_shards(
        store,
        np.ones(store.num_documents, dtype=bool),
        np.zeros(store.num_documents, dtype=bool),
        sources=["stdlib"],
        vocabulary=Dataset.open(folder / "out").vocabulary,
        tokenizer_path=tokenizer,
        tokenizer_type="bpe",
        folder=folder / f"shards-{workers}",
    )
    pool = Workers(workers)

    def step() -> float:
        for job in jobs:
            job.path.unlink(missing_ok=True)
            job.done_path.unlink(missing_ok=True)
        pool.run(make_shard, jobs, advance=lambda _: None)
        return 0.0

    return step


def bare(folder: Path) -> Callable[[], float]:
    """One step encodes all documents, by the library alone."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "out" / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    batches: list[list[str]] = [[]]
    for line in (folder / "raw.jsonl").read_text().splitlines():
        if sum(map(len, batches[-1])) >= BATCH_BYTES:
            batches.append([])
        batches[-1].append(json.loads(line)["text"])

    def step() -> float:
        for batch in batches:
            tokenizer.encode_batch(batch, add_special_tokens=False)
        return 0.0

    return step


if __name__ == "__main__":
    main()
