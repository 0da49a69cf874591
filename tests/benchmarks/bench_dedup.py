"""How fast dedup is: signatures on one core, and the whole of it side by side with datatrove on the same file.

    python tests/benchmarks/bench_dedup.py [--text FILES ...] [--repeats 3] [--peer-venv DIR] [--output FILE]

Both sides read one JSON-lines file, find near-duplicates by 14 bands of 8 rows over word 5-grams and write what stays,
in one process with one thread; ours finds exact copies and verifies each candidate besides. Runs alternate; medians
count. `process_s` is wall time from the start of the interpreter, imports and compilation included, `cpu_s` the same in
processor time (which other jobs on the machine disturb less), `work_s` wall time without start-up. datatrove is
installed into an environment of its own. results/dedup.json keeps the last run of each corpus.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from pathlib import Path
from typing import Any

PEER = "datatrove[io,processing]==0.10.1"
HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description="dedup, measured")
    parser.add_argument("--text", nargs="+", default=default_text(), help="files, each a text: folders or patterns")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peer-venv", type=Path, default=Path(tempfile.gettempdir()) / "megatron-lite-bench-datatrove")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "dedup.json")
    parser.add_argument("--ours", nargs=2, metavar=("INPUT", "OUTPUT"), help="run our side once (used by the benchmark itself)")
    options = parser.parse_args()
    if options.ours:
        run_ours(*options.ours)
    else:
        compare(options)


def run_ours(source: str, target: str) -> None:
    """Read, find, write; prints the seconds of each part."""
    from data_pipeline.dedup.config import DedupConfig
    from data_pipeline.dedup.run import DocRecord, find_duplicates
    from data_pipeline.document import Document
    from data_pipeline.read import read_file
    from data_pipeline.storage import atomic_write

    began = time.perf_counter()
    documents = [item for item in read_file(source, source="bench") if isinstance(item, Document)]
    texts = {document.id: document.text for document in documents}
    read = time.perf_counter()
    records = (DocRecord(document.id, document.text) for document in documents)
    result = find_duplicates(records, DedupConfig(), fetch=lambda ids: [texts[name] for name in ids])
    found = time.perf_counter()
    with atomic_write(target) as file:
        for document in documents:
            if document.id not in result:
                file.write(json.dumps({"id": document.id, "text": document.text}).encode() + b"\n")
    written = time.perf_counter()
    print(json.dumps({"read": read - began, "find": found - read, "write": written - found, "stats": result.stats}))


def signature_rate(texts: list[str], repeats: int) -> float:
    """MB of UTF-8 a second through `signatures`, one thread, compiled, median."""
    from data_pipeline.dedup.config import MinHashConfig
    from data_pipeline.dedup.minhash import signatures

    config = MinHashConfig()
    signatures(texts[:1], config)
    num_bytes = sum(len(text.encode()) for text in texts)
    rates = []
    for _ in range(max(5, repeats)):
        began = time.perf_counter()
        signatures(texts, config)
        rates.append(num_bytes / 1e6 / (time.perf_counter() - began))
    return statistics.median(rates)


def compare(options: argparse.Namespace) -> None:
    from data_pipeline.document import Document
    from data_pipeline.read import ReadOptions, read_file
    from data_pipeline.storage import list_files

    texts = [
        item.text
        for path in list_files(options.text)
        for item in read_file(path, ReadOptions(format="txt"), source="bench")
        if isinstance(item, Document)
    ]
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    report: dict[str, Any] = {
        "corpus": {"documents": len(texts), "megabytes": round(megabytes, 3)},
        "command": f"python tests/benchmarks/bench_dedup.py --text {corpus_name(options.text)} --repeats {options.repeats}",
        "date": datetime.date.today().isoformat(),
        "hardware": {"cpu": cpu_name(), "cores": os.cpu_count(), "machine": platform.machine()},
        "signatures_mb_s": round(signature_rate(texts, options.repeats), 1),
    }
    peer_python = make_peer(options.peer_venv)
    ours: list[dict[str, Any]] = []
    peer: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "input" / "texts.jsonl"
        source.parent.mkdir()
        source.write_text("".join(json.dumps({"id": str(number), "text": text}) + "\n" for number, text in enumerate(texts)))
        for run in range(options.repeats):
            kept = Path(folder) / f"ours-{run}.jsonl"
            ours.append(timed([sys.executable, __file__, "--ours", str(source), str(kept)], kept))
            kept = Path(folder) / f"peer-{run}"
            peer.append(
                timed(
                    [str(peer_python), str(HERE / "peer_datatrove.py"), str(source.parent), str(kept), str(Path(folder) / f"work-{run}")],
                    kept,
                )
            )
    versions = {name: version(sys.executable, name) for name in ("numpy", "numba")} | {"python": platform.python_version()}
    report["ours"] = summary(ours, megabytes) | {"versions": versions}
    report["datatrove"] = summary(peer, megabytes) | {
        "versions": {name: version(str(peer_python), name) for name in ("datatrove", "spacy", "numpy")}
    }
    for clock in ("process_s", "cpu_s", "work_s"):
        report[f"times_faster_by_{clock}"] = round(report["datatrove"][clock] / report["ours"][clock], 1)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    results = json.loads(options.output.read_text()) if options.output.exists() else {}
    options.output.write_text(json.dumps(results | {corpus_name(options.text): report}, indent=2) + "\n")
    print(json.dumps(report, indent=2))


def default_text() -> list[str]:
    """Python's standard library, and the licence corpus where it is there: some 17 MB of prose and code."""
    library, licences = Path(sysconfig.get_paths()["stdlib"]), ROOT.parent / "shared" / "corpora" / "spdx_licenses"
    patterns = [library / "*.py", library / "[a-r]*/**/*.py"]
    return [str(pattern) for pattern in patterns + ([licences / "*.txt"] if licences.is_dir() else [])]


