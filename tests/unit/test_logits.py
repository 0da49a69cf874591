"""If these fail, a rule that a user asked for keeps, removes or weakens other tokens than it says."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_lite.inference import logits as rules
from megatron_lite.inference.sampling import History, SamplingOptions, choose, probabilities

INF = math.inf


def col(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def kept(logits: Tensor) -> list[list[int]]:
    return [row.isfinite().nonzero().flatten().tolist() for row in logits]


def logs(*rows: list[float]) -> Tensor:
    return torch.tensor(rows).log()


def test_repetition_penalty() -> None:
    """CTRL's: a seen token's logit is divided where positive and multiplied where negative, so that it always falls; each row by
    its own, and below 1 it rises."""
    logits = torch.tensor([[2.0, -1.0, 0.0, 4.0], [2.0, -1.0, 0.0, 4.0]])
    seen = torch.tensor([[True, True, True, False], [True, False, False, True]])
    got = rules.repetition_penalty(logits, seen, torch.tensor([[2.0], [0.5]]))
    assert got.tolist() == [[1.0, -2.0, 0.0, 4.0], [4.0, -1.0, 0.0, 8.0]]


def test_presence_and_frequency_penalty() -> None:
    """Presence is taken off once, frequency as often as the token came; negative ones are added."""
    logits, counts = torch.ones(2, 3), torch.tensor([[0, 1, 3], [2, 0, 0]], dtype=torch.int32)
    assert rules.presence_penalty(logits, counts, torch.tensor([[0.5], [-1.0]])).tolist() == [[1.0, 0.5, 0.5], [2.0, 1.0, 1.0]]
    assert rules.frequency_penalty(logits, counts, torch.tensor([[0.5], [-1.0]])).tolist() == [[1.0, 0.5, -0.5], [3.0, 1.0, 1.0]]


def test_with_temperature() -> None:
    """Differences of logits are divided, in float64: a small temperature overflows nothing."""
    got = rules.with_temperature(torch.tensor([[1.0, 3.0, 2.0], [1.0, 3.0, 2.0]]), col(0.5, 1e-300))
    assert got[0].tolist() == [-4.0, 0.0, -2.0] and got[1].tolist() == pytest.approx([-2e300, 0.0, -1e300])


def test_top_k() -> None:
    """Exactly k stay, each row by its own; of equal ones those with the lower ids; -inf stays out."""
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0], [1.0, 1.0, 1.0, 1.0], [-INF, 0.0, -INF, 1.0]])
    assert kept(rules.top_k(logits, torch.tensor([[2], [3], [4]]))) == [[1, 3], [0, 1, 2], [1, 3]]
    assert torch.equal(rules.top_k(logits, torch.tensor([[4]] * 3)), logits)


def test_top_p() -> None:
    """B122, B123, B124, B126: on the function alone, each row by its own p."""
    rows = logs([0.45, 0.25, 0.20, 0.10], [0.5, 0.25, 0.125, 0.125], [0.1, 0.6, 0.05, 0.25], [0.1, 0.2, 0.3, 0.4], [0.1, 0.2, 0.3, 0.4])
    assert kept(rules.top_p(rows, col(0.6, 0.75, 0.8, 0.0, 1.0))) == [[0, 1], [0, 1], [1, 3], [3], [0, 1, 2, 3]]


def test_min_p() -> None:
    """Those that are at least so many times as probable as the most probable stay, equality included; 0 keeps all, 1 only the best."""
    rows = logs(*[[0.5, 0.25, 0.05, 0.2]] * 5)
    assert kept(rules.min_p(rows, col(0.1, 0.5, 0.45, 0.0, 1.0))) == [[0, 1, 2, 3], [0, 1], [0, 1], [0, 1, 2, 3], [0]]
    shifted = rules.min_p(rows.double() + 100, col(0.1, 0.5, 0.45, 0.0, 1.0))
    assert kept(shifted) == kept(rules.min_p(rows, col(0.1, 0.5, 0.45, 0.0, 1.0)))


@pytest.mark.parametrize("size", [7, 500])
def test_ranked_and_normalised(size: int) -> None:
    """As many of the largest as asked for come first, equal ones by id; and logits less the normaliser are log-probabilities."""
    logits = torch.randint(-3, 4, (4, size), generator=torch.Generator().manual_seed(1)).float()
    values, ids = rules.ranked(logits, 3)
    for row in range(4):
        want = sorted(range(size), key=lambda token: (-float(logits[row, token]), token))
        assert ids[row, :3].tolist() == want[:3]
    assert torch.equal(values, logits.gather(-1, ids))
    assert torch.allclose(logits - rules.log_normaliser(logits), logits.double().log_softmax(-1), atol=1e-6)


def _theirs(name: str, logits: Tensor, ids: Tensor, number: float) -> Tensor:
    from transformers.generation import logits_process as processors

    return getattr(processors, name)(number)(ids, logits)


@pytest.mark.parametrize(
    ("name", "number", "ours"),
    [
        ("RepetitionPenaltyLogitsProcessor", 1.3, lambda x, seen: rules.repetition_penalty(x, seen, torch.tensor([[1.3]]))),
        ("TopKLogitsWarper", 5, lambda x, _: rules.top_k(x, torch.tensor([[5]]))),
        ("TopPLogitsWarper", 0.7, lambda x, _: rules.top_p(x, col(0.7))),
        ("MinPLogitsWarper", 0.2, lambda x, _: rules.min_p(x, col(0.2))),
    ],
)
def test_transformers_has_the_same_rule(name: str, number: float, ours: Callable[[Tensor, Tensor], Tensor]) -> None:
    """On random logits, what stays and what becomes of it is what `transformers` does."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(8, 50, generator=generator)
    ids = torch.randint(50, (8, 9), generator=generator)
    seen = torch.zeros(8, 50, dtype=torch.bool).scatter_(1, ids, True)
    assert torch.equal(ours(logits, seen), _theirs(name, logits, ids, number))


