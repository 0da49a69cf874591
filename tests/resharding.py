"""A run that is saved under one layout and goes on under another, on real ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_lite.checkpoint.find import newest_checkpoint
from megatron_lite.checkpoint.load import load_into
from megatron_lite.checkpoint.save import save_checkpoint
from megatron_lite.training.engine import build_engine
from tests import parity
from tests.checkpoint_fakes import run_state
from tests.parity import SEED, Case, Trace


def train_and_save(case: Case, root: Path, *, saved_at: int, end: int | None = None) -> Trace | None:
    """On a rank: steps 1 to `saved_at`, a checkpoint, and where `end` is given those up to it, whose trace comes back."""
    engine = parity.build(case)
    parity.train(engine, case, 1, saved_at)
    state = run_state(saved_at, optimizer={"step": engine.optimizer_step})
    save_checkpoint(root, step=saved_at, slices=engine.owned_slices(), groups=engine.groups, attempt=1, state=state)
    return None if end is None else parity.train(engine, case, saved_at + 1, end)


def resume(case: Case, root: Path, *, end: int, used: bool = False) -> Trace:
    """On a rank: from the checkpoint to step `end`, in an engine that began with other weights, or has even trained: nothing of it may
    be left."""
    groups = parity.groups_of(tp=case.tp, dp=case.dp, sequence_parallel=case.sequence_parallel)
    model, training, optimizer, parallel = parity.configs(case)
    device = torch.device("cpu")
    engine = build_engine(model, training, optimizer, parallel, groups, seed=SEED + 1, device=device, deepspeed_overrides={})
    if used:
        parity.train(engine, case, 1, 2)
    choice = newest_checkpoint(root, groups)
    assert choice is not None
    load_into(choice.info.path, engine.owned_slices(), groups)
    engine.refresh()
    engine.set_optimizer_step(int(choice.info.state.optimizer["step"]))
    return parity.train(engine, case, choice.info.step + 1, end)


def distance(ranks: Sequence[Trace], wanted: Trace, *, saved_at: int) -> dict[str, float]:
    """How far the ranks' resumed run is from the steps after `saved_at` of a whole one, as tests/parity.py measures it; raises
    AssertionError where it trained on other batches or other tensors."""
    assert ranks[0].batch_ids == wanted.batch_ids[saved_at:]  # gathered on the first rank
    weights = parity.whole([trace.parameters for trace in ranks])
    assert weights.keys() == wanted.parameters.keys()
    losses = [pair for trace in ranks for pair in zip(trace.losses, wanted.losses[saved_at:], strict=True)]
    norms = [pair for trace in ranks for pair in zip(trace.grad_norms, wanted.grad_norms[saved_at:], strict=True)]
    return {
        "loss": max(abs(one - other) for one, other in losses),
        "grad_norm": max(abs(one - other) / other for one, other in norms),
        "parameter": max(float((weights[name] - tensor).abs().max()) for name, tensor in wanted.parameters.items()),
    }
