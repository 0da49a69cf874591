"""The same model and training in obvious maths: one process, one row at a time, none of megatron_lite's code.

Weights are a dict of whole logical tensors. What every layout must reproduce is compared with this.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from megatron_lite.config import LossConfig, OptimizerConfig
from megatron_lite.model_config import ModelConfig
from tests import reference_attention, reference_blocks
from tests.reference_attention import wide

Weights = dict[str, Tensor]
EMBEDDINGS = ("embedding.weight", "position_embedding.weight", "lm_head.weight")


@dataclass(frozen=True)
class Row:
    """One training row: S inputs, S targets (-100: none), where document pieces start, and the sample number."""

    inputs: np.ndarray
    targets: np.ndarray
    segment_starts: Sequence[int] = (0,)
    sample: int = 0
    source: np.ndarray | None = None  # of an encoder-decoder: what its encoder reads, and where pieces start there
    source_starts: Sequence[int] = (0,)


@dataclass(frozen=True)
class Step:
    """(seed, number) of a training step, for dropout."""

    seed: int
    number: int


# ---------------------------------------------------------------------------------------------------------- dropout


def _mix64(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def dropout_factor(probability: float, step: Step, sample: int, site: str, rows: Sequence[int], num_channels: int) -> Tensor:
    """fp32 [*rows, channels]: 0 with `probability`, else 1/(1 - probability); `site` is "layer place" or a place, `rows` the
    sizes of the coordinates between."""
    state = np.array(0, dtype=np.uint64)
    golden = np.uint64(0x9E3779B97F4A7C15)
    coordinates = np.meshgrid(*[np.arange(size, dtype=np.uint64) for size in rows], indexing="ij")
    with np.errstate(over="ignore"):
        for word in (np.uint64(step.seed), np.uint64(step.number), np.uint64(sample)):
            state = _mix64(state ^ _mix64(word + golden))
        for name in site.split(" "):
            state = _mix64(state ^ np.uint64(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")))
        for word in coordinates:
            state = _mix64(state ^ _mix64(word + golden))
        low = (state & np.uint64(0xFFFFFFFF)).astype(np.uint32)[..., None]
        high = (state >> np.uint64(32)).astype(np.uint32)[..., None]
        bits = np.arange(num_channels, dtype=np.uint32) * np.uint32(0x9E3779B1) ^ low
        bits = (bits ^ (bits >> np.uint32(16))) * np.uint32(0x7FEB352D)
        bits = bits ^ high
        bits = (bits ^ (bits >> np.uint32(15))) * np.uint32(0x846CA68B)
        bits = bits ^ (bits >> np.uint32(16))
    keep = (bits & np.uint32(0x7FFFFFFF)).astype(np.int64) >= round(probability * 2**31)
    return torch.from_numpy(keep.astype(np.float32)) / (1 - probability)


# ------------------------------------------------------------------------------------------------------------ model


def row_logits(weights: Weights, config: ModelConfig, row: Row, *, document_mask: bool = True, step: Step | None = None) -> Tensor:
    """[S, V] in the weights' dtype."""
    length = len(row.inputs)
    piece = (
        np.searchsorted(np.asarray(row.segment_starts), np.arange(length), side="right") if document_mask else np.ones(length, dtype=int)
    )
    positions = torch.tensor([i - min(j for j in range(length) if piece[j] == piece[i]) for i in range(length)])
    visible = torch.tensor([[piece[i] == piece[j] and j <= i for j in range(length)] for i in range(length)])

    def dropped(x: Tensor, site: str) -> Tensor:
        if step is None or config.hidden_dropout == 0:
            return x
        return (x * dropout_factor(config.hidden_dropout, step, row.sample, site, [length], x.shape[-1])).to(x.dtype)

    def attention(h: Tensor, w: Weights, layer: int) -> Tensor:
        factor = None
        if step is not None and config.attention_dropout > 0:
            site = f"layers.{layer} probabilities"
            factor = dropout_factor(config.attention_dropout, step, row.sample, site, [config.num_attention_heads, length], length)
        return reference_attention.attention(w, config, h, positions, visible, factor, layer=layer)

    x = weights["embedding.weight"][torch.as_tensor(row.inputs).long()] * reference_blocks.embedding_multiplier(config)
    x = dropped(x + reference_attention.position_embedding(weights, config, positions).to(x.dtype), "embedding")
    for layer in range(config.num_hidden_layers):
        w = {name.removeprefix(f"layers.{layer}."): tensor for name, tensor in weights.items() if name.startswith(f"layers.{layer}.")}
        w |= {name: weights[name] for name in ("position_bias.weight",) if name in weights}
        x = reference_blocks.layer(
            x,
            w,
            config,
            {
                "attention": lambda h, w=w, layer=layer: attention(h, w, layer),
                "mlp": lambda h, w=w: reference_blocks.mlp(h, w, config),
            },
            lambda out, name, layer=layer: dropped(out, f"layers.{layer} {name}"),
            num_layers=config.num_hidden_layers,
        )
    if config.norm.placement != "post":
        x = reference_blocks.norm(x, weights, "final_norm", config)
    head_weight = weights["embedding.weight" if config.tie_word_embeddings else "lm_head.weight"]
    return reference_blocks.logits(x @ head_weight.T, config)