def test_the_order_of_the_rules() -> None:
    """Penalties come before the temperature, which comes before the filters; a greedy row heeds its penalties, too."""
    logits = logs([0.4, 0.3, 0.2, 0.1])
    history = History.of([[0]], 4)
    history.add(torch.tensor([1]))
    options = SamplingOptions(temperature=0.5, top_k=3, presence_penalty=math.log(3), top_p=0.7)  # 0.4, 0.1, 0.2, 0.1, squared
    assert probabilities(logits, [options], history)[0].tolist() == pytest.approx([1, 0, 0, 0], abs=1e-6)
    options = SamplingOptions(presence_penalty=math.log(3), top_k=3)
    assert probabilities(logits, [options], history)[0].tolist() == pytest.approx([4 / 7, 1 / 7, 2 / 7, 0], rel=1e-6)
    greedy = SamplingOptions(temperature=0, repetition_penalty=2.0)  # logarithms are negative: both seen tokens fall
    assert choose(logits, [greedy], torch.zeros(1), history).tolist() == [2]
    both = probabilities(
        logits.expand(2, -1), [greedy, SamplingOptions()], History(history.prompts.repeat(2, 1), history.answers.repeat(2, 1))
    )
    assert both[0].tolist() == [0, 0, 1, 0] and both[1].tolist() == pytest.approx([0.4, 0.3, 0.2, 0.1], rel=1e-6)


def test_prompts_count_for_repetition_only() -> None:
    """What stands in the prompt is penalised by the repetition penalty, not by presence or frequency."""
    logits = torch.zeros(1, 3) + 1
    history = History.of([[0]], 3)
    both = SamplingOptions(presence_penalty=5.0, frequency_penalty=5.0)
    assert probabilities(logits, [both], history)[0].tolist() == pytest.approx([1 / 3] * 3)
    assert probabilities(logits, [SamplingOptions(repetition_penalty=2.0)], history)[0, 0] < 0.3


def test_a_row_is_drawn_as_if_it_were_alone() -> None:
    """The same draw gives the same token whatever filters the other rows of the batch have."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(1, 200, generator=generator)
    others = [SamplingOptions(top_k=2), SamplingOptions(top_p=0.4), SamplingOptions(temperature=0), SamplingOptions(min_p=0.3, top_k=150)]
    for options in (SamplingOptions(), SamplingOptions(top_k=30), SamplingOptions(top_p=0.9, top_k=70), SamplingOptions(min_p=0.05)):
        for number in torch.rand(20, generator=generator, dtype=torch.float64):
            alone = choose(logits, [options], number[None])
            assert choose(logits.expand(5, -1), [options, *others], number.expand(5))[0] == alone[0]
