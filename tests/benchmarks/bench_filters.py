"""How fast cleaning is, on one core and side by side with datatrove on the same file.

    python tests/benchmarks/bench_filters.py [--text FILES ...] [--repeats 3] [--peer-venv DIR] [--output FILE]

Both sides read one JSON-lines file, run Gopher repetition, Gopher quality, C4, FineWeb and PII in this order and write what stays,
in one process with one thread; runs alternate, medians count. `published`: the published thresholds on both sides, and on how many
documents they decide alike. `open`: thresholds that drop nothing, so that every filter sees every document. Ours alone besides, on
`open`: with character ratios and with language identification. results/filters.json keeps the last run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.benchmarks.bench_dedup import HERE, corpus_name, cpu_name, default_text, make_peer, timed, version

SHARES = dict.fromkeys(range(2, 11), 1.0)
OPEN: dict[str, dict[str, Any]] = {
    "gopher_repetition": {
        "max_duplicate_lines": 1.0,
        "max_duplicate_paragraphs": 1.0,
        "max_duplicate_line_chars": 1.0,
        "max_duplicate_paragraph_chars": 1.0,
        "max_top_ngram_chars": {n: SHARES[n] for n in (2, 3, 4)},
        "max_duplicate_ngram_chars": {n: SHARES[n] for n in range(5, 11)},
    },
    "gopher_quality": {
        "min_words": 1,
        "max_words": 10**9,
        "min_mean_word_length": 1.0,
        "max_mean_word_length": 1000.0,
        "max_hashes_per_word": 1000.0,
        "max_ellipses_per_word": 1000.0,
        "max_bullet_lines": 1.0,
        "max_ellipsis_lines": 1.0,
        "min_words_with_letter": 0.001,
        "min_stop_words": 0,
    },
    "c4": {"drop_lorem_ipsum": False, "drop_curly_bracket": False, "min_sentences": 1},
    "fineweb": {"min_punctuated_lines": 0.0, "max_short_lines": 1.0, "max_duplicate_line_chars": 1.0, "max_newlines_per_word": 1000.0},
    "pii": {},
}
MODES: dict[str, dict[str, dict[str, Any]]] = {
    "published": {name: {} for name in OPEN},
    "open": OPEN,
    "open+ratios": {**OPEN, "ratios": {"max_symbols": 0.999, "max_digits": 0.999, "max_urls": 0.999, "max_white_space": 0.999}},
}
MODES["open+ratios+language"] = {**MODES["open+ratios"], "language": {"keep": ["en"], "min_score": 0.0}}


def main() -> None:
    parser = argparse.ArgumentParser(description="cleaning, measured")
    parser.add_argument("--text", nargs="+", default=default_text()[-1:], help="files, each a text: folders or patterns")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--megabytes", type=float, default=2.0, help="about as much of the text as this, taken evenly")
    parser.add_argument("--peer-venv", type=Path, default=Path(tempfile.gettempdir()) / "megatron-lite-bench-datatrove")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "filters.json")
    parser.add_argument("--ours", nargs=3, metavar=("MODE", "INPUT", "OUTPUT"), help="run our side once (used by the benchmark itself)")
    options = parser.parse_args()
    if options.ours:
        run_ours(*options.ours)
    else:
        compare(options)


def run_ours(mode: str, source: str, target: str) -> None:
    """Read, filter, write; prints the seconds."""
    from data_pipeline.document import Document
    from data_pipeline.filters.config import FiltersConfig
    from data_pipeline.filters.stage import Filters
    from data_pipeline.pii import Pii
    from data_pipeline.read import ReadOptions, read_file
    from data_pipeline.schema import validate
    from data_pipeline.storage import atomic_write

    config = validate(FiltersConfig, MODES[mode])
    assert config.pii is not None
    began, first, first_cpu = time.perf_counter(), 0.0, 0.0
    documents = (item for item in read_file(source, ReadOptions(fields=("id",)), source="bench") if isinstance(item, Document))
    with atomic_write(target) as file:
        for document in Pii(config.pii).run(Filters(config).run(documents)):
            file.write(json.dumps({"id": document.meta["fields"]["id"], "text": document.text}).encode() + b"\n")
            first, first_cpu = first or time.perf_counter() - began, first_cpu or time.process_time()
    print(json.dumps({"filter": time.perf_counter() - began, "first_document": first, "rest_cpu": time.process_time() - first_cpu}))


def compare(options: argparse.Namespace) -> None:
    from data_pipeline.document import Document
    from data_pipeline.read import ReadOptions, read_file
    from data_pipeline.storage import list_files

    paths = list_files(options.text)
    texts = [
        item.text for path in paths for item in read_file(path, ReadOptions(format="txt"), source="bench") if isinstance(item, Document)
    ]
    every = max(1, round(sum(map(len, texts)) / 1e6 / options.megabytes))
    texts = texts[::every]
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    report: dict[str, Any] = {
        "corpus": {"texts": corpus_name(options.text), "documents": len(texts), "megabytes": round(megabytes, 3)},
        "command": f"python -m tests.benchmarks.bench_filters --repeats {options.repeats} --megabytes {options.megabytes}",
        "date": datetime.date.today().isoformat(),
        "hardware": {"cpu": cpu_name(), "cores": os.cpu_count(), "machine": platform.machine()},
    }
    peer_python = make_peer(options.peer_venv)
    report["versions"] = {"python": platform.python_version(), "numpy": version(sys.executable, "numpy")} | {
        name: version(str(peer_python), name) for name in ("datatrove", "spacy")
    }
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "input" / "texts.jsonl"
        source.parent.mkdir()
        source.write_text("".join(json.dumps({"id": str(number), "text": text}) + "\n" for number, text in enumerate(texts)))
        for mode in MODES:
            report[mode] = measure(mode, source, Path(folder), peer_python, megabytes, len(texts), options.repeats)
            print(mode, json.dumps(report[mode], indent=2), flush=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=2) + "\n")


def measure(mode: str, source: Path, folder: Path, peer_python: Path, megabytes: float, count: int, repeats: int) -> dict[str, Any]:
    ours: list[dict[str, Any]] = []
    peer: list[dict[str, Any]] = []
    for run in range(repeats):
        kept = folder / f"ours-{mode}-{run}.jsonl"
        ours.append(timed([sys.executable, "-m", "tests.benchmarks.bench_filters", "--ours", mode, str(source), str(kept)], kept))
        if "+" not in mode:
            out, work = folder / f"peer-{mode}-{run}", folder / f"work-{mode}-{run}"
            script = str(HERE / "peer_datatrove_filters.py")
            peer.append(timed([str(peer_python), script, mode, str(source.parent), str(out), str(work)], out))
    result: dict[str, Any] = {"ours": rates(ours, megabytes)}
    if peer:
        result["datatrove"] = rates(peer, megabytes)
        result["times_faster_by_work"] = round(result["ours"]["work_mb_s"] / result["datatrove"]["work_mb_s"], 1)
        result["times_faster_by_cpu"] = round(result["datatrove"]["cpu_s"] / result["ours"]["cpu_s"], 1)
        ids = [{json.loads(line)["id"] for line in path.read_text().splitlines()} for path in (kept, *out.glob("*.jsonl"))]
        result["documents_decided_alike"] = f"{count - len(ids[0] ^ ids[1])} of {count}"
    return result


def rates(runs: list[dict[str, Any]], megabytes: float) -> dict[str, Any]:
    """work: from the first byte read to the last written, imports left out, tables and models of the first document in it; cpu: the
    whole process in processor time."""
    work_s = statistics.median(run["parts"]["filter"] for run in runs)
    parts = [run["parts"] for run in runs]
    rest: dict[str, float] = {}
    if "rest_cpu" in parts[0]:
        rest["after_first_document_mb_s"] = statistics.median(megabytes / (part["filter"] - part["first_document"]) for part in parts)
        rest["after_first_document_mb_per_cpu_s"] = statistics.median(megabytes / part["rest_cpu"] for part in parts)
    return {
        "work_s": round(work_s, 3),
        "work_mb_s": round(megabytes / work_s, 2),
        **{name: round(rate, 2) for name, rate in rest.items()},
        "cpu_s": round(statistics.median(run["cpu_s"] for run in runs), 3),
        "kept_documents": runs[0]["kept_documents"],
    }


if __name__ == "__main__":
    main()
