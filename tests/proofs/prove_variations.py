"""Every variation of the model under layouts of up to four processes against plain torch on one, into variations.md."""

from __future__ import annotations

import time
from pathlib import Path

import deepspeed
import torch

from tests import parity
from tests.parity import LIMITS, Case
from tests.parity_models import EXTRAS, MODELS, VARIED
from tests.ranks import pool

STEPS = 5
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
        for name in VARIED:
            case = Case(**{**vars(layout), "model": name})
            measured = parity.measure(case, STEPS)
            good &= measured.within_limits
            rows.append((name, layout, measured))
            print(name, layout, measured, "" if measured.within_limits else "  <-- NO", flush=True)
        pool(layout.world_size).close()
    worst = " · ".join(
        f"{name} {max(getattr(measured, name) for *_, measured in rows):.1e} (limit {limit:.0e})" for name, limit in LIMITS.items()
    )
    lines = [
        "# Variations of the model: a layout changes speed, never the result",
        "",
        f"Written by `python -m tests.proofs.prove variations`: torch {torch.__version__}, DeepSpeed {deepspeed.__version__}, ZeRO-1,",
        f"{(time.time() - began) / 60:.0f} minutes. Each row is {STEPS} updates of real ranks over gloo on CPU beside the same in plain torch",
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
            for name, layout, measured in sorted(rows, key=lambda row: VARIED.index(row[0]))
        ),
        "",
        "What they are, beside the default model:",
        "",
        "| variation | config |",
        "|---|---|",
        *(f"| {name} | `{MODELS[name].model_dump(exclude_defaults=True)}` {EXTRAS.get(name, '')} |" for name in VARIED),
        "",
    ]
    (folder / "variations.md").write_text("\n".join(lines))
    return good
