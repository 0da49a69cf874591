"""Cross-entropy over a vocabulary that is cut over tp, in chunks of tokens: full logits never stand in memory.

The loss is linear in what comes back through it, so its gradients are computed in the forward pass, chunk by chunk,
while the chunk's logits are there; backward only scales them. Logits and sums are fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_lite.parallel.collectives import all_gather
from megatron_lite.parallel.groups import Axis

IGNORED = -100  # the target of a position that has none
_CHUNK_LOGITS = 1 << 23  # logits of a chunk: 32 MiB in fp32


def vocab_parallel_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    tp: Axis,
    *,
    vocab_start: int,
    num_valid_rows: int,
    per_token: bool = False,
    chunk_tokens: int | None = None,
) -> Tensor:
    """Sum of -log softmax(hidden weight^T)[target] over the targets that aren't -100, as an fp32 scalar.

    hidden [N, D] is the same on every tp rank, its gradient this rank's part; weight [rows, D] holds the vocabulary from
    `vocab_start` in its first `num_valid_rows` rows, which may be none; targets [N]. One all-gather of 2 fp32 numbers a
    token over tp. With `per_token`: fp32 [N], 0 where there is no target, without gradient.
    """
    if chunk_tokens is None:
        chunk_tokens = max(_CHUNK_LOGITS // max(weight.shape[0], 1), 64)
    arguments = (targets, tp, vocab_start, num_valid_rows, chunk_tokens)
    if per_token:
        with torch.no_grad():
            return torch.cat(
                [
                    losses
                    for _, losses, _ in _chunks(hidden, weight, *arguments)  # the softmax is dropped at once
                ]
            )
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _CrossEntropy.apply(hidden, weight, *arguments)
    return _summed(losses for _, losses, _ in _chunks(hidden, weight, *arguments))


def _summed(losses: Any) -> Tensor:
    return torch.stack([chunk.sum() for chunk in losses]).sum()


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, tp: Axis, vocab_start: int, num_valid_rows: int, chunk_tokens: int
    ) -> Tensor:
        hidden_gradient = torch.empty_like(hidden)
        weight_gradient = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        sums = []
        for span, losses, logits_gradient in _chunks(hidden, weight, targets, tp, vocab_start, num_valid_rows, chunk_tokens):
            sums.append(losses.sum())
            rows = logits_gradient.to(hidden.dtype)
            torch.mm(rows, weight[:num_valid_rows], out=hidden_gradient[span])
            valid = weight_gradient[:num_valid_rows]
            if rows.dtype == torch.float32:
                valid.addmm_(rows.t(), hidden[span])
            else:
                valid += rows.t() @ hidden[span]  # each chunk rounded, their sum in fp32
        ctx.weight_dtype = weight.dtype
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        return torch.stack(sums).sum()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden_gradient, weight_gradient = ctx.saved_tensors
        return hidden_gradient * upstream, (weight_gradient * upstream).to(ctx.weight_dtype), None, None, None, None, None


def _chunks(hidden: Tensor, weight: Tensor, targets: Tensor, tp: Axis, vocab_start: int, num_valid_rows: int, chunk_tokens: int) -> Any:
    """(slice of tokens, their losses fp32 [C], the gradient of their sum by this rank's logits fp32 [C, valid]) by chunk."""
    valid = weight[:num_valid_rows]
    for start in range(0, hidden.shape[0], chunk_tokens):
        span = slice(start, start + chunk_tokens)
        wanted = targets[span]
        counted = wanted != IGNORED
        local = wanted - vocab_start
        mine = (local >= 0) & (local < num_valid_rows) & counted
        logits = (hidden[span] @ valid.t()).float()
        if num_valid_rows:
            index = local.masked_fill(~mine, 0)[:, None]
            target_logit = logits.gather(1, index)[:, 0].masked_fill(~mine, 0.0)
            maximum = logits.amax(dim=1)
            exponentials = logits.sub_(maximum[:, None]).exp_()
            local_log_sum = maximum + exponentials.sum(dim=1).log()
        else:  # a rank of padding only
            target_logit = logits.new_zeros(logits.shape[0])
            maximum = local_log_sum = logits.new_full((logits.shape[0],), float("-inf"))
            exponentials = logits
        gathered = all_gather(torch.stack([local_log_sum, target_logit])[None], tp, dim=0)  # [tp, 2, C]
        log_sum = gathered[:, 0].logsumexp(dim=0)
        losses = (log_sum - gathered[:, 1].sum(dim=0)).masked_fill(~counted, 0.0)
        scale = (maximum - log_sum).exp().masked_fill(~counted, 0.0)
        gradient = exponentials.mul_(scale[:, None])
        if num_valid_rows:
            gradient.scatter_add_(1, index, -mine[:, None].to(gradient.dtype))
        yield span, losses, gradient
