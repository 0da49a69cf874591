"""Every variation of the model under layouts of up to four processes against plain torch on one, into variations.md."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import deepspeed
import torch

from tests import parity
from tests.parity import LIMITS, Case
from tests.parity_models import EXTRAS, MODELS, VARIED
from tests.ranks import pool
from tests.resharding import distance, resume, train_and_save

STEPS, SAVED_AT = 5, 3
NAMES = ("seq2seq", "seq2seq-apart", *VARIED)
LAYOUTS = (
    Case(),
    Case(tp=2),
    Case(dp=2, accumulation=2),
    Case(tp=2, dp=2, sequence_parallel=True),
)


def prove(folder: Path) -> bool:
    """Write variations.md; True where every row holds."""
    began, rows, good = time.time(), [], True
    for layout in LAYOUTS:
        for name in NAMES:
            case = Case(**{**vars(layout), "model": name})
            measured = parity.measure(case, STEPS)
            good &= measured.within_limits
            rows.append((name, layout, measured))
            print(name, layout, measured, "" if measured.within_limits else "  <-- NO", flush=True)
        pool(layout.world_size).close()
    resumed = {}
    for name in NAMES:
        resumed[name] = _resumed(name)
        good &= _holds(resumed[name])
        print(name, "resumed", resumed[name], "" if _holds(resumed[name]) else "  <-- NO", flush=True)
    worst = " · ".join(
        f"{name} {max(getattr(measured, name) for *_, measured in rows):.1e} (limit {limit:.0e})" for name, limit in LIMITS.items()
    )
    lines = [
        "# Variations of the model: a layout changes speed, never the result",
        "",
        f"Written by `python -m tests.proofs.prove variations`: torch {torch.__version__}, DeepSpeed {deepspeed.__version__}, ZeRO-1,",
        f"{(time.time() - began) / 60:.1f} minutes. Each row is {STEPS} updates of real ranks over gloo on CPU beside the same in plain torch",
        "(`tests/reference.py`), in float64; what is measured and the limits are those of [the parity table](parity.md).",
        "",
        f"Worst of all rows: {worst}.",
        "",
        "| variation | tp | dp | sequence parallel | loss | grad_norm | gradient | parameter | holds |",
        "|---|---|---|---|---|---|---|---|---|",
        *(
            f"| {name} | {layout.tp} | {layout.dp} | {'yes' if layout.sequence_parallel else ''} "
            + "".join(f"| {getattr(measured, limit):.1e} " for limit in LIMITS)
            + f"| {'yes' if measured.within_limits else 'NO'} |"
            for name, layout, measured in sorted(rows, key=lambda row: NAMES.index(row[0]))
        ),
        "",
        f"Saved after {SAVED_AT} updates at tp 2, resumed at dp 2 with other accumulation, beside the same {STEPS} updates in plain torch:",
        "",
        "| variation | loss | grad_norm | parameter | holds |",
        "|---|---|---|---|---|",
        *(
            f"| {name} " + "".join(f"| {value:.1e} " for value in measured.values()) + f"| {'yes' if _holds(measured) else 'NO'} |"
            for name, measured in resumed.items()
        ),
        "",
        "What they are, beside the default model:",
        "",
        "| variation | config |",
        "|---|---|",
        *(f"| {name} | `{MODELS[name].model_dump(exclude_defaults=True)}` {EXTRAS.get(name, '')} |" for name in NAMES),
        "",
    ]
    (folder / "variations.md").write_text("\n".join(lines))
    return good


def _resumed(name: str) -> dict[str, float]:
    source, target = Case(tp=2, model=name), Case(dp=2, accumulation=2, model=name)
    with tempfile.TemporaryDirectory() as root:
        pool(2).run(train_and_save, source, Path(root), saved_at=SAVED_AT, timeout_s=300.0)
        ranks = pool(2).run(resume, target, Path(root), end=STEPS, timeout_s=300.0)
    return distance(ranks, parity.expected(name, target.dropout, steps=STEPS), saved_at=SAVED_AT)


def _holds(measured: dict[str, float]) -> bool:
    return all(value <= LIMITS[name] for name, value in measured.items())
