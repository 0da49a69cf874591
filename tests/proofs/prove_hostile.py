"""tests/proofs/hostile.md: what becomes of each hostile file, beside what datatrove does with the same one."""

from __future__ import annotations

import gzip
import json
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from data_pipeline.read import ReadOptions, count_read, read_file
from data_pipeline.step import Ledger
from tests.hostile_files import AFTER, BEFORE, CASES, Case, record, write_case

BOMB_BYTES = 512 << 20
PEER = Path(tempfile.gettempdir()) / "megatron-lite-bench-datatrove" / "bin" / "python"
SCRIPT = Path(__file__).parent.parent / "benchmarks" / "peer_datatrove_hostile.py"
HEAD = """# Hostile files

Written by `python -m tests.proofs.prove hostile` from the cases of `tests/hostile_files.py`, which `tests/unit/test_hostile.py` holds.

Unless its name says otherwise, a file is one JSON-lines file with a good record before and after the hostile one. *Kept* counts
documents, *good* those of them that have nothing wrong with them. Ours counts everything that is not kept, with file and record, and
the books balance: read = kept + dropped + errors, in documents and bytes.

"""


def prove(folder: Path) -> bool:
    bomb = Case(
        "bomb of 512 MiB", "a.jsonl.gz", lambda: gzip.compress(record(BEFORE) + b"0" * BOMB_BYTES + b"\n" + record(AFTER)), [BEFORE, AFTER],
        {"too_long": 1},
    )  # fmt: skip
    cases = [*CASES, bomb]
    with tempfile.TemporaryDirectory() as work:
        paths = {case.name: write_case(Path(work), case) for case in cases}
        theirs, said = peer(Path(work))
        rows = [row(case, paths[case.name], theirs.get(paths[case.name].name)) for case in cases]
    sound = all(right for _, right in rows)
    lost = sum(1 for case, (_, right) in zip(cases, rows) if not right)
    table = "| input | kept | good | counted as | datatrove: kept | good lost | stopped by |\n|---|---|---|---|---|---|---|\n"
    verdict = (
        "Every case has the outcome that its row in `hostile_files.py` names."
        if sound
        else f"{lost} cases differ from what they should be."
    )
    (folder / "hostile.md").write_text(HEAD + table + "\n".join(text for text, _ in rows) + f"\n\n{verdict} {said}\n")
    return sound


def row(case: Case, path: Path, theirs: dict[str, Any] | None) -> tuple[str, bool]:
    """A line of the table, and whether ours is as it should be."""
    notes: Counter[str] = Counter()
    ledger = Ledger()
    items = read_file(str(path), ReadOptions(notes=notes, **case.options), source="s")
    texts = [document.text[:200] for document in count_read(items, ledger, source="s", notes=notes)]
    ledger.balance()
    tally = ledger.total("read")
    counted = {**{kind: count.documents for kind, count in {**tally.dropped, **tally.errors}.items()}, **tally.notes}
    wanted = [text[:200] for text in case.kept]
    good = set(wanted)
    cells = [case.name, f"{len(texts):,}", f"{len(good):,}", ", ".join(f"{kind} {number}" for kind, number in counted.items()) or "–"]
    if theirs is None:
        cells += ["no reader for txt" if case.file.endswith("txt") else "not run", "", ""]
    else:
        cells += [f"{len(theirs['texts']):,}", f"{len(good - set(theirs['texts'])):,}", theirs["raised"]]
    return f"| {' | '.join(cells)} |", texts == wanted and counted == case.counters


def peer(folder: Path) -> tuple[dict[str, Any], str]:
    """By file name, and a sentence about the version; nothing where it isn't installed."""
    if not PEER.exists():
        return {}, "datatrove is not installed here; `tests/benchmarks/bench_dedup.py` makes its environment."
    done = subprocess.run([str(PEER), str(SCRIPT), str(folder)], capture_output=True, text=True, timeout=600, check=True)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    code = "import importlib.metadata as m; print(m.version('datatrove'))"
    version = subprocess.run([str(PEER), "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    return found, f"datatrove {version} writes a line to its log about what it leaves out. Read in one task, with its defaults."
