"""A data build with every stage on, killed by SIGKILL at fifty points, each time rerun with another number of workers. Into data-kills.md."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.corpus_fixtures import digests
from tests.paths import ROOT, corpora
from tests.proofs.killed_build import POINTS

SEED, AT_MOMENTS, AT_POINTS = 5, 25, 25
WORKERS = (1, 2, 3)
SPECIALS = {"<|endoftext|>": 0, "<|fim_prefix|>": 1, "<|fim_suffix|>": 2, "<|fim_middle|>": 3}
HEAD = """# Data builds: a killed build ends as the one that nothing happened to

Written by `python -m tests.proofs.prove data-kills`. Three sources (licence texts, captions in German and English, a play; {kilobytes:,} kB,
{documents:,} documents, {dropped:,} dropped for {reasons} reasons), every stage on: URL, Gopher, C4, FineWeb and character filters, personal data, decontamination, dedup by field, exact,
MinHash, lines, substring, BPE training, encoding, fill in the middle, held-out documents, two packing plans, report. Tasks, parts, shards and sort runs are made
small, so that each stage has several files.

Each row starts from nothing, is killed by SIGKILL once, and is run again with another number of workers. Then sha256 of every file of the dataset
folder ({files} files: shards, manifest, tokenizer, plans, report, evidence) is compared with the uninterrupted build's, and the work folder is
searched for leftovers. `in_a_write`: half of a piece of a shard, a part or a table is in its file. {minutes:.0f} minutes.

| # | killed | at | during | files finished by then | workers before, after | the dataset |
|---|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Kill:
    """One build that was killed and run again."""

    who: str
    where: str
    stage: str
    finished: int
    workers: tuple[int, int]
    wrong: tuple[str, ...]


