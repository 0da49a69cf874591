"""Cross-entropy over a vocabulary that is cut over tp, in chunks of tokens: full logits never stand in memory.

The loss is linear in what comes back through it, so its gradients are computed in the forward pass, chunk by chunk,
while the chunk's logits are there; backward only scales them. Logits and sums are fp32.

What is returned is always the plain cross-entropy in nats, what is reported and compared. With extras (label smoothing,
z-loss) what comes back through it is the gradient of the cross-entropy with them: what is optimised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_lite.config import NO_EXTRAS, LossConfig
from megatron_lite.layers.matmul import times_transposed
from megatron_lite.layers.row_blocks import row_blocks
from megatron_lite.layers.watcher import Watcher
from megatron_lite.parallel.collectives import all_gather
from megatron_lite.parallel.groups import Axis
from megatron_lite.sizes import loss_chunk_tokens

IGNORED = -100  # the target of a position that has none


@dataclass(frozen=True)
class Logits:
    """How logits are made of hidden states times the head: cap * tanh(factor * product / cap), in fp32; no cap: factor * product."""

    factor: float = 1.0
    cap: float | None = None

    @property
    def is_plain(self) -> bool:
        return self.factor == 1.0 and self.cap is None

    def of(self, products: Tensor) -> Tensor:
        logits = products.float() * self.factor
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap

    def pull_back(self, gradient: Tensor, logits: Tensor) -> None:
        """Turn a gradient by the logits into that by the products, in place."""
        gradient *= self.factor
        if self.cap is not None:
            gradient *= 1.0 - (logits / self.cap).square()


PLAIN = Logits()


@dataclass(frozen=True)
class LossSettings:
    """What the chunks are computed with: where this rank's vocabulary is, how logits are made, what is optimised besides."""

    vocab_start: int
    num_valid_rows: int  # the rest of the rows are padding: no logits, no smoothing, no part of the log-sum
    vocabulary: int  # tokens on all ranks
    chunk_tokens: int
    logits: Logits
    extras: LossConfig
    watcher: Watcher | None


def vocab_parallel_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    tp: Axis,
    *,
    vocab_start: int,
    num_valid_rows: int,
    vocabulary: int | None = None,
    logits: Logits = PLAIN,
    extras: LossConfig = NO_EXTRAS,
    watcher: Watcher | None = None,
    per_token: bool = False,
    chunk_tokens: int | None = None,
) -> Tensor:
    """Sum of -log softmax(hidden weight^T)[target] over the targets that aren't -100, as an fp32 scalar.

    hidden [N, D] is the same on every tp rank, its gradient this rank's part; weight [rows, D] holds the vocabulary from
    `vocab_start` in its first `num_valid_rows` rows, which may be none; `vocabulary`: of all ranks (None: those rows); targets
    [N]. One all-gather of 2 fp32 numbers a token over tp. With `per_token`: fp32 [N], 0 where there is no target, without gradient.

    With extras the gradient is that of the sum of (1 - e) * nats + e * mean over the vocabulary of -log softmax + z * (log sum
    exp)^2, e being label_smoothing (Szegedy et al. 2016) and z z_loss (Chowdhery et al. 2022).
    """
    if chunk_tokens is None:
        chunk_tokens = loss_chunk_tokens(weight.shape[0], on_cpu=weight.device.type == "cpu")
    settings = LossSettings(vocab_start, num_valid_rows, vocabulary or num_valid_rows, chunk_tokens, logits, extras, watcher)
    if per_token:
        with torch.no_grad():
            return torch.cat(
                [
                    losses
                    for _, losses, *_ in _chunks(hidden, weight, targets, tp, settings)  # the softmax is dropped at once
                ]
            )
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _CrossEntropy.apply(hidden, weight, targets, tp, settings)
    return _summed(losses for _, losses, *_ in _chunks(hidden, weight, targets, tp, settings))


