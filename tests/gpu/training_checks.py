"""Whole runs of both engines on the device beside plain float64 torch on the CPU, and what else holds for a run."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch

from megatron_lite.inference.generate import start_sampling
from megatron_lite.inference.sampling import SamplingOptions
from megatron_lite.models.batch import Batch
from megatron_lite.models.build import build_model
from megatron_lite.parallel.groups import ProcessGroups
from megatron_lite.parallel.random import DropoutKey
from tests import parity
from tests.gpu.findings import Finding, Recorder, Skip, at_most, same
from tests.gpu.kernel_checks import small_model
from tests.parity import Case

FP32 = [
    Case(stage=None),
    Case(stage=None, accumulation=4, model="mqa", dropout=0.1),
    Case(stage=None, checkpointing="selective"),
    Case(stage=None, checkpointing="full", document_kernel="blocks", dropout=0.1),
    Case(stage=0, model="mqa"),
    Case(stage=1, accumulation=4, dropout=0.1),
    Case(stage=2),
    Case(stage=3, model="mqa"),
    Case(stage=None, compile=True),
]
BF16 = [
    Case(stage=None),
    Case(stage=None, document_kernel="flex"),
    Case(stage=None, document_kernel="blocks"),
    Case(stage=1, accumulation=4),
    Case(stage=2, model="mqa"),
    Case(stage=3),
    Case(stage=None, compile=True),
    Case(stage=1, compile=True, checkpointing="full"),
]
TINY = [Case(stage=None, accumulation=4, model="mqa", dropout=0.1), Case(stage=None)]


def run(recorder: Recorder, device: torch.device, *, tiny: bool) -> None:
    for case in TINY[:1] if tiny else FP32:
        recorder.check(str(case), partial(fp32, replace(case, device=device.type)), needs_s=60 if case.compile else 0)
    for case in TINY[1:] if tiny else BF16:
        recorder.check(
            f"{case}-bf16", partial(bf16, replace(case, device=device.type, precision="bf16")), needs_s=60 if case.compile else 0
        )
    recorder.check("decoding", partial(decoding, device))
    recorder.check("forward and backward never wait for the device", partial(never_waits, device))


def fp32(case: Case) -> Finding:
    """Losses, norms, step 1's gradients and the final weights, within what any layout on CPU is held to."""
    found = parity.distance(parity.joined([parity.run(case)]), parity.expected(case.model, case.dropout))
    if not found.same_batches:
        return Finding("FAILED", "other batches")
    return at_most(parity.LIMITS, {name: getattr(found, name) for name in parity.LIMITS})


def bf16(case: Case) -> Finding:
    """No further from plain torch in bf16 than that is from float64."""
    one_process = parity.expected(case.model, case.dropout, "bf16")
    bound = parity.distance(one_process, parity.expected(case.model, case.dropout))
    found = parity.distance(parity.joined([parity.run(case)]), one_process)
    return at_most({"loss": bound.loss}, {"loss": found.loss})


def deterministic(recorder: Recorder, device: torch.device, *, tiny: bool) -> None:
    """In a process of its own: the setting is for good."""
    from launcher.distributed import make_deterministic

    make_deterministic()
    for case in (
        TINY[1:]
        if tiny
        else [Case(stage=1, accumulation=4), Case(stage=None, document_kernel="flex"), Case(stage=None, document_kernel="blocks")]
    ):
        for precision in ("bf16",) if tiny else ("fp32", "bf16"):
            chosen = replace(case, device=device.type, precision=precision, dropout=0.1)
            recorder.check(f"twice the same, {chosen}", partial(twice, chosen))


def twice(case: Case) -> Finding:
    first, second = (parity.joined([parity.run(case, 5)]) for _ in range(2))
    equal = first.losses == second.losses and first.grad_norms == second.grad_norms
    equal = equal and all(torch.equal(first.parameters[name], tensor) for name, tensor in second.parameters.items())
    return same("losses, norms and weights, bit for bit", equal)


def decoding(device: torch.device) -> Finding:
    """Prompts of unequal lengths, greedily with the cache: the CPU's tokens, and the logits of a forward over the whole."""
    prompts = [[5, 9, 3, 77, 8, 12], [4], [9] * 40]
    answers = []
    for where in (torch.device("cpu"), device):
        model = build_model(small_model(), ProcessGroups.single(), seed=5, device=where)
        answers.append(
            [each.tokens for each in start_sampling(model, prompts, max_new_tokens=24, sampling=SamplingOptions(temperature=0.0)).finish()]
        )
    whole = torch.tensor([prompts[2] + answers[1][2]], device=device)
    positions = torch.arange(whole.shape[1], device=device)[None]
    batch = Batch(whole, torch.full_like(whole, -100), positions, None, torch.zeros(1, dtype=torch.int64, device=device))
    with torch.no_grad():
        expected = model.logits(batch).argmax(-1)[0, len(prompts[2]) - 1 : -1]
    return same(
        "tokens of the CPU, the device and a forward without cache", answers[0] == answers[1] and expected.tolist() == answers[1][2]
    )


def never_waits(device: torch.device) -> Finding:
    """A copy, a forward and a backward of bf16 rows with documents are queued without one synchronisation."""
    if device.type != "cuda":
        raise Skip("a CPU has no queue")
    rows = torch.randint(1000, (2, 257), generator=torch.Generator().manual_seed(2)).numpy()
    model = build_model(small_model(), ProcessGroups.single(), seed=5, device=device, dtype=torch.bfloat16)

    def micro_step() -> torch.Tensor:
        batch = Batch.from_rows(rows[:, :-1], rows[:, 1:], [[0, 7, 100], [0]], [0, 1], document_mask=True, device=device)
        loss, _ = model(batch, DropoutKey(1, 1))
        loss.backward()
        return loss.detach()

    micro_step()  # loads kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = micro_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return Finding("ok" if math.isfinite(float(loss)) else "FAILED", f"{device.type}: queued as a whole")
