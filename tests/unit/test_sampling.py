"""If this fails, generated text is drawn from another distribution than the one that was asked for."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from data_pipeline.errors import ConfigError, NonFiniteError
from megatron_lite.inference.sampling import History, SamplingOptions, choose, draw, probabilities


def _after(weights: list[float], **options: float) -> list[float]:
    """The distribution that the options make of these probabilities."""
    return probabilities(torch.tensor([weights]).log(), [SamplingOptions(**options)])[0].tolist()  # type: ignore[arg-type]


def _kept(weights: list[float], **options: float) -> set[int]:
    return {token for token, probability in enumerate(_after(weights, **options)) if probability > 0}


def test_the_nucleus_has_the_token_that_crosses() -> None:
    """B122: the fewest tokens whose mass reaches top_p, the crossing one included."""
    assert _kept([0.45, 0.25, 0.20, 0.10], top_p=0.6) == {0, 1}


def test_the_nucleus_at_equality() -> None:
    """B123: a mass of exactly top_p is enough; top_p 1 keeps all."""
    weights = [0.5, 0.25, 0.125, 0.125]
    assert _kept(weights, top_p=0.75) == {0, 1}
    assert _kept(weights, top_p=1.0) == {0, 1, 2, 3}
    assert _after(weights, top_p=1.0) == pytest.approx(weights, rel=1e-6)


def test_the_nucleus_is_never_empty() -> None:
    """B124: top_p 0 is the most probable token."""
    assert _kept([0.1, 0.2, 0.3, 0.4], top_p=0.0) == {3}


def test_top_k_comes_first_and_is_renormalised() -> None:
    """B125: the nucleus is of what the top k left, renormalised."""
    assert _after([0.4, 0.3, 0.2, 0.1], top_k=2, top_p=0.9) == pytest.approx([4 / 7, 3 / 7, 0, 0], rel=1e-6)


def test_tokens_keep_their_ids() -> None:
    """B126: filtering sorts nothing that comes out."""
    assert _kept([0.1, 0.6, 0.05, 0.25], top_p=0.8) == {1, 3}


def test_temperature() -> None:
    """B127: temperature 0 and almost 0 are greedy, others divide the logits, each row by its own."""
    logits = torch.tensor([[1.0, 3.0, 2.0], [1.0, 3.0, 2.0], [1.0, 3.0, 2.0]])
    rows = probabilities(logits, [SamplingOptions(temperature=0), SamplingOptions(temperature=1e-9), SamplingOptions(temperature=2.0)])
    assert rows[0].tolist() == rows[1].tolist() == [0, 1, 0]
    assert torch.allclose(rows[2], (logits[2].double() / 2).softmax(-1), rtol=1e-12)
    assert choose(logits, [SamplingOptions(temperature=0)] * 3, torch.rand(3)).tolist() == [1, 1, 1]
    wide = torch.tensor([[-3e38, 3e38, 0.0]])
    assert probabilities(wide, [SamplingOptions(temperature=1e-5)]).tolist() == [[0, 1, 0]]


@pytest.mark.parametrize("top_k", [0, 64, 1000])
def test_top_k_of_all(top_k: int) -> None:
    """B128: a top k as large as the vocabulary or larger filters nothing; 0 is off."""
    logits = torch.randn(2, 64)
    assert torch.allclose(probabilities(logits, [SamplingOptions(top_k=top_k)] * 2), logits.double().softmax(-1), rtol=1e-12)


def test_top_k_of_one_is_greedy() -> None:
    """B128: top k 1 takes the most probable; of equal ones the lower id, and never more than k."""
    assert _kept([0.2, 0.4, 0.4], top_k=1) == {1}
    assert _kept([0.25, 0.25, 0.25, 0.25], top_k=3) == {0, 1, 2}


def test_a_few_of_many() -> None:
    """The short cut for a small k in a large vocabulary gives what ranking everything gives, with many equal logits."""
    logits = torch.randint(-3, 4, (6, 500), generator=torch.Generator().manual_seed(1)).float()
    logits[3] += torch.linspace(0, 1, 500)
    for top_k in (1, 2, 7, 100, 300):
        for row, got in enumerate(probabilities(logits, [SamplingOptions(top_k=top_k, top_p=0.9)] * 6)):
            ranked = sorted(range(500), key=lambda token: (-float(logits[row, token]), token))[:top_k]
            weights = torch.tensor([float(logits[row, token]) for token in ranked], dtype=torch.float64).softmax(0).tolist()
            kept = [token for place, token in enumerate(ranked) if place == 0 or sum(weights[:place]) < 0.9 - 1e-6]
            assert {token for token in range(500) if got[token] > 0} == set(kept)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", -0.1),
        ("top_p", 1.5),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("presence_penalty", math.nan),
        ("frequency_penalty", math.inf),
        ("presence_penalty", 1e39),  # finite, but not as fp32
        ("frequency_penalty", -1e39),
        ("repetition_penalty", 1e-300),
        ("repetition_penalty", 1e39),
        ("top_k", 2.5),
        ("seed", "x"),
        ("temperature", "hot"),
        ("temperature", True),
    ],
)
def test_bad_values_are_refused(field: str, value: object) -> None:
    """B124, B127, B128: refused with the field's name."""
    with pytest.raises(ConfigError, match=f"{field}: got"):
        SamplingOptions(**{field: value})  # type: ignore[arg-type]


def test_numpys_numbers_are_numbers() -> None:
    options = SamplingOptions(temperature=np.float32(0.5), top_k=np.int64(3), seed=np.int64(2))  # type: ignore[arg-type]
    assert draw(options.seed, 1) == draw(2, 1) and options.top_k == 3


def test_the_largest_penalties_leave_a_distribution() -> None:
    """Every logit stays finite, also of a token that was said a million times."""
    logits, history = torch.tensor([[80.0, -80.0, 3.0]]), History.of([[0, 1]], 3)
    history.answers[0, :2] = 1_000_000
    for sign in (1, -1):
        options = SamplingOptions(repetition_penalty=1e4**sign, presence_penalty=sign * 1e4, frequency_penalty=sign * 1e4)
        found = probabilities(logits, [options], history)
        assert float(found.sum()) == pytest.approx(1) and int(found.argmax()) == (2 if sign > 0 else 0)


def test_draws_follow_the_distribution() -> None:
    """Frequencies over many draws are the probabilities, and what has none is never drawn, at the ends neither."""
    weights = torch.tensor([[0.0, 0.5, 0.0, 0.3, 0.2, 0.0]])
    options = [SamplingOptions()]
    count = 20_000
    draws = torch.tensor([draw(1, place) for place in range(count)], dtype=torch.float64)
    chosen = choose(weights.log().expand(count, -1), options * count, draws)
    frequencies = torch.bincount(chosen, minlength=6) / count
    assert torch.allclose(frequencies, weights[0], atol=0.012)
    ends = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert choose(weights.log().expand(2, -1), options * 2, ends).tolist() == [1, 4]


def test_draws_are_golden() -> None:
    """The same seed gives the same text in every version."""
    assert [round(draw(7, place), 12) for place in range(3)] == GOLDEN
    assert len({draw(seed, place) for seed in range(50) for place in range(50)}) == 2500


GOLDEN = [0.245348183528, 0.33670946052, 0.879584907215]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_logits_stop(bad: float) -> None:
    """Logits that are not finite are an error, not token 0."""
    logits = torch.tensor([[0.0, 1.0], [bad, 0.0]])
    for options in (SamplingOptions(), SamplingOptions(temperature=0)):
        with pytest.raises(NonFiniteError):
            choose(logits, [options] * 2, torch.zeros(2))
