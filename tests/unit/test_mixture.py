"""If this fails, sources are not drawn in the proportions that were asked for, or a resume draws others (B041, B046)."""

from __future__ import annotations

import json
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.errors import ConfigError
from data_pipeline.mixture import BLOCK_SAMPLES, Mixture, Phase, common_weights, integer_weights
from data_pipeline.quota import fast_scheduled_walk, fast_walk, scheduled_walk, walk


def simple(weights: list[Fraction], num_samples: int) -> list[int]:
    """The rule as it is written, in rational numbers."""
    share = [weight / sum(weights) for weight in weights]
    served = [0] * len(weights)
    out = []
    for t in range(1, num_samples + 1):
        below = [i for i, w in enumerate(share) if served[i] < w * t]
        best = min(below, key=lambda i: ((served[i] + 1) / share[i], i))
        served[best] += 1
        out.append(best)
        assert all(abs(count - w * t) <= 1 for count, w in zip(served, share))
    return out


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any))
def test_every_prefix_is_within_one_sample_of_its_share(weights: list[int]) -> None:
    mixture = Mixture([Phase(0, tuple(weights))])
    num_samples = 300
    wanted = simple([Fraction(weight) for weight in weights], num_samples)
    located = [mixture.locate(t) for t in range(num_samples)]
    assert [source for source, _ in located] == wanted
    counts = [0] * len(weights)
    for t, (source, rank) in enumerate(located):
        np.testing.assert_array_equal(mixture.served(t), counts)
        assert rank == counts[source]
        counts[source] += 1


def test_b046_seven_to_three_is_seventy_and_thirty() -> None:
    served = Mixture([Phase(0, (0.7, 0.3))]).served(100)
    assert served.tolist() == [70, 30]


def test_a_place_far_away_is_what_walking_there_gives() -> None:
    weights = (123_457.0, 98_765.0, 3.0, 55_555.5)  # a period of 555,561: nine blocks
    near, far = Mixture([Phase(0, weights)]), Mixture([Phase(0, weights)])
    period = int(integer_weights(weights).sum())
    assert period > 8 * BLOCK_SAMPLES
    for t in (BLOCK_SAMPLES - 1, BLOCK_SAMPLES, 5 * BLOCK_SAMPLES + 17, period - 1, period, 10**12 + 12_345):
        for step in range(3):
            assert Mixture([Phase(0, weights)]).locate(t + step) == near.locate(t + step)
    assert far.locate(10**12) == near.locate(10**12)
    share = np.array(weights) / sum(weights)
    for t in (1, 1000, BLOCK_SAMPLES + 1, period + 7, 10**10):
        assert np.abs(far.served(t) - share * t).max() <= 1 + 1e-4


def test_compiled_and_plain_agree() -> None:
    weights = integer_weights([0.31, 0.29, 0.17, 0.13, 0.1])
    one, two = np.zeros(5, dtype=np.int64), np.zeros(5, dtype=np.int64)
    plain, compiled = walk(weights, one, 0, 90), fast_walk(5, 1 << 30)(weights, two, 0, 90)
    np.testing.assert_array_equal(plain[0], compiled[0])
    np.testing.assert_array_equal(plain[1], compiled[1])
    np.testing.assert_array_equal(one, two)


def test_a_new_phase_goes_on_counting() -> None:
    mixture = Mixture([Phase(0, (1.0, 1.0)), Phase(10, (1.0, 0.0)), Phase(20, (0.25, 0.75))])
    seen = [mixture.locate(t) for t in range(60)]
    for source in (0, 1):
        assert [rank for s, rank in seen if s == source] == list(range(sum(s == source for s, _ in seen)))
    assert {source for source, _ in seen[10:20]} == {0}
    assert mixture.served(10).tolist() == [5, 5]
    assert mixture.served(20).tolist() == [15, 5]
    assert mixture.served(60).tolist() == [25, 35]


def test_weights_are_taken_as_written() -> None:
    assert integer_weights([0.1, 0.2, 0.7]).tolist() == [1, 2, 7]
    assert integer_weights([3, 6]).tolist() == [1, 2]
    assert integer_weights([1e-3, 1.0]).tolist() == [1, 1000]
    with pytest.raises(ConfigError, match="at least one above 0"):
        integer_weights([0.0, 0.0])
    with pytest.raises(ConfigError, match="at least one above 0"):
        integer_weights([float("nan"), 1.0])
    with pytest.raises(ConfigError, match="at least one above 0"):
        integer_weights([-1.0, 2.0])
    with pytest.raises(ConfigError, match="round them"):
        integer_weights([0.123456789012, 0.876543210988])


# --------------------------------------------------------------------------------------------- weights by a schedule


def quota(phase: Phase, t: int) -> list[Fraction]:
    """What each source should have had after t samples, by the schedule, in rational numbers."""
    pieces = [(0, phase.weights), *phase.changes]
    due = [Fraction(0)] * len(phase.weights)
    for (start, weights), end in zip(pieces, [*(sample for sample, _ in phase.changes), 1 << 62]):
        exact = [Fraction(str(weight)) for weight in weights]
        held = max(0, min(t, end) - start)
        due = [d + held * weight / sum(exact) for d, weight in zip(due, exact)]
    return due


