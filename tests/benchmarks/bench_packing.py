"""How full rows are, and how fast they are planned: best fit at 1,024 targets on the sentences of Multi30k and on the Python standard
library, on Multi30k's languages alone and together under several tokenizers, and pairs of Multi30k for an encoder-decoder.

    python -m tests.benchmarks.bench_packing [--output FILE] [--multi30k FOLDER]

Rates are bytes of text over processor time of one process, from the opened shards to the plan on disk, median of 5, all that numba
compiles compiled before. results/packing.json keeps the last run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import shutil
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.binpack import best_fit_decreasing
from data_pipeline.build import build
from data_pipeline.config import DataConfig
from data_pipeline.dataset import Dataset, TokenSource
from data_pipeline.pair_loader import PairRowSource
from data_pipeline.schema import validate

HERE = Path(__file__).resolve().parent
SHARED = HERE.parents[1].parent / "shared" / "corpora" / "multi30k_en_de"
S = 1024
PAIR_LENGTHS = (256, 256)
REPEATS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description="padding and speed of packing, measured")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "packing.json")
    parser.add_argument("--multi30k", type=Path, default=SHARED, help="the folder with train.en.gz and train.de.gz")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = measure(Path(folder), arguments.multi30k)
    arguments.output.parent.mkdir(exist_ok=True)
    arguments.output.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


def measure(folder: Path, multi30k: Path) -> dict[str, Any]:
    stdlib = folder / "stdlib"
    stdlib.mkdir()
    root = Path(sysconfig.get_paths()["stdlib"])
    for number, path in enumerate(sorted(root.rglob("*.py"))):
        if not {"site-packages", "dist-packages", "__pycache__"} & set(path.parts):
            shutil.copy(path, stdlib / f"{number:05d}.txt")
    dataset = _build(
        folder / "documents",
        [
            {"name": "multi30k", "files": [str(multi30k / "train.en.gz"), str(multi30k / "train.de.gz")], "txt_documents": "line"},
            {"name": "stdlib", "files": str(stdlib)},
        ],
    )
    files = {"files": str(multi30k / "train.en.gz"), "target_files": str(multi30k / "train.de.gz")}
    pairs = _build(folder / "pairs", [{"name": "multi30k", **files}])
    documents = {source.name: _documents(source) for source in dataset.sources}
    alone = {}
    for kind, tokenizer in (("bytes", {"type": "bytes"}), ("bpe-4096", {"vocab_size": 4096}), ("bpe-8192", {"vocab_size": 8192})):
        for languages in (["en"], ["de"], ["en", "de"]):
            lines = {"name": "multi30k", "files": [str(multi30k / f"train.{name}.gz") for name in languages], "txt_documents": "line"}
            alone[f"{kind} {'+'.join(languages)}"] = _documents(_build(folder / f"{kind}-{len(alone)}", [lines], tokenizer).sources[0])
    tokens, rows = (sum(each[what] for each in documents.values()) for what in ("tokens", "rows"))
    return {
        "sequence_length": S,
        "documents": documents,
        "multi30k_alone": alone,
        "padding_percent_of_both": round(100 * (1 - tokens / (rows * S)), 4),
        "pairs": _pairs(pairs),
        "command": "python -m tests.benchmarks.bench_packing",
        "machine": f"{platform.machine()} {platform.system()}",
        "versions": {name: version(name) for name in ("numpy", "numba")},
        "date": datetime.date.today().isoformat(),
    }


def _build(output: Path, sources: list[dict[str, Any]], tokenizer: dict[str, Any] | None = None) -> Dataset:
    tree = {"output": str(output), "sources": sources, "dedup": None, "validation": {"fraction": 0.0}, "workers": 1}
    return build(validate(DataConfig, {**tree, "tokenizer": tokenizer or {"vocab_size": 8192}}), quiet=True)


def _documents(source: TokenSource) -> dict[str, Any]:
    plan_s = _median(lambda: source.plan(S, "best_fit"), source)
    plan, lengths = source.plan(S, "best_fit"), source.lengths()
    pieces = np.concatenate([plan.pieces(row) for row in range(plan.num_rows)])
    whole = np.bincount(pieces["document"], minlength=lengths.size)
    rests = np.sort(lengths % S)[::-1].astype(np.int64)
    rests = rests[rests > 0]
    return {
        "documents": source.num_documents,
        "megabytes": round(source.text_bytes / 1e6, 2),
        "tokens": source.num_tokens,
        "rows": plan.num_rows,
        "rows_at_least": _rows_at_least(lengths),
        "rows_by_best_fit_alone": int((lengths // S).sum()) + best_fit_decreasing(rests, S)[1],
        "padding_percent": round(100 * plan.num_padding_tokens / (plan.num_rows * S), 4),
        "padding_of_whole_rows_percent": round(100 * (-source.num_tokens % S) / (plan.num_rows * S), 4),
        "documents_not_longer_than_a_row_that_were_cut": int((whole[lengths <= S] > 1).sum()),
        "plan_mb_s": round(source.text_bytes / 1e6 / plan_s, 1),
        "plan_documents_s": round(source.num_documents / plan_s),
    }


def _rows_at_least(lengths: np.ndarray) -> int:
    """Where no document is cut that needn't be: whole rows of long ones, and what is left of all of them."""
    return int((lengths // S).sum()) - (-int((lengths % S).sum()) // S)


def _pairs(dataset: Dataset) -> dict[str, Any]:
    (source,) = dataset.sources
    plan_s = _median(lambda: source.pair_plan(*PAIR_LENGTHS), source)
    plan = source.pair_plan(*PAIR_LENGTHS)
    one, other = source.pair_lengths()
    rows = PairRowSource.open([(dataset, 1.0, None)], source_length=PAIR_LENGTHS[0], target_length=PAIR_LENGTHS[1], seed=0)
    read_s = _seconds(lambda: [rows[sample] for sample in range(len(rows))])
    digest_s = _seconds(lambda: [rows[sample].digest() for sample in range(len(rows))])
    held = sum(row.num_pairs for row in rows)
    least = max(-(-int(one.sum()) // PAIR_LENGTHS[0]), -(-int(other.sum()) // PAIR_LENGTHS[1]))
    return {
        "pairs": source.num_documents,
        "source_tokens": int(one.sum()),
        "targets": int(other.sum()),
        "row": list(PAIR_LENGTHS),
        "rows": plan.num_rows,
        "rows_at_least": least,
        "padding_percent": {side: round(100 * share, 3) for side, share in zip(("source", "target"), plan.padding)},
        "pairs_in_rows": held,
        "left_out": plan.left_out,
        "plan_mb_s": round(source.text_bytes / 1e6 / plan_s, 1),
        "row_tokens_s": round(plan.num_rows * sum(PAIR_LENGTHS) / read_s),
        "row_tokens_with_digest_s": round(plan.num_rows * sum(PAIR_LENGTHS) / digest_s),
    }


def _median(work: Callable[[], Any], source: TokenSource) -> float:
    times = []
    for _ in range(REPEATS + 1):  # the first one compiles
        for path in (source.folder / "packing").glob("*.plan"):
            path.unlink()
        times.append(_seconds(work))
    return statistics.median(times[1:])


def _seconds(work: Callable[[], Any]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


if __name__ == "__main__":
    main()