def row_loss(
    weights: Weights,
    config: ModelConfig,
    row: Row,
    *,
    document_mask: bool = True,
    step: Step | None = None,
    extras: LossConfig | None = None,
) -> Tensor:
    """Sum over the row's targets of -log softmax(logits)[target], fp32; with `extras` of what is optimised."""
    if config.family == "seq2seq":
        from tests.reference_seq2seq import row_logits as logits_of_pairs

        logits = wide(logits_of_pairs(weights, config, row, step=step))
    else:
        logits = wide(row_logits(weights, config, row, document_mask=document_mask, step=step))
    targets = torch.as_tensor(row.targets).long()
    places = (targets != -100).nonzero()[:, 0]
    negative = -logits[places].log_softmax(-1)
    loss = negative[range(len(places)), targets[places]]
    if extras is not None:
        smoothing = extras.label_smoothing
        log_sum = logits[places].exp().sum(-1).log()
        loss = (1 - smoothing) * loss + smoothing * negative.mean(-1) + extras.z_loss * log_sum**2
    return loss.sum()


# --------------------------------------------------------------------------------------------------------- training


@dataclass
class Run:
    """What a reference run gives: by step, and at the end."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)  # before clipping
    first_gradients: Weights = field(default_factory=dict)  # of step 1, before clipping
    weights: Weights = field(default_factory=dict)  # masters, at the end


def train(
    weights: Weights,
    config: ModelConfig,
    optimizer: OptimizerConfig,
    batches: Sequence[Sequence[Row]],
    *,
    lrs: Sequence[float],
    seed: int = 0,
    precision: str = "fp32",
    document_mask: bool = True,
    extras: LossConfig | None = None,
) -> Run:
    """AdamW with global clipping on the mean loss over each batch's targets; batch k is step k + 1.

    In bf16 the forward uses bf16 copies of fp32 masters, and each row's gradient is added in fp32. In fp64 there is no
    rounding to speak of: what an fp32 run is compared with, so that its distance is its own.
    """
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}[precision]
    masters = {name: tensor.clone().to(torch.promote_types(dtype, torch.float32)) for name, tensor in weights.items()}
    first = {name: torch.zeros_like(tensor) for name, tensor in masters.items()}
    second = {name: torch.zeros_like(tensor) for name, tensor in masters.items()}
    run = Run()
    for number, (rows, lr) in enumerate(zip(batches, lrs, strict=True), start=1):
        used = {name: tensor.to(dtype, copy=True).requires_grad_() for name, tensor in masters.items()}
        gradients = {name: torch.zeros_like(tensor) for name, tensor in masters.items()}
        num_targets = sum(int((row.targets != -100).sum()) for row in rows)
        total = 0.0
        for row in rows:
            of_row = {"document_mask": document_mask, "step": Step(seed, number)}
            loss = row_loss(used, config, row, **of_row, extras=extras)
            for name, gradient in zip(used, torch.autograd.grad(loss / num_targets, list(used.values()))):
                gradients[name] += gradient  # in the master's dtype
            total += (loss if extras is None else row_loss(used, config, row, **of_row)).item()
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))
        run.losses.append(total / num_targets)
        run.grad_norms.append(norm)
        if number == 1:
            run.first_gradients = {name: gradient.clone() for name, gradient in gradients.items()}
        limit = optimizer.max_grad_norm
        clip = min(1.0, limit / (norm + 1e-6)) if limit else 1.0
        beta1, beta2 = optimizer.betas
        for name, master in masters.items():
            gradient = gradients[name] * clip
            is_matrix = master.dim() > 1 and not name.endswith("position_bias.weight")
            decays = is_matrix and (optimizer.decay_embeddings or name not in EMBEDDINGS)
            base = config.mup.base_hidden_size
            inner = base is not None and is_matrix and name not in EMBEDDINGS
            rate = lr * base / config.hidden_size if base is not None and inner else lr
            master *= 1 - lr * (optimizer.weight_decay if decays else 0.0)
            first[name] = beta1 * first[name] + (1 - beta1) * gradient
            second[name] = beta2 * second[name] + (1 - beta2) * gradient.square()
            corrected = (second[name] / (1 - beta2**number)).sqrt() + optimizer.eps
            master -= rate * (first[name] / (1 - beta1**number)) / corrected
    run.weights = masters
    return run
