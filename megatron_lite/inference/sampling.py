"""From logits to tokens: pure functions of logits, options, what was said before, and a number in [0, 1).

Order: penalties, temperature, the top k, the nucleus of what is left renormalised, min-p; as `transformers` has it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from data_pipeline.errors import ConfigError, Fault, NonFiniteError
from megatron_lite.inference import logits as rules
from megatron_lite.inference.given import is_count, is_within

LARGEST_PENALTY = 10_000  # so far fp32 logits stay finite, and nothing more likely is left to suppress
GREEDY_BELOW = 1e-6  # of the temperature: no fp32 logits differ by less and matter


@dataclass(frozen=True)
class SamplingOptions:
    """How one row's tokens are chosen. Raises ConfigError naming every bad value."""

    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # the most probable k; 0: all
    top_p: float = 1.0  # the fewest most probable that have this mass together; 1: all; at least one stays
    min_p: float = 0.0  # those that are at least this times as probable as the most probable; 0: all
    repetition_penalty: float = 1.0  # above 1: less of what stands in prompt or answer; 1: off
    presence_penalty: float = 0.0  # off the logits of what stands in the answer; 0: off
    frequency_penalty: float = 0.0  # off the logits for each time that it stands in the answer; 0: off
    seed: int = 0

    def __post_init__(self) -> None:
        most = LARGEST_PENALTY
        known: dict[str, tuple[bool, str]] = {
            "temperature": (is_within(self.temperature, 0, math.inf), "a number from 0 (greedy)"),
            "top_k": (is_count(self.top_k, 0), "a count from 1, or 0 for no limit"),
            "top_p": (is_within(self.top_p, 0, 1), "a probability from 0 to 1"),
            "min_p": (is_within(self.min_p, 0, 1), "a share from 0 to 1"),
            "repetition_penalty": (is_within(self.repetition_penalty, 1 / most, most), f"a number from {1 / most} to {most}; 1 is none"),
            "presence_penalty": (is_within(self.presence_penalty, -most, most), f"a number from {-most} to {most}; 0 is none"),
            "frequency_penalty": (is_within(self.frequency_penalty, -most, most), f"a number from {-most} to {most}; 0 is none"),
            "seed": (is_count(self.seed, -math.inf), "a whole number"),
        }
        if faults := [Fault(name, getattr(self, name), want) for name, (good, want) in known.items() if not good]:
            raise ConfigError(faults)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def remembers(self) -> bool:
        """Whether what was said before matters."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True)
class History:
    """What each row said: prompts and answers count for the repetition penalty, answers alone for presence and frequency.

    Neither the begin token, nor padding, nor an encoder's source is part of it: that the end-of-document id stood before the
    prompt makes an end no less likely, and a translation may say what its source says.
    """

    prompts: Tensor  # bool [B, V]
    answers: Tensor  # int32 [B, V], how often

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], vocabulary: int, device: torch.device | str = "cpu") -> History:
        seen = torch.zeros(len(prompts), vocabulary, dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            seen[row, torch.tensor(prompt, dtype=torch.int64)] = True
        return cls(seen.to(device), torch.zeros(len(prompts), vocabulary, dtype=torch.int32, device=device))

    def add(self, tokens: Tensor) -> None:
        """One more token of each answer, int64 [B]."""
        self.answers[torch.arange(len(tokens), device=tokens.device), tokens] += 1

    def keep(self, rows: Tensor) -> History:
        return History(self.prompts[rows], self.answers[rows])


def probabilities(logits: Tensor, options: Sequence[SamplingOptions], history: History | None = None) -> Tensor:
    """float64 [B, V]: each row's distribution after its own penalties, temperature and filters; greedy rows have one 1.

    Ties go to the lower id. Raises NonFiniteError where a row has NaN or nothing finite.
    """
    ids, likely = _candidates(logits, options, history)
    return likely.new_zeros(logits.shape).scatter_(-1, ids, likely)


def choose(logits: Tensor, options: Sequence[SamplingOptions], draws: Tensor, history: History | None = None) -> Tensor:
    """int64 [B]: the token whose part of the cumulative distribution, in the order of ids, holds the row's draw, float64 [B]
    in [0, 1)."""
    if all(each.greedy for each in options):
        require_usable(logits)
        return _penalised(logits, options, history).argmax(dim=-1)
    ids, likely = _candidates(logits, options, history)
    cumulative = likely.cumsum(dim=-1)
    total = cumulative[:, -1:]  # 1 only up to rounding
    wanted = torch.minimum(draws.to(cumulative)[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    place = torch.searchsorted(cumulative, wanted, right=True)  # the first beyond: never one of probability 0
    return ids.gather(-1, place).squeeze(-1)


def _candidates(logits: Tensor, options: Sequence[SamplingOptions], history: History | None) -> tuple[Tensor, Tensor]:
    """(ids int64 [B, C] ascending, probabilities float64 [B, C]) of all tokens that may be chosen, and perhaps of some that
    have probability 0."""
    require_usable(logits)
    vocabulary, column = logits.shape[-1], _columns(options, logits.device)
    left = _penalised(logits, options, history)
    limits = [1 if each.greedy else min(each.top_k or vocabulary, vocabulary) for each in options]
    ids = torch.arange(vocabulary, device=logits.device).expand_as(logits)
    if 4 * max(limits) < vocabulary:  # rows are short from here on
        ids = rules.ranked(left, max(limits))[1].sort(dim=-1).values
        left = left.gather(-1, ids)
    left = rules.with_temperature(left, column(lambda each: 1.0 if each.greedy else each.temperature))
    if min(limits) < vocabulary:
        left = rules.top_k(left, torch.tensor(limits, device=logits.device)[:, None])
    if any(each.top_p < 1 for each in options):
        left = rules.top_p(left, column(lambda each: each.top_p))
    if any(each.min_p > 0 for each in options):
        left = rules.min_p(left, column(lambda each: each.min_p))
    return ids, left.softmax(dim=-1)


def _penalised(logits: Tensor, options: Sequence[SamplingOptions], history: History | None) -> Tensor:
    if not any(each.remembers for each in options):
        return logits
    assert history is not None, "a penalty needs what was said before"
    column = _columns(options, logits.device, logits.dtype)
    logits = rules.repetition_penalty(logits, history.prompts | (history.answers > 0), column(lambda each: each.repetition_penalty))
    logits = rules.presence_penalty(logits, history.answers, column(lambda each: each.presence_penalty))
    return rules.frequency_penalty(logits, history.answers, column(lambda each: each.frequency_penalty))


def _columns(
    options: Sequence[SamplingOptions], device: torch.device, dtype: torch.dtype = torch.float64
) -> Callable[[Callable[[SamplingOptions], float]], Tensor]:
    return lambda number: torch.tensor([number(each) for each in options], dtype=dtype, device=device)[:, None]


def draw(seed: int, place: int) -> float:
    """A number in [0, 1) that depends on the seed and the token's place in its text, not on the batch or the layout."""
    digest = hashlib.sha256(f"megatron-lite sampling {seed} {place}".encode()).digest()
    return (int.from_bytes(digest[:8], "little") >> 11) * 2.0**-53


def require_usable(logits: Tensor) -> None:
    """Raises NonFiniteError unless every row [V] has a finite maximum and no NaN."""
    if not bool(torch.isfinite(logits.amax(dim=-1)).all()):  # a NaN is its row's maximum
        raise NonFiniteError("the model's logits are not finite: its weights are damaged, or training diverged before this checkpoint")
