"""What may be done to logits before a token is drawn: pure functions, each on [B, V] with a column [B, 1] of its numbers.

A token that a filter takes out gets -inf. Equal logits are ranked by their column. Filters never take out all of a row.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

SLACK = 1e-6  # relative, of a mass or a probability: what is equal in exact arithmetic comes out just below or above in fp32


def repetition_penalty(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Logits of tokens that were seen (bool [B, V]) divided by the penalty where positive, else times it (CTRL, Keskar et al. 2019)."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def presence_penalty(logits: Tensor, counts: Tensor, penalty: Tensor) -> Tensor:
    """Less the penalty for tokens that were seen, however often (int [B, V])."""
    return logits - penalty * (counts > 0)


def frequency_penalty(logits: Tensor, counts: Tensor, penalty: Tensor) -> Tensor:
    """Less the penalty for each time that a token was seen (int [B, V])."""
    return logits - penalty * counts


def known_ids(logits: Tensor, count: int | None, stop_ids: Collection[int]) -> Tensor:
    """Ids from `count` on go, but those that end a text: a vocabulary padded to a published size has more than the tokenizer. None: all
    are known."""
    if count is None or count >= logits.shape[-1]:
        return logits
    unknown = torch.arange(logits.shape[-1], device=logits.device) >= count
    unknown[[id for id in stop_ids if id < logits.shape[-1]]] = False
    return logits.masked_fill(unknown, float("-inf"))


def with_temperature(logits: Tensor, temperature: Tensor) -> Tensor:
    """float64, each row's largest at 0, divided by a temperature above 0."""
    return (logits - logits.amax(dim=-1, keepdim=True)).double() / temperature


def top_k(logits: Tensor, k: Tensor) -> Tensor:
    """The k largest stay, k from 1."""
    ranks = logits.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    return logits.masked_fill(ranks >= k, float("-inf"))


def top_p(logits: Tensor, p: Tensor) -> Tensor:
    """The fewest most probable stay whose mass reaches p, the one that crosses included (Holtzman et al. 2020); at least one."""
    ordered, ids = logits.double().sort(dim=-1, descending=True, stable=True)
    likely = ordered.softmax(dim=-1)
    out = likely.cumsum(dim=-1) - likely >= p - SLACK  # the mass of those that are more probable is enough
    out &= p < 1
    out[:, 0] = False
    return logits.masked_fill(torch.zeros_like(out).scatter_(-1, ids, out), float("-inf"))


def min_p(logits: Tensor, p: Tensor) -> Tensor:
    """Those stay that are at least p times as probable as the most probable (Nguyen et al. 2024), p from 0 to 1."""
    least = logits.amax(dim=-1, keepdim=True).double() + p.log() - SLACK
    return logits.masked_fill(logits.double() < least, float("-inf"))


def ranked(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(logits, ids) of the `count` largest of each row, largest first, equal ones by id; perhaps others behind them."""
    if 4 * count < logits.shape[-1]:
        least = logits.topk(count).values[:, -1:]
        count = int((logits >= least).sum(dim=-1).max())  # with all that equal the last
    if 4 * count >= logits.shape[-1]:
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
        return values, ids
    ids = logits.topk(count).indices.sort(dim=-1).values
    values, order = logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)


def log_normaliser(logits: Tensor) -> Tensor:
    """log of the sum of exp, float64 [B, 1]: what is to be taken off a logit to get its log-probability."""
    most = logits.amax(dim=-1, keepdim=True)
    return most.double() + (logits - most).exp().sum(dim=-1, keepdim=True, dtype=torch.float64).log()
