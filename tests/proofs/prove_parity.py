"""The whole parity table: every layout of up to four processes against plain torch on one, into parity.md."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import deepspeed
import torch

from tests import parity, parity_models
from tests.parity import LIMITS, Case, Distance
from tests.planted_faults import FAULTS
from tests.ranks import pool

PLANTED = {
    "missing tp mark": [Case(tp=2, stage=stage) for stage in (1, 2, 3)],
    "missing gradient sum": [Case(tp=2, stage=stage, sequence_parallel=True) for stage in (0, 1, 2, 3)],
    "loss per rank": [Case(dp=2, stage=stage) for stage in (0, 1, 2, 3)],
    "doubled KV gradient": [Case(tp=4, stage=1, model=model) for model in parity_models.TABLE],
}


def layouts() -> Iterator[tuple[int, int, bool]]:
    """(tp, dp, sequence parallel) of every world of up to four."""
    for tp, dp in itertools.product((1, 2, 4), (1, 2)):
        if tp * dp <= 4:
            yield from ((tp, dp, split) for split in ((False, True) if tp > 1 else (False,)))


def fp32_cases() -> Iterator[Case]:
    for (tp, dp, split), stage, accumulation in itertools.product(layouts(), (None, 0, 1, 2, 3), (1, 4)):
        for model, dropout in itertools.product(parity_models.TABLE, (0.0, 0.1)):
            yield Case(tp, dp, stage, split, accumulation, model, dropout)


def bf16_cases() -> Iterator[Case]:
    for (tp, dp, split), stage, model in itertools.product(layouts(), (None, 1, 2, 3), parity_models.TABLE):
        yield Case(tp, dp, stage, split, accumulation=4 if dp == 2 else 1, model=model, dropout=0.1, precision="bf16")


def red(case: Case) -> str:
    """How a planted fault showed, or an empty string where it did not."""
    try:
        measured = parity.measure(case)
    except AssertionError as error:
        return str(error).strip().splitlines()[-1]
    return "" if measured.within_limits else str(measured)


def _engine(case: Case) -> str:
    return "torch" if case.stage is None else f"ZeRO-{case.stage}"


def _row(case: Case, measured: Distance) -> str:
    layout = f"| {case.tp} | {case.dp} | {_engine(case)} | {'yes' if case.sequence_parallel else ''} | {case.accumulation} | {case.model} | {case.dropout} "
    return layout + "".join(f"| {getattr(measured, name):.1e} " for name in LIMITS) + f"| {'yes' if measured.within_limits else 'NO'} |"


def prove(folder: Path) -> bool:
    """Write parity.md; True where every row holds."""
    began, rows, bf16, faults, good = time.time(), [], [], [], True
    for case in fp32_cases():
        measured = parity.measure(case)
        good &= measured.within_limits
        rows.append((case, measured))
        print(case, measured, "" if measured.within_limits else "  <-- NO", flush=True)
    for case in bf16_cases():
        bound = parity.distance(parity.expected(case.model, case.dropout, "bf16"), parity.expected(case.model, case.dropout)).loss
        measured = parity.measure(case)
        good &= measured.same_batches and measured.loss <= bound
        bf16.append((case, measured, bound))
        print(case, f"{measured.loss:.1e} <= {bound:.1e}", flush=True)
    for fault, cases in PLANTED.items():
        for case in cases:
            shown = red(Case(**{**vars(case), "fault": fault}))
            good &= bool(shown)
            faults.append(f"| {fault} | {case} | {shown or 'UNNOTICED'} |")
            print(fault, case, shown or "UNNOTICED", flush=True)
    assert set(PLANTED) == set(FAULTS)
    for size in (1, 2, 4):
        pool(size).close()
    (folder / "parity.md").write_text(_report(rows, bf16, faults, minutes=(time.time() - began) / 60))
    return good


def _report(rows: list[tuple[Case, Distance]], bf16: list[tuple[Case, Distance, float]], faults: list[str], *, minutes: float) -> str:
    learned = [
        f"| {model} | {dropout} | {trace.losses[0]:.3f} | {trace.losses[-1]:.3f} | {sum(norm > parity.CLIP for norm in trace.grad_norms)} of {parity.STEPS} |"
        for model, dropout in itertools.product(parity_models.TABLE, (0.0, 0.1))
        for trace in [parity.expected(model, dropout)]
    ]
    worst = " · ".join(
        f"{name} {max(getattr(measured, name) for _, measured in rows):.1e} (limit {limit:.0e})" for name, limit in LIMITS.items()
    )
    return "\n".join(
        [
            "# Parity: a layout changes speed, never the result",
            "",
            "Written by `make prove`. Each row is a run of real ranks over gloo on CPU, compared with `tests/reference.py`: the same model,",
            "loss, dropout and AdamW in plain torch on one process, with none of our layers, in float64 for the fp32 rows.",
            f"torch {torch.__version__}, DeepSpeed {deepspeed.__version__}; {len(rows)} + {len(bf16)} runs, {minutes:.0f} minutes.",
            "",
            f"{parity.STEPS} updates at lr {parity.LR} without warm-up, max_grad_norm {parity.CLIP}, {parity.BATCH} sequences of up to {parity_models.LENGTH} "
            "targets in documents of unequal length, Adam's eps 1e-6.",
            "`gqa`: 4 heads, 2 KV heads, vocabulary 97, untied. `mqa`: 1 KV head, vocabulary 90, tied.",
            "",
            "| model | dropout | loss of update 1 | of update 20 | clipped |",
            "|---|---|---|---|---|",
            *learned,
            "",
            "## fp32",
            "",
            "loss: worst of 20 updates, nats. grad_norm: worst, relative. gradient: worst logical tensor of update 1, relative Frobenius.",
            "parameter: worst element after 20 updates. A row holds when all are within their limits and the `batch_id`s of all updates are equal.",
            "",
            f"Worst of all rows: {worst}.",
            "",
            "| tp | dp | engine | sequence parallel | accumulation | model | dropout | loss | grad_norm | gradient | parameter | holds |",
            "|---|---|---|---|---|---|---|---|---|---|---|---|",
            *(_row(case, measured) for case, measured in rows),
            "",
            "## bf16",
            "",
            "Weights in bf16, masters and accumulation in fp32. A layout is to be no further from bf16 on one process than that is from fp32.",
            "",
            "| tp | dp | engine | sequence parallel | accumulation | model | loss: layout to one process, bf16 | one process, bf16 to fp32 | holds |",
            "|---|---|---|---|---|---|---|---|---|",
            *(
                f"| {case.tp} | {case.dp} | {_engine(case)} | {'yes' if case.sequence_parallel else ''} | {case.accumulation} | {case.model} "
                f"| {measured.loss:.1e} | {bound:.1e} | {'yes' if measured.same_batches and measured.loss <= bound else 'NO'} |"
                for case, measured, bound in bf16
            ),
            "",
            "## Planted faults",
            "",
            "Each must turn its row red.",
            "",
            "| fault | layout | what is seen |",
            "|---|---|---|",
            *faults,
            "",
        ]
    )
