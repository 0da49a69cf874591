"""If this fails, training visits some rows twice and others never, or the order of an old run changes."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from data_pipeline.permutation import Permutation


@pytest.mark.parametrize("n", [1, 2, 3, 7, 63, 64, 65, 100, 257, 1000, 4096, 5001])
def test_is_a_bijection_whose_inverse_is_its_inverse(n: int) -> None:
    order = Permutation(n, key="k")
    images = [order(i) for i in range(n)]
    assert sorted(images) == list(range(n))
    assert [order.inverse(image) for image in images] == list(range(n))
    np.testing.assert_array_equal(order.many(0, n), images)
    np.testing.assert_array_equal(order.many(n // 3, n // 2), images[n // 3 : n // 2])


def test_large_domains_walk_back() -> None:
    for n in (1 << 40, (1 << 40) + 1, 123_456_789_012):
        order = Permutation(n, key="large")
        for index in (0, 1, n // 2, n - 1):
            image = order(index)
            assert 0 <= image < n and order.inverse(image) == index
            assert order.many(index, index + 1)[0] == image


def test_another_key_or_size_gives_another_order() -> None:
    orders = [Permutation(1000, key=key).many(0, 1000) for key in ("a", "b", "a1")]
    for i, one in enumerate(orders):
        for other in orders[i + 1 :]:
            assert (one == other).sum() < 10  # a random pair agrees at one place on average
    assert (Permutation(1001, key="a").many(0, 1000) == orders[0]).sum() < 10


def test_order_looks_random() -> None:
    """Over many keys each place gets each image equally often (chi-square with 4 standard deviations of room)."""
    n, keys = 50, 4000
    counts = np.zeros((n, n))
    for key in range(keys):
        counts[np.arange(n), Permutation(n, key=str(key)).many(0, n)] += 1
    chi = ((counts - keys / n) ** 2 / (keys / n)).sum()
    freedom = (n - 1) ** 2
    assert abs(chi - freedom) < 4 * np.sqrt(2 * freedom)
    images = Permutation(100_000, key="x").many(0, 100_000)
    assert abs(np.corrcoef(images[:-1], images[1:])[0, 1]) < 0.015
    assert abs(np.corrcoef(images, np.arange(images.size))[0, 1]) < 0.015


def test_order_never_changes_between_versions() -> None:
    """Golden values, made by this code when the format was set: a change would break the resume of every run."""
    assert [Permutation(10, key="golden")(i) for i in range(10)] == GOLDEN_TEN
    digest = hashlib.sha256(Permutation(100_003, key="golden").many(0, 100_003).astype("<i8").tobytes()).hexdigest()
    assert digest == GOLDEN_DIGEST


GOLDEN_TEN = [3, 8, 0, 4, 6, 9, 5, 1, 2, 7]
GOLDEN_DIGEST = "411b2d1f605aa988ec0986b863f0a015d5d7c1dbd6e06255a4bdf811cb1d31e0"
