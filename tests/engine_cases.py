"""Engines of small cases, their rows, and what they hold; for tests that run on ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from megatron_lite.models.batch import Batch
from megatron_lite.training.engine import Engine, build_engine
from tests import parity
from tests.parity import SEED, Case
from tests.ranks import groups_of

STAGES = [None, 0, 1, 2, 3]
BOTH = [(stage, precision) for stage in STAGES for precision in ("fp32", "bf16") if (stage, precision) != (0, "bf16")]


def engine_of(case: Case, *, overrides: dict[str, Any] | None = None, **optimizer: Any) -> Engine:
    """On a rank: the case's engine with other optimizer numbers."""
    model, training, default, parallel = parity.configs(case)
    groups = groups_of(tp=case.tp, dp=case.dp, sequence_parallel=case.sequence_parallel)
    chosen = default.model_copy(update=optimizer)
    return build_engine(model, training, chosen, parallel, groups, seed=SEED, device=torch.device("cpu"), deepspeed_overrides=overrides)


def micro_batches(engine: Engine, step: int, *, size: int = 4, samples: range | None = None) -> list[Batch]:
    """This rank's share of a step's rows (or of the rows given), `size` at a time."""
    dp = engine.groups.dp
    samples = samples or range((step - 1) * parity.BATCH, step * parity.BATCH)
    share = len(samples) // dp.size
    mine = samples[dp.rank * share : (dp.rank + 1) * share]
    return [batch_of(engine, mine[at : at + size]) for at in range(0, share, size)]


def batch_of(engine: Engine, samples: range) -> Batch:
    rows = [parity.SyntheticRows(engine.model.config.vocabulary)[sample] for sample in samples]
    arrays = (np.stack([row.inputs for row in rows]), np.stack([row.targets for row in rows]))
    return Batch.from_rows(*arrays, [row.segment_starts for row in rows], list(samples), document_mask=True)


def states(engine: Engine) -> dict[str, torch.Tensor]:
    """Copies of everything that this rank owns."""
    return {f"{part.parameter_name} {part.state}": part.view.clone() for part in engine.owned_slices()}


def applied(engine: Engine) -> torch.Tensor:
    """With beta1 = 0, the gradient that the update used: this rank's written part, flat."""
    found = []
    for part in engine.owned_slices():
        if part.state == "exp_avg":
            first, last = part.writes
            found.append(part.view[first - part.start : last - part.start].double())
    return torch.cat(found)


def norm_over_ranks(values: torch.Tensor) -> float:
    total = values.square().sum()
    torch.distributed.all_reduce(total)
    return float(total.sqrt())
