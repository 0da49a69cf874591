"""Every attention kernel, the loss, dropout's bits and the initial weights on the device, beside float64 or the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from megatron_lite.layers.cross_entropy import vocab_parallel_cross_entropy
from megatron_lite.layers.document_kernels import DocumentKernel, choose_kernel
from megatron_lite.layers.kernels import AttentionMask, attention
from megatron_lite.model_config import ModelConfig
from megatron_lite.models.batch import Batch
from megatron_lite.models.build import build_model
from megatron_lite.parallel.groups import Axis, ProcessGroups
from megatron_lite.parallel.random import DropoutKey, keep_mask, sample_keys, site
from tests.gpu.findings import Finding, Recorder, Skip, at_most, same

# Relative Frobenius distance from float64 on the same rounded inputs: some roundings of the dtype.
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
KERNELS: tuple[DocumentKernel, ...] = ("pieces", "varlen", "flex", "blocks")


def run(recorder: Recorder, device: torch.device, *, tiny: bool) -> None:
    length, sizes = (200, (16,)) if tiny else (700, (64, 128))
    for dtype, head_size in itertools.product(LIMITS, sizes):
        name = f"{str(dtype).removeprefix('torch.')}, E {head_size}"
        for kernel in KERNELS:
            recorder.check(f"{kernel}, {name}", partial(documents, kernel, device, dtype, length, head_size))
        recorder.check(f"causal, {name}", partial(compare, device, dtype, length, length, head_size, lambda _: AttentionMask()))
        recorder.check(f"causal, fewer queries, {name}", partial(compare, device, dtype, 40, length, head_size, lambda _: AttentionMask()))
        for queries in (1, 40):
            recorder.check(
                f"cached, {queries} queries, {name}", partial(compare, device, dtype, queries, length, head_size, positions_mask)
            )
    for kernel in ("varlen", "flex"):
        recorder.check(
            f"{kernel} in compiled code", partial(documents, kernel, device, torch.bfloat16, length, sizes[-1], compiled=True), needs_s=60
        )
    for dtype in LIMITS:
        recorder.check(f"loss and its gradients, {str(dtype).removeprefix('torch.')}", partial(loss, device, dtype))
    recorder.check("dropout's bits", partial(dropout_bits, device))
    recorder.check("initial weights", partial(initial_weights, device))
    recorder.check("logits of a model, fp32", partial(logits, device))


# ----------------------------------------------------------------------------------------------------------- attention


def segments_of(length: int) -> Tensor:
    """[4, S]: many documents, one, short ones then a long one, two."""
    starts = torch.zeros(4, length, dtype=torch.bool)
    starts[0] = torch.rand(length, generator=torch.Generator().manual_seed(1)) < 0.03
    starts[2, : length // 3] = True
    starts[3, length // 2] = True
    starts[:, 0] = True
    return (starts.cumsum(1) - 1).to(torch.int32)


def documents(
    kernel: DocumentKernel, device: torch.device, dtype: torch.dtype, length: int, head_size: int, *, compiled: bool = False
) -> Finding:
    if kernel == "pieces":
        available = device.type == "cpu"
    elif kernel == "blocks":
        available = True
    else:
        available = device.type == "cuda" and choose_kernel(kernel, device=device, dtype=dtype, head_size=head_size).name == kernel
    if not available:
        raise Skip(f"{kernel} is not for {dtype} on {device.type}")
    return compare(device, dtype, length, length, head_size, partial(document_mask, length=length, kernel=kernel), compiled=compiled)


def document_mask(device: torch.device, *, length: int, kernel: DocumentKernel) -> AttentionMask:
    return AttentionMask.of_segments(segments_of(length).to(device), kernel=kernel)


def positions_mask(device: torch.device) -> AttentionMask:
    """Decoding: filled in by `compare`, which knows the sizes."""
    raise NotImplementedError


def compare(
    device: torch.device,
    dtype: torch.dtype,
    num_queries: int,
    num_keys: int,
    head_size: int,
    mask_on: Callable[[torch.device], AttentionMask],
    *,
    compiled: bool = False,
) -> Finding:
    """Output and gradients of 8 heads over 2 KV heads, beside the formula in float64 on the CPU."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 8, num_queries, head_size), (4, 2, num_keys, head_size), (4, 2, num_keys, head_size), (4, 8, num_queries, head_size)]
    rounded = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    if mask_on is positions_mask:
        keys = torch.arange(num_keys).expand(4, -1) - torch.tensor([[0], [3], [0], [17]])  # rows 1 and 3 begin with padding
        masks = [AttentionMask.of_positions(keys[:, num_keys - num_queries :].to(where), keys.to(where)) for where in ("cpu", device)]
    else:
        masks = [mask_on(torch.device("cpu")), mask_on(device)]
    wanted = by_formula(*(x.double() for x in rounded), masks[0].as_blocks(num_queries, num_keys, torch.device("cpu")))
    q, k, v, upstream = (x.to(device) for x in rounded)
    for x in (q, k, v):
        x.requires_grad_()
    function = torch.compile(attention) if compiled else attention
    mixed = function(q, k, v, mask=masks[1])
    mixed.backward(upstream)
    found = {name: relative(x, y) for name, x, y in zip(("out", "dq", "dk", "dv"), (mixed.detach(), q.grad, k.grad, v.grad), wanted)}
    return at_most(dict.fromkeys(found, LIMITS[dtype]), found)


