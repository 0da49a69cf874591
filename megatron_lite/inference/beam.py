"""Beam search, with the rules that `transformers` has: which hypotheses end, how they are scored, when a row is done.

Each prompt is searched as if it were alone: nothing of a row's search looks at another.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from data_pipeline.errors import ConfigError, Fault
from megatron_lite.inference.given import count_faults, is_count, is_within
from megatron_lite.inference.logits import known_ids, log_normaliser, ranked
from megatron_lite.inference.rows import DecodingRows
from megatron_lite.inference.sampling import require_usable

Finish = Literal["stop", "length", "context"]  # a stop token or string came; as many tokens as asked for; the context is full


@dataclass(frozen=True)
class BeamOptions:
    """How wide to search and when to end. Raises ConfigError naming every bad value."""

    num_beams: int = 4
    length_penalty: float = 1.0  # a hypothesis' score is its log-probability / tokens ^ length_penalty; above 0 favours long ones
    early_stopping: bool | Literal["never"] = False  # see `_Search.done`
    n_best: int = 1  # hypotheses a prompt that are returned, best first

    def __post_init__(self) -> None:
        faults = count_faults("num_beams", self.num_beams, least=1)
        if not is_within(self.length_penalty, -math.inf, math.inf):
            faults.append(Fault("length_penalty", self.length_penalty, "a finite number"))
        if self.early_stopping not in (True, False, "never"):
            faults.append(Fault("early_stopping", self.early_stopping, "true, false or never"))
        if not faults and not (is_count(self.n_best, 1) and self.n_best <= self.num_beams):
            faults.append(Fault("n_best", self.n_best, f"a count from 1 to num_beams ({self.num_beams})"))
        if faults:
            raise ConfigError(faults)


@dataclass(frozen=True)
class Hypothesis:
    """One way to go on from a prompt."""

    tokens: list[int]  # without the stop token
    score: float  # logprob / tokens ^ length_penalty, the stop token counted
    logprob: float  # the sum of log-probabilities in nats, the stop token's included
    finish: Finish


@dataclass(frozen=True)
class Limit:
    """The most tokens of an answer, and what ends it there."""

    tokens: int  # from 1
    finish: Finish


@torch.inference_mode()
def beam_search(
    rows: DecodingRows,
    logits: Tensor,
    *,
    limits: Sequence[Limit],
    options: BeamOptions,
    stop_ids: Collection[int] = (),
    num_ids: int | None = None,
) -> list[list[Hypothesis]]:
    """The n best answers to each of B prompts, best first, from the logits [B, V] that follow them; a row of `rows` a prompt.

    Fewer than n where there are no more within the limit. Ids from `num_ids` on are in none of them, but as their ends. Collective over
    tp: all ranks give the same.
    """
    searches = [_Search(options, limit, frozenset(stop_ids)) for limit in limits]
    running = list(searches)
    device = logits.device
    scores = torch.zeros(len(running), 1, dtype=torch.float64, device=device)  # [B, beams]: of the hypotheses that go on
    count = max(2, 1 + len(set(stop_ids))) * options.num_beams  # so many that num_beams go on though every beam may stop
    while True:
        best = rows.agreed(_best(known_ids(logits, num_ids, stop_ids), log_normaliser(logits), scores, count)).tolist()
        for search, candidates in zip(running, best):
            search.advance([(score, int(beam), int(token)) for score, beam, token in candidates])
        width = scores.shape[1]
        going = [place for place, search in enumerate(running) if not search.done]
        if not going:
            return [search.finished[: options.n_best] for search in searches]
        kept = [(place, beam) for place in going for beam in running[place].beams]
        running = [running[place] for place in going]
        rows.reorder(torch.tensor([place * width + beam.parent for place, beam in kept], device=device))
        scores = torch.tensor([beam.score for _, beam in kept], dtype=torch.float64, device=device).view(len(running), -1)
        logits = rows.step(torch.tensor([beam.token for _, beam in kept], device=device))


def _best(logits: Tensor, normaliser: Tensor, scores: Tensor, count: int) -> Tensor:
    """float64 [B, C, 3]: (log-probability, beam, token) of the `count` best continuations of each prompt's beams, best first,
    equal ones by beam and token; from logits [B * beams, V], their normalisers and the beams' own log-probabilities [B, beams]."""
    require_usable(logits)
    values, tokens = ranked(logits, min(count, logits.shape[-1]))
    totals = (values.double() - normaliser).view(*scores.shape, -1) + scores[:, :, None]
    per_beam = totals.shape[-1]
    best, order = totals.flatten(1).sort(dim=-1, descending=True, stable=True)
    best, order = best[:, :count], order[:, :count]
    chosen = tokens.view(len(scores), -1).gather(-1, order)
    return torch.stack([best, (order // per_beam).double(), chosen.double()], dim=-1)


@dataclass(frozen=True)
class _Beam:
    """A hypothesis that goes on."""

    score: float  # log-probability; -inf: it only fills the row
    parent: int  # the beam that it continues
    token: int
    tokens: list[int]


@dataclass
class _Search:
    """One prompt's."""

    options: BeamOptions
    limit: Limit
    stop_ids: frozenset[int]
    beams: list[_Beam] = field(default_factory=lambda: [_Beam(0.0, 0, 0, [])])
    finished: list[Hypothesis] = field(default_factory=list)  # the best num_beams, best first
    length: int = 0  # tokens of the beams

    def advance(self, candidates: Sequence[tuple[float, int, int]]) -> None:
        """Take one token more: (log-probability, beam, token), best first. Only what ends among the first num_beams is finished,
        and the best num_beams of the others go on."""
        self.length += 1
        size = self.options.num_beams
        beams: list[_Beam] = []
        for rank, (score, parent, token) in enumerate(candidates):
            if score == -math.inf:
                continue
            stopped, tokens = token in self.stop_ids, self.beams[parent].tokens
            if stopped or self.length == self.limit.tokens:
                if rank < size:
                    said = tokens if stopped else [*tokens, token]
                    self.finished.append(
                        Hypothesis(said, self._scored(score, self.length), score, "stop" if stopped else self.limit.finish)
                    )
            elif len(beams) < size:
                beams.append(_Beam(score, parent, token, [*tokens, token]))
        self.finished = sorted(self.finished, key=lambda each: -each.score)[:size]
        self.beams = beams
        if beams:  # every row is as wide as the others
            beams += [_Beam(-math.inf, beams[0].parent, beams[0].token, beams[0].tokens)] * (size - len(beams))

    @property
    def done(self) -> bool:
        """At the limit; or, once num_beams are finished: at once with early_stopping, else when the best beam, as long as it is
        now, would not beat the worst of them. With "never" and a length penalty above 0 it is thought to be as long as it may get."""
        if self.length == self.limit.tokens or not self.beams:
            return True
        if len(self.finished) < self.options.num_beams:
            return False
        if self.options.early_stopping is True:
            return True
        longest = self.options.early_stopping == "never" and self.options.length_penalty > 0
        reached = self._scored(self.beams[0].score, self.limit.tokens if longest else self.length)
        return reached <= self.finished[-1].score

    def _scored(self, logprob: float, length: int) -> float:
        return logprob / length**self.options.length_penalty