def _summed(losses: Any) -> Tensor:
    return torch.stack([chunk.sum() for chunk in losses]).sum()


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, tp: Axis, settings: LossSettings) -> Tensor:
        hidden_gradient = torch.empty_like(hidden)
        weight_gradient: Tensor | None = None
        sums = []
        num_valid_rows = settings.num_valid_rows
        valid = weight[:num_valid_rows]
        for span, losses, rows, counted in _chunks(hidden, weight, targets, tp, settings):
            sums.append(losses.sum())
            uncounted = ~counted[:, None]  # their rows of the gradient are 0: of D numbers, not of V
            hidden_gradient[span] = times_transposed(rows, valid.t()).masked_fill_(uncounted, 0.0)
            of_weight = times_transposed(rows.t(), hidden[span].masked_fill(uncounted, 0.0).t())
            # bf16: each chunk rounded, their sum in fp32
            weight_gradient = of_weight.float() if weight_gradient is None else weight_gradient.add_(of_weight)
        assert weight_gradient is not None
        if num_valid_rows < weight.shape[0]:
            weight_gradient = torch.cat([weight_gradient, weight_gradient.new_zeros(weight.shape[0] - num_valid_rows, weight.shape[1])])
        ctx.weight_dtype = weight.dtype
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        return torch.stack(sums).sum()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden_gradient, weight_gradient = ctx.saved_tensors
        return hidden_gradient * upstream, (weight_gradient * upstream).to(ctx.weight_dtype), None, None, None


def _chunks(hidden: Tensor, weight: Tensor, targets: Tensor, tp: Axis, settings: LossSettings) -> Any:
    """By chunk: (slice of tokens, their losses fp32 [C], the gradient of what is optimised by this rank's products [C, valid] in
    hidden's dtype, to be taken as 0 where not counted, counted bool [C])."""
    num_valid_rows, shape = settings.num_valid_rows, settings.logits
    simple = tp.size == 1 and shape.is_plain and settings.extras == NO_EXTRAS  # nothing is left to do when a block is done
    valid = weight[:num_valid_rows]
    for start in range(0, hidden.shape[0], settings.chunk_tokens):
        span = slice(start, start + settings.chunk_tokens)
        wanted = targets[span]
        counted = wanted != IGNORED
        local = wanted - settings.vocab_start
        mine = (local >= 0) & (local < num_valid_rows) & counted
        logits = times_transposed(hidden[span], valid)
        if not shape.is_plain:
            logits = shape.of(logits)
        if num_valid_rows:
            index = local.masked_fill(~mine, 0)[:, None]
            target_logit = logits.gather(1, index)[:, 0].float().masked_fill(~mine, 0.0)
            minus_one = -mine[:, None].float()
            probabilities = torch.empty_like(logits, dtype=hidden.dtype if simple else torch.float32)
            local_log_sum = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
            for rows in row_blocks(logits):
                out = probabilities[rows] if probabilities.dtype == torch.float32 else None
                part = torch.softmax(logits[rows], dim=1, dtype=torch.float32, out=out)
                local_log_sum[rows] = (
                    logits[rows].amax(dim=1).float() - part.amax(dim=1).log()
                )  # the largest is 1 / sum(exp(logits - maximum))
                if simple:
                    part.scatter_add_(1, index[rows], minus_one[rows])
                if out is None:
                    probabilities[rows] = part
        else:  # a rank of padding only
            target_logit = torch.zeros(logits.shape[0], dtype=torch.float32, device=logits.device)
            local_log_sum = torch.full_like(target_logit, float("-inf"))
            probabilities = logits.float()
        log_sum, whole_target_logit = local_log_sum, target_logit
        if tp.size > 1:
            gathered = all_gather(torch.stack([local_log_sum, target_logit])[None], tp, dim=0)  # [tp, 2, C]
            log_sum, whole_target_logit = gathered[:, 0].logsumexp(dim=0), gathered[:, 1].sum(dim=0)
            probabilities *= (local_log_sum - log_sum).exp()[:, None]
        if settings.watcher is not None:
            settings.watcher.see("logits/log_z", log_sum, copies=tp.size, mask=counted)
        losses = (log_sum - whole_target_logit).masked_fill(~counted, 0.0)
        if not simple:
            _finish(probabilities, logits, log_sum, local.masked_fill(~mine, 0)[:, None], mine, settings)
        yield span, losses, probabilities.to(hidden.dtype), counted


def _finish(probabilities: Tensor, logits: Tensor, log_sum: Tensor, index: Tensor, mine: Tensor, settings: LossSettings) -> None:
    """Turn this rank's softmax [C, valid] into the gradient of what is optimised by its products, in place."""
    extras = settings.extras
    if extras.z_loss > 0:
        probabilities *= (1.0 + 2.0 * extras.z_loss * log_sum)[:, None]
    if extras.label_smoothing > 0:
        probabilities -= extras.label_smoothing / settings.vocabulary
    if settings.num_valid_rows:
        probabilities.scatter_add_(1, index, mine[:, None].float() * (extras.label_smoothing - 1.0))
    if not settings.logits.is_plain:
        settings.logits.pull_back(probabilities, logits)