def simple_scheduled(phase: Phase, num_samples: int) -> list[int]:
    """The rule as it is written: of the sources below their quota, the one whose next sample is overdue first."""
    far = num_samples + 400
    due = [quota(phase, t) for t in range(far + 1)]
    served, out = [0] * len(phase.weights), []
    for t in range(1, num_samples + 1):
        below = [i for i, count in enumerate(served) if count < due[t][i]]
        deadline = {i: next((later for later in range(far + 1) if due[later][i] > served[i] + 1), 1 << 62) for i in below}
        best = min(below, key=lambda i: (deadline[i], i))
        served[best] += 1
        out.append(best)
    return out


@st.composite
def schedules(draw: st.DrawFn) -> Phase:
    num_sources = draw(st.integers(1, 6))
    cuts = st.lists(st.integers(0, 24), min_size=num_sources - 1, max_size=num_sources - 1)  # parts of 24, some of them 0
    weights = cuts.map(lambda cut: tuple(b - a for a, b in pairwise([0, *sorted(cut), 24])))
    places = sorted(draw(st.sets(st.integers(1, 150), min_size=1, max_size=8)))
    return Phase(0, draw(weights), tuple((place, draw(weights)) for place in places))


@settings(max_examples=30, deadline=None)
@given(schedules())
def test_under_any_schedule_every_prefix_is_within_one_sample_of_its_share(phase: Phase) -> None:
    """|served - w t| <= 1 at every t, w t being the sum of the shares so far; B046's exact counts, whatever changes when."""
    mixture = Mixture([phase])
    counts = [0] * mixture.num_sources
    for t in range(220):
        np.testing.assert_array_equal(mixture.served(t), counts)
        assert all(abs(count - due) <= 1 for count, due in zip(counts, quota(phase, t))), (t, counts)
        source, rank = mixture.locate(t)
        assert rank == counts[source]
        counts[source] += 1


@settings(max_examples=12, deadline=None)
@given(schedules())
def test_a_schedule_is_walked_as_its_rule_says(phase: Phase) -> None:
    mixture = Mixture([phase])
    seen = [mixture.locate(t)[0] for t in range(60)]
    assert seen == simple_scheduled(phase, 60)


def test_a_new_phase_in_the_middle_of_a_schedule_repeats_and_skips_nothing() -> None:
    """The samples before it stay what they were, though the changes that were planned after it never come."""
    planned = Phase(0, (6.0, 3.0, 1.0), ((40, (1.0, 3.0, 6.0)), (80, (0.0, 0.0, 1.0))))
    before = [Mixture([planned]).locate(t) for t in range(120)]
    for cut in range(1, 90):
        mixture = Mixture([planned, Phase(cut, (1.0, 1.0, 0.0), ((cut + 10, (1.0, 0.0, 1.0)),))])
        seen = [mixture.locate(t) for t in range(120)]
        assert seen[:cut] == before[:cut]
        for source in range(3):
            assert [rank for s, rank in seen if s == source] == list(range(sum(s == source for s, _ in seen)))


def test_a_schedule_far_away_compiled_and_plain_agree() -> None:
    phase = Phase(0, (0.7, 0.2, 0.1), ((70_001, (0.333333, 0.333333, 0.333334)), (300_000, (0.1, 0.2, 0.7))))
    near, far = Mixture([phase]), Mixture([phase])
    for t in (69_999, 70_001, 131_072, 299_999, 300_000, 1_000_003):
        assert far.locate(t) == near.locate(t)
        due = [float(share) for share in quota(phase, t)]
        assert np.abs(far.served(t) - due).max() <= 1
    weights = common_weights([phase.weights, *(weights for _, weights in phase.changes)])
    assert {int(row.sum()) for row in weights} == {10**6}
    starts = np.array([0, 30, 60])
    due_before = np.concatenate([np.zeros_like(weights[:1]), np.cumsum(weights[:-1] * 30, axis=0)])
    one, two = np.zeros(3, dtype=np.int64), np.zeros(3, dtype=np.int64)
    plain = scheduled_walk(starts, weights, due_before, one, 0, 90)
    compiled = fast_scheduled_walk(3, 1 << 30)(starts, weights, due_before, two, 0, 90)
    np.testing.assert_array_equal(plain[0], compiled[0])
    np.testing.assert_array_equal(plain[1], compiled[1])
    np.testing.assert_array_equal(one, two)


def test_phases_are_kept_as_plain_values() -> None:
    for phase in (Phase(3, (1.0, 2.0)), Phase(0, (0.5, 0.5), ((10, (1.0, 0.0)),))):
        assert Phase.from_dict(json.loads(json.dumps(phase.to_dict()))) == phase
    assert Phase(3, (1.0, 2.0)).to_dict() == {"from_sample": 3, "weights": [1.0, 2.0]}
    with pytest.raises(ConfigError, match="same few decimals"):
        common_weights([(0.1234567, 0.8765433), (1, 1, 1_000_001)])