def by_formula(q: Tensor, k: Tensor, v: Tensor, upstream: Tensor, allowed: Tensor) -> list[Tensor]:
    for x in (q, k, v):
        x.requires_grad_()
    keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (q @ keys.transpose(-1, -2)) * q.shape[-1] ** -0.5
    mixed = scores.masked_fill(~allowed, float("-inf")).softmax(-1) @ values
    mixed.backward(upstream)
    assert q.grad is not None and k.grad is not None and v.grad is not None
    return [mixed.detach(), q.grad, k.grad, v.grad]


def relative(ours: Tensor | None, wanted: Tensor) -> float:
    assert ours is not None
    return float((ours.double().cpu() - wanted).norm() / wanted.norm())


# ------------------------------------------------------------------------------------------------------------- the rest


def loss(device: torch.device, dtype: torch.dtype) -> Finding:
    """The chunked, fused loss of 300 tokens over 5,000 words, some of them without a target."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 64, generator=generator).to(dtype)
    weight = (torch.randn(5000, 64, generator=generator) * 0.2).to(dtype)
    targets = torch.randint(5000, (300,), generator=generator).masked_fill(torch.rand(300, generator=generator) < 0.2, -100)
    wide = [x.double().requires_grad_() for x in (hidden, weight)]
    torch.nn.functional.cross_entropy(wide[0] @ wide[1].t(), targets, reduction="sum").backward()
    exact = float(torch.nn.functional.cross_entropy((wide[0] @ wide[1].t()).detach(), targets, reduction="sum"))
    ours = [x.to(device).requires_grad_() for x in (hidden, weight)]
    summed = vocab_parallel_cross_entropy(*ours, targets.to(device), Axis("tp"), vocab_start=0, num_valid_rows=5000, chunk_tokens=128)
    summed.backward()
    found = {"loss": abs(float(summed.detach()) - exact) / exact}
    found |= {name: relative(x.grad, y.grad) for name, x, y in zip(("hidden", "weight"), ours, wide) if y.grad is not None}
    return at_most({"loss": LIMITS[dtype] / 10, "hidden": LIMITS[dtype], "weight": LIMITS[dtype]}, found)


def dropout_bits(device: torch.device) -> Finding:
    masks = []
    for where in (torch.device("cpu"), device):
        keys = sample_keys(DropoutKey(3, 7), torch.tensor([0, 5, 1 << 40], device=where))
        masks.append(keep_mask(keys, site("mlp"), [2, 9], [33, 65], 300, 0.1).cpu())
    return same("1,930,500 bits", torch.equal(*masks))


def small_model() -> ModelConfig:
    return ModelConfig(
        vocab_size=1000,
        hidden_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=512,
        max_position_embeddings=256,
    )


def initial_weights(device: torch.device) -> Finding:
    models = [build_model(small_model(), ProcessGroups.single(), seed=5, device=where) for where in ("cpu", device)]
    pairs = zip(*(model.state_dict().values() for model in models))
    return same("initial weights", all(torch.equal(ours.cpu(), theirs.cpu()) for ours, theirs in pairs))


def logits(device: torch.device) -> Finding:
    rows = torch.randint(1000, (2, 201), generator=torch.Generator().manual_seed(2)).numpy()
    found = []
    for where in (torch.device("cpu"), device):
        batch = Batch.from_rows(rows[:, :-1], rows[:, 1:], [[0, 7, 100], [0]], [0, 1], document_mask=True, device=where)
        model = build_model(small_model(), ProcessGroups.single(), seed=5, device=where)
        with torch.no_grad():
            found.append(model.logits(batch).cpu())
    return at_most({"largest difference": 1e-4}, {"largest difference": float((found[0] - found[1]).abs().max())})
