"""How fast text becomes rows: each part of the pipeline on one core, over the Python standard library's source.

    python tests/benchmarks/bench_tokens.py [--output FILE]

Rates are of processor time of one process, which other jobs on the machine disturb less than wall time. A row is
2,048 targets. results/tokens.json keeps the last run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.build import build
from data_pipeline.config import DataConfig, TokenizerConfig
from data_pipeline.loader import RowSource
from data_pipeline.mixture import Mixture, Phase
from data_pipeline.packing import plan_rows
from data_pipeline.schema import validate
from data_pipeline.tokenizer.encode import Encoder
from data_pipeline.tokenizer.train import train_bpe

HERE = Path(__file__).resolve().parent


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def main() -> None:
    parser = argparse.ArgumentParser(description="text to rows, measured")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "tokens.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = measure(Path(folder))
    arguments.output.parent.mkdir(exist_ok=True)
    arguments.output.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


def measure(folder: Path) -> dict[str, Any]:
    texts = [path.read_text(errors="replace") for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*/*.py"))]
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    raw = folder / "raw.jsonl"
    raw.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    train_s, tokenizer = seconds(lambda: train_bpe(iter(texts), TokenizerConfig(vocab_size=4096)))
    encoder = Encoder(tokenizer)
    encoder.encode("start")
    encode_s, ids = seconds(lambda: encoder.encode_batch(texts))
    tree = {
        "output": str(folder / "out"),
        "sources": [{"name": "stdlib", "files": str(raw)}],
        "tokenizer": {"vocab_size": 4096},
        "workers": 1,
    }
    build_s, dataset = seconds(lambda: build(validate(DataConfig, tree), quiet=True))
    lengths = np.maximum(2, np.random.default_rng(0).lognormal(6.0, 1.2, size=1 << 20)).astype(np.int64)
    ragged = np.random.default_rng(1).integers(17, 120, 5000)  # best fit alone doesn't pack these, so that exact_fill.py is compiled too
    list(plan_rows(ragged, sequence_length=256, method="best_fit", key="compile"))
    plan_s, _ = seconds(lambda: list(plan_rows(lengths, sequence_length=2048, method="best_fit", key="k")))
    rows = RowSource.open([(dataset, 1.0, None)], sequence_length=2048, packing="best_fit", seed=0)
    count = 2000
    rows_s, _ = seconds(lambda: [rows[sample] for sample in range(count)])
    digests_s, _ = seconds(lambda: [rows[sample].digest() for sample in range(count)])
    far = 1_000_000_000
    weights = (0.412345, 0.287651, 0.200003, 0.100001)
    Mixture([Phase(0, weights)]).locate(10)
    far_s, _ = seconds(lambda: Mixture([Phase(0, weights)]).locate(far))
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import data_pipeline.loader"], check=True, cwd=HERE.parent.parent)
    return {
        "corpus": {"documents": len(texts), "megabytes": round(megabytes, 2), "tokens": int(sum(map(len, ids)))},
        "train_bpe_mb_s": round(megabytes / train_s, 2),
        "encode_mb_s": round(megabytes / encode_s, 2),
        "build_without_workers_mb_s": round(megabytes / build_s, 2),
        "plan_best_fit_documents_s": round(lengths.size / plan_s),
        "rows_s": round(count / rows_s),
        "row_tokens_s": round(count * 2048 / rows_s),
        "rows_with_digest_s": round(count / digests_s),
        "mixture_place_of_the_billionth_sample_s": round(far_s, 3),
        "loader_process_start_s": round(time.perf_counter() - started, 3),
        "command": "python tests/benchmarks/bench_tokens.py",
        "machine": f"{platform.machine()} {platform.system()}",
        "versions": {name: version(name) for name in ("tokenizers", "numpy", "numba")},
        "date": datetime.date.today().isoformat(),
    }


if __name__ == "__main__":
    main()
