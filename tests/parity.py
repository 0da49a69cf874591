"""One short, real run under any layout, and how far it is from the same run in plain torch on one process.

20 updates at lr 3e-3 without warm-up, clipped, on rows of unequal documents that a small model learns. The rows, their division
into micro-batches and the step are those of a real run; what it is compared with is tests/reference.py.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch

from data_pipeline.pair_rows import PairRow, assemble_pairs
from data_pipeline.rows import Row, assemble, batch_id
from launcher.batches import Batches, gather_batch_id
from megatron_lite.checkpoint.slices import logical_slices
from megatron_lite.config import LossConfig, OptimizerConfig, ParallelConfig, TrainingConfig
from megatron_lite.layers import matmul, tiled_attention
from megatron_lite.model_config import ModelConfig
from megatron_lite.models.build import build_model
from megatron_lite.parallel.groups import ProcessGroups
from megatron_lite.training.engine import Engine, build_engine
from megatron_lite.training.step import train_step
from tests import logical, planted_faults, reference
from tests.parity_models import EXTRAS, LENGTH, MODELS, SOURCE_LENGTH, VARIED
from tests.ranks import groups_of, pool

STEPS, LR, SEED, CLIP = 20, 3e-3, 1234, 0.5
BATCH = 8  # sequences an update
BEGIN = 0
LIMITS = {"loss": 1e-4, "grad_norm": 1e-4, "gradient": 1e-5, "parameter": 1e-5}  # absolute, relative, relative, absolute


@dataclass(frozen=True)
class Case:
    """A layout, and what is computed under it. `stage` None is the torch engine."""

    tp: int = 1
    dp: int = 1
    stage: int | None = 1
    sequence_parallel: bool = False
    accumulation: int = 1
    model: str = "gqa"
    dropout: float = 0.0
    precision: str = "fp32"
    checkpointing: str = "none"
    lr: float = LR
    fault: str | None = None  # planted
    device: str = "cpu"
    compile: bool = False
    document_kernel: Literal["auto", "varlen", "flex", "blocks"] = "auto"
    large_kernels: bool = False  # those that CPUs take for large products and long rows

    @property
    def world_size(self) -> int:
        return self.tp * self.dp

    def __str__(self) -> str:
        engine = "torch" if self.stage is None else f"z{self.stage}"
        flags = ("-sp" if self.sequence_parallel else "") + (f"-{self.checkpointing}" if self.checkpointing != "none" else "")
        tail = f"-{self.precision}" if self.precision != "fp32" else ""
        tail += ("-compile" if self.compile else "") + (f"-{self.document_kernel}" if self.document_kernel != "auto" else "")
        tail += "-large" if self.large_kernels else ""
        return f"tp{self.tp}-dp{self.dp}-{engine}{flags}-acc{self.accumulation}-{self.model}-drop{self.dropout}{tail}"


@dataclass
class Trace:
    """What one run gave."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    batch_ids: list[str] = field(default_factory=list)
    gradients: Any = None  # of step 1, before clipping: a rank's parts, then whole tensors by logical name
    parameters: Any = None  # at the end


# ---------------------------------------------------------------------------------------------------------------- data


class SyntheticRows:
    """rows[sample]: documents of unequal length from a noisy cycle through the vocabulary; some rows end early."""

    num_threads = 1  # that read them ahead

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._bytes = np.ones(vocabulary, dtype=np.int64)

    def __getitem__(self, sample: int) -> Row:
        draw = np.random.default_rng([7, sample])
        wanted = LENGTH if draw.random() < 0.5 else int(draw.integers(4, LENGTH))
        pieces: list[np.ndarray] = []
        while wanted > 0:
            size = min(wanted, int(draw.integers(2, 20)))
            tokens = 1 + (draw.integers(0, 12) + 5 * np.arange(size)) % min(24, self._vocabulary - 1)
            noise = draw.random(size) < 0.1
            pieces.append(np.where(noise, draw.integers(0, self._vocabulary, size), tokens).astype(np.int64))
            wanted -= size
        lengths = [piece.size for piece in pieces]
        return assemble(
            np.concatenate(pieces), lengths, [BEGIN] * len(pieces), sequence_length=LENGTH, begin_id=BEGIN, token_bytes=self._bytes
        )


class SyntheticPairRows(SyntheticRows):
    """rows[sample]: pairs of such documents; the target is the source's tokens, each doubled and one more."""

    def __getitem__(self, sample: int) -> PairRow:  # type: ignore[override]
        draw = np.random.default_rng([8, sample])
        pairs: list[tuple[np.ndarray, np.ndarray]] = []
        left = [SOURCE_LENGTH, LENGTH - int(draw.integers(0, 2) * draw.integers(0, 9))]
        while min(left) >= 4:
            size = int(draw.integers(2, min(9, min(left)) + 1))
            source = 1 + (draw.integers(0, 12) + 5 * np.arange(size)) % 24
            target = np.concatenate([2 * source % self._vocabulary, [3, BEGIN]])[: left[1]]
            pairs.append((source.astype(np.int64), target.astype(np.int64)))
            left = [left[0] - source.size, left[1] - target.size]
        sides = [[pair[side] for pair in pairs] for side in (0, 1)]
        tokens, lengths = np.concatenate([*sides[0], *sides[1]]), [[text.size for text in side] for side in sides]
        room = {"source_length": SOURCE_LENGTH, "target_length": LENGTH}
        return assemble_pairs(tokens, *lengths, **room, begin_id=BEGIN, token_bytes=self._bytes)


