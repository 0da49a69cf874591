"""Training steps in bf16 beside peers, on the same rows: tokens a second, MFU, memory. fp32 master weights for all.

MFU counts sizes.flops_per_token for everybody, documents or not, over the device's peak from launcher/devices.py. Programs
take turns in one process, each alone on the device; the median of the timed steps counts, ended by the step's own wait.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from launcher.devices import mfu, peak_flops
from megatron_lite.config import OptimizerConfig, ParallelConfig, TrainingConfig
from megatron_lite.layers.kernels import AttentionMask, attention
from megatron_lite.model_config import ModelConfig
from megatron_lite.models.batch import Batch
from megatron_lite.models.init import distribution
from megatron_lite.parallel.groups import ProcessGroups
from megatron_lite.parallel.shard_spec import ShardSpec
from megatron_lite.sizes import flops_per_token, num_parameters
from megatron_lite.training.engine import Engine, build_engine
from megatron_lite.training.step import train_step
from tests.gpu import peers
from tests.gpu.findings import Finding, Recorder, Skip

WARM_UP, TIMED = 4, 8  # steps; with documents, the first ones meet new shapes
DOCUMENT_TOKENS = 500  # on average


@dataclass(frozen=True)
class Task:
    """A model, and the rows of one update on one device."""

    model: ModelConfig
    length: int
    num_rows: int

    @property
    def tokens(self) -> int:
        return self.length * self.num_rows


def task(*, hidden: int, layers: int, heads: int, kv: int, inner: int, vocabulary: int, length: int, rows: int) -> Task:
    model = ModelConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        intermediate_size=inner,
        max_position_embeddings=length,
    )
    return Task(model, length, rows)


TINY = task(hidden=64, layers=2, heads=4, kv=2, inner=128, vocabulary=200, length=128, rows=2)
ONE_BILLION = task(hidden=2048, layers=16, heads=32, kv=8, inner=8192, vocabulary=32768, length=2048, rows=8)
EIGHT_BILLION_WIDE = task(hidden=4096, layers=4, heads=32, kv=8, inner=14336, vocabulary=128256, length=4096, rows=4)


def one_billion(recorder: Recorder, device: torch.device, *, tiny: bool) -> None:
    recorder.check("bf16 matrix product, 8192 cubed", partial(product, device, 128 if tiny else 8192))
    for kernel in ("pieces", "varlen", "flex", "blocks"):
        recorder.check(f"attention alone, {kernel}", partial(documents_alone, kernel, TINY if tiny else ONE_BILLION, device), needs_s=20)
    for backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION"):
        recorder.check(f"attention alone, causal, {backend}", partial(causal_alone, backend, TINY if tiny else ONE_BILLION, device))
    programs(recorder, TINY if tiny else ONE_BILLION, device, compiled=not tiny)


def eight_billion_wide(recorder: Recorder, device: torch.device, *, tiny: bool) -> None:
    programs(recorder, TINY if tiny else EIGHT_BILLION_WIDE, device, compiled=not tiny)


def programs(recorder: Recorder, task: Task, device: torch.device, *, compiled: bool) -> None:
    """Ours as it is and with documents, then the same engine compiled; peers; DeepSpeed."""
    with quick_weights():
        ours = Ours(task, device, engine="torch")
        recorder.check("ours", ours.measure)
        recorder.check("ours, documents", partial(ours.measure, documents=True))
        if compiled:
            ours.compile()
            recorder.check("ours, compiled", ours.measure, needs_s=30)
            recorder.check("ours, compiled, documents", partial(ours.measure, documents=True), needs_s=20)
            recorder.check("profile of ours, compiled, documents", partial(ours.profile, recorder.folder), needs_s=10)
        ours.close()
        for name, make in (("transformers", peers.transformers), ("plain torch", peers.plain)):
            recorder.check(f"{name}, autocast", partial(measure_peer, make, task, device, masters=False, compiled=False), needs_s=15)
            if compiled:
                recorder.check(
                    f"{name}, autocast, compiled", partial(measure_peer, make, task, device, masters=False, compiled=True), needs_s=40
                )
        recorder.check(
            "plain torch, fp32 masters", partial(measure_peer, peers.plain, task, device, masters=True, compiled=compiled), needs_s=40
        )
        recorder.check("ours, DeepSpeed ZeRO-1", partial(deepspeed, task, device, compiled=compiled), needs_s=40)


# ---------------------------------------------------------------------------------------------------------------- ours


class Ours:
    """An engine on rows of random tokens."""

    def __init__(self, task: Task, device: torch.device, *, engine: str) -> None:
        self.task, self.device, self._number = task, device, 0
        training = TrainingConfig(steps=1000, sequence_length=task.length, global_batch_size=task.num_rows, precision="bf16", engine=engine)
        parallel = ParallelConfig(zero_stage=1 if engine == "deepspeed" else 0)
        self.engine: Engine | None = build_engine(
            task.model, training, OptimizerConfig(lr=3e-4), parallel, ProcessGroups.single(), seed=1, device=device
        )

    def compile(self) -> None:
        assert self.engine is not None
        for layer in self.engine.model.layers:
            layer.compile()

    def close(self) -> None:
        self.engine = None
        forget(self.device)

    def measure(self, *, documents: bool = False) -> Finding:
        return measure(lambda: self.step(documents=documents), self.task, self.device)

    def step(self, *, documents: bool) -> float:
        assert self.engine is not None
        self._number += 1
        batch = rows_of(self.task, self._number, self.device, documents=documents)
        return train_step(self.engine, [batch], step=self._number, lr=3e-4, seed=1).loss

    def profile(self, folder: Path) -> Finding:
        """Where the device's time goes in two steps."""
        if self.device.type != "cuda":
            raise Skip("on a GPU only")
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(2):
                self.step(documents=True)
        table = profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=70)
        file = folder / f"profile-{self.task.model.hidden_size}.txt"
        file.write_text(table)
        return Finding("measured", f"in {file.name}")


