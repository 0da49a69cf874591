"""If this fails, sources are not drawn in the proportions that were asked for, or a resume draws others (B041, B046)."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.errors import ConfigError
from data_pipeline.mixture import BLOCK_SAMPLES, Mixture, Phase, integer_weights
from data_pipeline.quota import fast_walk, walk


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