def rows_for(model: ModelConfig) -> SyntheticRows:
    return (SyntheticPairRows if model.family == "seq2seq" else SyntheticRows)(model.vocabulary)


def rows_of(step: int, model: ModelConfig) -> list[Row] | list[PairRow]:
    source = rows_for(model)
    return [source[sample] for sample in range((step - 1) * BATCH, step * BATCH)]


# ------------------------------------------------------------------------------------------------------------- one run


def configs(case: Case) -> tuple[ModelConfig, TrainingConfig, OptimizerConfig, ParallelConfig]:
    model = MODELS[case.model].model_copy(update={"hidden_dropout": case.dropout, "attention_dropout": case.dropout})
    training = TrainingConfig(
        steps=STEPS,
        sequence_length=LENGTH,
        source_length=SOURCE_LENGTH if model.family == "seq2seq" else None,
        global_batch_size=BATCH,
        micro_batch_size=BATCH // case.dp // case.accumulation,
        precision=case.precision,
        activation_checkpointing=case.checkpointing,
        engine="torch" if case.stage is None else "deepspeed",
        compile=case.compile,
        document_kernel=case.document_kernel,
        loss=EXTRAS.get(case.model, LossConfig()),
    )
    return (
        model,
        training,
        optimizer_config(case),
        ParallelConfig(tp=case.tp, sequence_parallel=case.sequence_parallel, zero_stage=case.stage or 0),
    )


def optimizer_config(case: Case) -> OptimizerConfig:
    eps = 1e-4 if case.model in VARIED[1:] else 1e-6  # some have gradients of 1e-6, of which Adam would make as much as of others
    return OptimizerConfig(lr=case.lr, eps=eps, max_grad_norm=CLIP, betas=(0.9, 0.95))


def build(case: Case, *, overrides: dict[str, Any] | None = None) -> Engine:
    """On a rank: the engine of the case."""
    groups = groups_of(tp=case.tp, dp=case.dp, sequence_parallel=case.sequence_parallel)
    model, training, optimizer, parallel = configs(case)
    return build_engine(
        model, training, optimizer, parallel, groups, seed=SEED, device=torch.device(case.device), deepspeed_overrides=overrides or {}
    )


def run(case: Case, steps: int = STEPS) -> Trace:
    """On a rank: the run, with this rank's parts of the tensors."""
    with planted_faults.planted(case.fault), large_kernels() if case.large_kernels else contextlib.nullcontext():
        return train(build(case), case, 1, steps)


def train(engine: Engine, case: Case, first: int, last: int) -> Trace:
    """On a rank: these steps of the run, with this rank's parts of the tensors."""
    trace = Trace()
    batches = Batches(
        rows_for(MODELS[case.model]),
        dp=engine.groups.dp,
        global_batch_size=BATCH,
        micro_batch_size=BATCH // case.dp // case.accumulation,
        document_mask=True,
        device=torch.device(case.device),
        start_sample=(first - 1) * BATCH,
    )
    for step in range(first, last + 1):
        batch = next(batches)
        result = train_step(engine, batch.micro_batches, step=step, lr=case.lr, seed=SEED)
        trace.losses.append(result.loss)
        trace.grad_norms.append(result.grad_norm)
        trace.batch_ids.append(gather_batch_id(batch.digests, engine.groups.dp))
        if step == 1:
            trace.gradients = parts(engine, "exp_avg", scale=1 / (1 - 0.9) / min(1.0, CLIP / (result.grad_norm + 1e-6)))
    batches.close()
    trace.parameters = parts(engine, "master")
    return trace


@contextlib.contextmanager
def large_kernels() -> Iterator[None]:
    """Let the kernels for large shapes serve all: tiles of 8 queries, so that a row has several."""
    with (
        mock.patch.object(matmul, "_LEAST_MULTIPLICATIONS", 0),
        mock.patch.object(tiled_attention, "_LEAST_SCORES", 0),
        mock.patch.object(tiled_attention, "tile_height", lambda sharing: 8),
    ):
        yield


Part = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...], int, np.ndarray]


def parts(engine: Engine, state: str, *, scale: float = 1.0) -> list[Part]:
    """This rank's written slices of a state: (logical name, its shape, block start, block shape, first element, values)."""
    found = []
    for owned in engine.owned_slices():
        if owned.state == state:
            for part in logical_slices(owned, to_write=True):
                block = part.block
                found.append(
                    (block.name, block.global_shape, block.start, block.shape, part.first, part.view.cpu().numpy() * np.float32(scale))
                )
    return found