def deepspeed(task: Task, device: torch.device, *, compiled: bool) -> Finding:
    forget(device)
    ours = Ours(task, device, engine="deepspeed")
    if compiled:
        ours.compile()
    return ours.measure()


def rows_of(task: Task, number: int, device: torch.device, *, documents: bool) -> Batch:
    random = np.random.default_rng(number)
    tokens = random.integers(0, task.model.vocabulary, (task.num_rows, task.length + 1))
    starts = [[0]] * task.num_rows
    if documents:
        mean = min(DOCUMENT_TOKENS, task.length / 4)
        ends = [np.cumsum(random.lognormal(np.log(mean) - 0.5, 1.0, 1000).astype(int) + 1) for _ in range(task.num_rows)]
        starts = [[0, *end[end < task.length]] for end in ends]
    return Batch.from_rows(tokens[:, :-1], tokens[:, 1:], starts, range(task.num_rows), document_mask=documents, device=device)


@contextmanager
def quick_weights() -> Iterator[None]:
    """Initial weights of the right sizes from one repeated piece of noise: a billion exact ones take half a minute."""
    noise = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))

    def quick(spec: ShardSpec, config: ModelConfig, seed: int, *, start: int = 0, stop: int | None = None) -> torch.Tensor:
        whole = torch.zeros(int(np.prod(spec.local_shape)))
        for piece in spec.pieces:
            what, part = distribution(piece.name, piece.global_shape, config), whole[piece.offset : piece.offset + piece.numel]
            if what.std == 0.0:
                part.fill_(what.constant)
            else:
                part.copy_((noise * what.std).repeat(-(-piece.numel // noise.numel()))[: piece.numel])
        return whole[start:stop]

    import megatron_lite.training.engine_deepspeed
    import megatron_lite.training.engine_torch  # noqa: F401

    modules = ("models.init", "training.engine_torch", "training.engine_deepspeed")
    patches = [mock.patch(f"megatron_lite.{module}.local_init", quick) for module in modules]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


# --------------------------------------------------------------------------------------------------------------- peers


def measure_peer(make: Callable[..., Any], task: Task, device: torch.device, *, masters: bool, compiled: bool) -> Finding:
    forget(device)  # the program before
    loop = peers.Loop(make, task.model, device, masters=masters)
    assert loop.num_parameters() == num_parameters(task.model), "another model"
    if compiled:
        loop.compile()
    number = 0

    def step() -> float:
        nonlocal number
        number += 1
        batch = rows_of(task, number, device, documents=False)
        return loop.step(batch.inputs, batch.targets)

    return measure(step, task, device)


# ----------------------------------------------------------------------------------------------------------- measuring


def measure(step: Callable[[], float], task: Task, device: torch.device) -> Finding:
    """Warm up, then time steps; what the first one took longer is compilation and first allocations."""
    began = time.perf_counter()
    losses = [step()]
    first_s = time.perf_counter() - began
    losses += [step() for _ in range(WARM_UP - 1)]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(TIMED):
        began = time.perf_counter()
        losses.append(step())
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    median = statistics.median(times)
    numbers: dict[str, Any] = {
        "step_s": median,
        "step_s_all": times,
        "tokens_per_second": task.tokens / median,
        "first_step_s": first_s,
        "losses": losses,
    }
    text = f"{task.tokens / median:,.0f} tokens/s, step {median * 1e3:.1f} ms (from {min(times) * 1e3:.1f} to {max(times) * 1e3:.1f})"
    if device.type == "cuda":
        peak = peak_flops(torch.cuda.get_device_name(), "bf16")
        numbers["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        text += f", {numbers['peak_memory_gib']:.1f} GiB"
        if peak is not None:
            flops = flops_per_token(task.model, task.length)
            numbers["mfu"] = mfu(tokens_per_second=task.tokens / median, flops_per_token=flops, num_devices=1, peak=peak)
            text += f", MFU {100 * numbers['mfu']:.1f} %"
    return Finding("measured", f"{text}, first step {first_s:.1f} s", numbers)


def product(device: torch.device, size: int) -> Finding:
    """What a matrix product reaches here: MFU's practical ceiling."""
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    seconds = timed(lambda: a @ b, device, repeats=10)
    return Finding("measured", f"{2 * size**3 / seconds / 1e12:.0f} TFLOP/s", {"tflops": 2 * size**3 / seconds / 1e12})


def documents_alone(kernel: Any, task: Task, device: torch.device) -> Finding:
    """Forward and backward of one layer's attention over rows of documents."""
    if (kernel == "pieces") != (device.type == "cpu") and kernel != "blocks":
        raise Skip(f"not on {device.type}")
    batch = rows_of(task, 1, device, documents=True)
    assert batch.segments is not None
    return attention_alone(
        AttentionMask.of_segments(batch.segments, kernel=kernel, boundaries=batch.boundaries, longest=batch.longest), task, device
    )


def causal_alone(backend: str, task: Task, device: torch.device) -> Finding:
    """The same over rows of one document, by one of SDPA's kernels."""
    with sdpa_kernel(getattr(SDPBackend, backend)):
        try:
            return attention_alone(AttentionMask(), task, device)
        except RuntimeError as error:
            if device.type == "cuda" and "No available kernel" not in str(error):
                raise
            raise Skip(f"no such kernel on {device.type}") from error


def attention_alone(mask: AttentionMask, task: Task, device: torch.device) -> Finding:
    sizes = [task.model.num_attention_heads, task.model.kv_heads, task.model.kv_heads]
    heads = torch.randn(task.num_rows, task.length, sum(sizes), task.model.head_size, device=device).bfloat16().requires_grad_()
    upstream = torch.randn(task.num_rows, task.length, sizes[0], task.model.head_size, device=device).bfloat16().transpose(1, 2)

    def both() -> None:
        attention(*heads.transpose(1, 2).split(sizes, dim=1), mask=mask).backward(upstream)

    seconds = timed(both, device, repeats=5)
    return Finding("measured", f"{seconds * 1e3:.2f} ms", {"seconds": seconds})


def timed(function: Callable[[], Any], device: torch.device, *, repeats: int) -> float:
    """Seconds of one call, the median."""
    found = []
    for number in range(repeats + 2):
        began = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if number >= 2:
            found.append(time.perf_counter() - began)
    return statistics.median(found)


def forget(device: torch.device) -> None:
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