def corpus_name(patterns: list[str]) -> str:
    """The patterns' last parts: results tell corpora apart by it, and name no folder of this machine."""
    return " ".join("/".join(Path(pattern).parts[-4 if "**" in pattern else -2 :]) for pattern in patterns)


def timed(command: list[str], kept: Path) -> dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if finished.returncode != 0:
        sys.exit(f"{command} failed:\n{finished.stderr[-3000:]}")
    parts = json.loads(finished.stdout.strip().splitlines()[-1])
    files = [kept] if kept.is_file() else list(kept.glob("*.jsonl"))
    lines = sum(file.read_bytes().count(b"\n") for file in files)
    return {"process_s": seconds, "cpu_s": cpu_s, "parts": parts, "kept_documents": lines}


def summary(runs: list[dict[str, Any]], megabytes: float) -> dict[str, Any]:
    names = [name for name, value in runs[0]["parts"].items() if isinstance(value, float)]
    parts = {name: round(statistics.median(run["parts"][name] for run in runs), 3) for name in names}
    process_s, cpu_s = (statistics.median(run[clock] for run in runs) for clock in ("process_s", "cpu_s"))
    work_s = statistics.median(sum(run["parts"][name] for name in names) for run in runs)
    kept = {run["kept_documents"] for run in runs}
    return {
        "process_s": round(process_s, 3),
        "cpu_s": round(cpu_s, 3),
        "work_s": round(work_s, 3),
        "work_mb_s": round(megabytes / work_s, 2),
        "parts_s": parts,
        "kept_documents": kept.pop() if len(kept) == 1 else sorted(kept),
    }


def make_peer(folder: Path) -> Path:
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", PEER, "spacy", "orjson"], check=True)
    return python


def version(python: str, package: str) -> str:
    code = f"import importlib.metadata; print(importlib.metadata.version({package!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())


if __name__ == "__main__":
    main()