def whole(ranks: Sequence[list[Part]]) -> dict[str, torch.Tensor]:
    """Logical tensors from every rank's parts; what several ranks hold must be bit-equal, and nothing may be missing."""
    found: dict[str, np.ndarray] = {}
    for rank in ranks:
        for name, shape, start, block, first, values in rank:
            tensor = found.setdefault(name, np.full(shape, np.nan, dtype=np.float32))
            where = tuple(slice(at, at + size) for at, size in zip(start, block))
            flat = tensor[where].reshape(-1)
            old = flat[first : first + values.size]
            same = np.isnan(old) | (old == values)
            assert same.all(), f"{name} differs between ranks by up to {np.abs(old - values)[~same].max()}"
            flat[first : first + values.size] = values
            tensor[where] = flat.reshape(block)
    for name, tensor in found.items():
        assert not np.isnan(tensor).any(), f"{name}: elements on no rank"
    return {name: torch.from_numpy(tensor) for name, tensor in found.items()}


def joined(traces: Sequence[Trace]) -> Trace:
    """The run's trace from its ranks': losses and norms must be the same numbers on all of them."""
    first = traces[0]
    for other in traces[1:]:
        assert (other.losses, other.grad_norms) == (first.losses, first.grad_norms), "ranks disagree on loss or gradient norm"
    return replace(first, gradients=whole([trace.gradients for trace in traces]), parameters=whole([trace.parameters for trace in traces]))


# ----------------------------------------------------------------------------------------------------------- reference


@functools.cache
def expected(model: str, dropout: float, precision: str = "fp32", lr: float = LR, steps: int = STEPS) -> Trace:
    """The same run by tests/reference.py, in this process; fp32 by float64, so that the distance is the layout's alone."""
    rounding = "fp64" if precision == "fp32" else precision
    case = Case(model=model, dropout=dropout, precision=precision, lr=lr)
    config = configs(case)[0]
    start = logical.assemble([logical.blocks_of(build_model(config, ProcessGroups.single(), seed=SEED))])
    rows = [rows_of(step, config) for step in range(1, steps + 1)]
    batches = [[plain_row(row, number * BATCH + place) for place, row in enumerate(batch)] for number, batch in enumerate(rows)]
    given = {"lrs": [lr] * steps, "seed": SEED, "precision": rounding, "extras": EXTRAS.get(model)}
    ran = reference.train(start, config, optimizer_config(case), batches, **given)
    ids = [batch_id([row.digest() for row in batch]) for batch in rows]
    return Trace(ran.losses, ran.grad_norms, ids, ran.first_gradients, ran.weights)


def plain_row(row: Row | PairRow, sample: int) -> reference.Row:
    of_source = (row.source, row.source_starts) if isinstance(row, PairRow) else ()
    return reference.Row(row.inputs, row.targets, row.segment_starts, sample, *of_source)


@dataclass(frozen=True)
class Distance:
    """How far a run is from the reference: the worst over all steps or tensors."""

    loss: float  # absolute, nats
    grad_norm: float  # relative
    gradient: float  # relative, Frobenius
    parameter: float  # absolute
    same_batches: bool

    @property
    def within_limits(self) -> bool:
        return self.same_batches and all(getattr(self, name) <= limit for name, limit in LIMITS.items())

    def __str__(self) -> str:
        numbers = ", ".join(f"{name} {getattr(self, name):.1e}" for name in LIMITS)
        return numbers + ("" if self.same_batches else ", other batches")


def distance(trace: Trace, wanted: Trace) -> Distance:
    """One number's gradient may be the small sum of large ones: it is held to the size of the others."""
    whole = sum(float(g.square().sum()) for g in wanted.gradients.values()) ** 0.5
    least = {name: 0.01 * whole / len(wanted.gradients) ** 0.5 if g.numel() == 1 else 0.0 for name, g in wanted.gradients.items()}
    assert trace.gradients.keys() == wanted.gradients.keys() == wanted.parameters.keys(), "other logical tensors"
    return Distance(
        loss=max(abs(a - b) for a, b in zip(trace.losses, wanted.losses, strict=True)),
        grad_norm=max(abs(a - b) / b for a, b in zip(trace.grad_norms, wanted.grad_norms, strict=True)),
        gradient=max(
            float((trace.gradients[name] - g).norm() / g.norm().clamp_min(max(least[name], 1e-30))) for name, g in wanted.gradients.items()
        ),
        parameter=max(float((trace.parameters[name] - p).abs().max()) for name, p in wanted.parameters.items()),
        same_batches=trace.batch_ids == wanted.batch_ids,
    )


def measure(case: Case, steps: int = STEPS) -> Distance:
    """Run the case on its ranks and compare; raises AssertionError where ranks disagree with each other."""
    trace = joined(pool(case.world_size).run(run, case, steps, timeout_s=300.0))
    return distance(trace, expected(case.model, case.dropout, case.precision, case.lr, steps))


def is_real_learning(trace: Trace) -> bool:
    """Clipped in at least 15 of 20 updates, and the loss fell by a nat."""
    return (
        sum(norm > CLIP for norm in trace.grad_norms) >= 15
        and trace.losses[0] - min(trace.losses[-3:]) >= 1.0
        and math.isfinite(trace.losses[-1])
    )
