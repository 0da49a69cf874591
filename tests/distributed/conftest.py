"""One pool of processes for each world size, alive for the session."""

from collections.abc import Iterator

import pytest

from tests.ranks import Ranks, pool


@pytest.fixture(scope="session")
def ranks2() -> Iterator[Ranks]:
    yield pool(2)
    pool(2).close()


@pytest.fixture(scope="session")
def ranks4() -> Iterator[Ranks]:
    yield pool(4)
    pool(4).close()