def prove(folder: Path) -> bool:
    """Write data-kills.md; True where every dataset is byte for byte that of the uninterrupted build."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        raw = write_sources(work / "raw")
        whole_s = {}
        wanted: dict[str, str] = {}
        for workers in WORKERS:
            begin = time.monotonic()
            whole = work / f"whole-{workers}"
            whole.mkdir()
            assert start(whole, raw, workers).wait(timeout=600) == 0, f"{workers} workers"
            whole_s[workers] = time.monotonic() - begin
            found = digests(whole / "data")
            assert found and (not wanted or found == wanted), f"{workers} workers make another dataset"
            wanted = found
        manifest = json.loads((work / "whole-1" / "data" / "manifest.json").read_text())
        kills = [killed(work / f"kill-{number}", raw, wanted, whole_s, case, number) for number, case in enumerate(plan(), start=1)]
    good = all(not kill.wrong for kill in kills)
    ledger = manifest["ledger"]
    lost: Counter[str] = Counter()
    for sources in ledger.values():
        for tally in sources.values():
            lost.update({reason: count["documents"] for reason, count in tally["dropped"].items()})
    head = HEAD.format(
        kilobytes=sum(tally["read"]["bytes"] for tally in ledger["read"].values()) // 1000,
        documents=sum(tally["read"]["documents"] for tally in ledger["read"].values()),
        dropped=sum(lost.values()),
        reasons=len(lost),
        files=len(wanted),
        minutes=(time.monotonic() - began) / 60,
    )
    rows = [
        f"| {number} | {kill.who} | {kill.where} | {kill.stage} | {kill.finished} | {kill.workers[0]}, {kill.workers[1]} | "
        f"{'the same bytes' if not kill.wrong else 'DIFFERS: ' + ', '.join(kill.wrong)} |"
        for number, kill in enumerate(kills, start=1)
    ]
    end = f"{sum(not kill.wrong for kill in kills)} of {len(kills)} end with the same bytes."
    (folder / "data-kills.md").write_text(head + "\n".join(rows) + f"\n\n{end}\n")
    return good


def plan() -> list[tuple[str, str, float]]:
    """(who is killed, at which point or moment, how far): moments as a share of the whole build, points as a share of their number."""
    dice = random.Random(SEED)
    moments = [
        (dice.choice(("parent", "parent", "worker", "all")), "moment", (number + dice.random()) / AT_MOMENTS)
        for number in range(AT_MOMENTS)
    ]
    points = [("worker" if number % 3 == 2 else "parent", POINTS[number % len(POINTS)], dice.random()) for number in range(AT_POINTS)]
    cases: list[tuple[str, str, float]] = [*moments, *points]
    dice.shuffle(cases)
    return cases


# How often a process comes to a point in a whole build, roughly: of the parent with one worker, of each worker with two.
TIMES = {
    "parent": {"in_a_write": 3100, "before_fsync": 230, "before_rename": 97, "after_rename": 97, "before_link": 17},
    "worker": {"in_a_write": 1200, "before_fsync": 60, "before_rename": 40, "after_rename": 40},
}


def killed(work: Path, raw: Path, wanted: dict[str, str], whole_s: dict[int, float], case: tuple[str, str, float], number: int) -> Kill:
    """Kill one build as planned; where it is done before that, an earlier moment or place is drawn until one is met."""
    dice = random.Random(1000 * SEED + number)
    who, point, share = case
    if (who, point) == ("worker", "before_link"):
        point = "in_a_write"
    while True:
        work.mkdir()
        before = dice.choice([1, 2, 3] if who == "parent" and point == "moment" else [1] if who == "parent" else [2, 3])
        at = f"{who}:{point}:{1 + int(share * TIMES[who][point])}" if point != "moment" else ""
        process = start(work, raw, before, at)
        where = f"{share:.0%} of the time" if point == "moment" else f"{point} {at.rpartition(':')[2]}"
        met = by_moment(process, share * whole_s[before], who) if point == "moment" else process.wait(timeout=600) != 0
        if met:
            break
        subprocess.run(["rm", "-rf", str(work)], check=True)
        share *= 0.6
    stage_file = work / "stage"
    stage = stage_file.read_text() if stage_file.exists() else "start"
    finished = (
        len([path for path in work.rglob("*") if path.is_file() and ".tmp-" not in str(path.relative_to(work))]) - stage_file.exists() - 1
    )
    after = dice.choice([each for each in WORKERS if each != before])
    wrong: list[str] = []
    if (code := start(work, raw, after).wait(timeout=600)) != 0:
        wrong.append(f"exit {code} when run again")
    found = digests(work / "data") if (work / "data").exists() else {}
    wrong += sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))
    wrong += [path.name for path in work.rglob("*") if ".tmp-" in path.name]
    print(f"{number}: {who} {where}, {stage or 'start'}, {before} -> {after} workers: {wrong or 'the same bytes'}", flush=True)
    subprocess.run(["rm", "-rf", str(work)], check=True)
    return Kill(who, where, stage or "start", finished, (before, after), tuple(wrong))


def start(work: Path, raw: Path, workers: int, point: str = "") -> subprocess.Popen[bytes]:
    config = work / "config.json"
    config.write_text(json.dumps(tree(raw, work / "data")))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.proofs.killed_build", str(config), str(workers), point, str(work / "stage")]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL, start_new_session=True)


def by_moment(process: subprocess.Popen[bytes], after_s: float, who: str) -> bool:
    """SIGKILL to the build, to one of its workers, or to all of it at once; False where it was over, or had no worker then."""
    try:
        process.wait(timeout=after_s)
        return False
    except subprocess.TimeoutExpired:
        pass
    family = psutil.Process(process.pid).children(recursive=True)
    builders = [child for child in family if "resource_tracker" not in " ".join(child.cmdline())]
    if who == "worker":
        if not builders:
            process.kill()
        else:
            builders[0].kill()
    elif who == "all":
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    code = process.wait(timeout=600)
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive, "workers outlived their parent"
    return code != 0


# ------------------------------------------------------------------------------------------------- the corpus


def write_sources(raw: Path) -> Path:
    """Parts of the shared corpora, with what every stage is there for."""
    for name in ("licences", "captions"):
        (raw / name).mkdir(parents=True)
    dice = random.Random(SEED)
    for number, path in enumerate(sorted(corpora("spdx_licenses").glob("*.txt"))[::24]):
        (raw / "licences" / f"{number:02}.txt").write_bytes(path.read_bytes())
    for language in ("en", "de"):
        lines = gzip.decompress((corpora("multi30k_en_de") / f"train.{language}.gz").read_bytes()).decode().splitlines()[:2400]
        records = [
            {"text": "\n".join(lines[first : first + 12]), "url": f"https://x{first % 7}.example.com/{language}/{first}"}
            for first in range(0, 2400, 12)
        ]
        records += dice.sample(records, 12)
        records += [
            {"text": record["text"] + f"\nThe end, {number}.", "url": None} for number, record in enumerate(dice.sample(records, 12))
        ]
        for part in range(4):
            lines_ = [json.dumps(record) for record in records[part::4]] + ['{"text": "cut off']
            (raw / "captions" / f"{language}-{part}.jsonl.gz").write_bytes(gzip.compress("\n".join(lines_).encode(), mtime=0))
    items = [json.loads(line) for line in (corpora("eval") / "arc_easy.jsonl").read_text().splitlines()[:100]]
    (raw / "evaluation.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    play = (corpora("tinyshakespeare") / "input.txt").read_text()[:150_000]
    planted = "".join(f"\n\n{item['query']} {item['choices'][item['gold']]}\n\n" for item in items[:5])
    words = play.split()
    repeats = "".join(f"\n\nAnd so he said, {' '.join(words[at : at + 70])}, {at}.\n\n" for at in range(1000, 9000, 400))
    (raw / "play.txt").write_text(play[:70_000] + planted + play[70_000:] + repeats + play[:5_000])
    return raw


def tree(raw: Path, out: Path) -> dict[str, object]:
    return {
        "output": str(out),
        "sources": [
            {"name": "licences", "files": str(raw / "licences")},
            {"name": "captions", "files": str(raw / "captions")},
            {"name": "play", "files": str(raw / "play.txt"), "txt_documents": "paragraph"},
        ],
        "filters": {
            "write_dropped": True,
            "url": {"block": ["x3.example.com"]},
            "gopher_repetition": {},
            "gopher_quality": {"min_words": 5, "min_stop_words": 0},
            "c4": {"min_sentences": 1, "min_words_per_line": 1},
            "fineweb": {"max_short_lines": 1.0},
            "ratios": {},
            "pii": {},
        },
        "decontaminate": {"evaluations": [{"name": "arc", "files": str(raw / "evaluation.jsonl")}]},
        "dedup": {"field": "url", "exact": True, "minhash": {}, "lines": {}, "substring": {}},
        "tokenizer": {"type": "bpe", "vocab_size": 700, "special_tokens": SPECIALS},
        "fim": {"rate": 0.3, "sources": ["captions"]},
        "validation": {"fraction": 0.03},
        "packing": [{"sequence_length": 128}, {"sequence_length": 64, "method": "concat"}],
    }
