"""If this fails, a worker's error is lost, its results come in another order, or it outlives the build."""

from __future__ import annotations

import os
import signal
import time

import pytest

from data_pipeline.errors import DataError, MegatronLiteError
from data_pipeline.pool import Report, started
from data_pipeline.streams import DamagedStream


def slow_square(task: int, report: Report) -> int:
    time.sleep(0.05 * (task % 3))
    report(task)
    return task * task


def fails(task: int, report: Report) -> int:
    if task == 2:
        raise DamagedStream("raw/x.gz is truncated", kind="truncated")  # doesn't unpickle as it is
    return task


def dies(task: int, report: Report) -> int:
    if task == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return task


@pytest.mark.parametrize("count", [1, 2])
def test_results_come_in_the_order_of_the_tasks(count: int) -> None:
    done: list[int] = []
    with started(count) as workers:
        assert workers.run(slow_square, list(range(7)), advance=done.append) == [n * n for n in range(7)]
        assert workers.run(slow_square, [3, 4], advance=done.append) == [9, 16]
    assert sum(done) == sum(range(7)) + 7


@pytest.mark.parametrize("count", [1, 2])
def test_an_error_meant_for_the_user_arrives_as_it_is(count: int) -> None:
    with started(count) as workers, pytest.raises(DataError, match=r"raw/x\.gz is truncated"):
        workers.run(fails, list(range(5)), advance=lambda _: None)


def test_a_worker_that_dies_is_said_and_the_pool_can_start_again() -> None:
    with started(2) as workers:
        with pytest.raises(MegatronLiteError, match=r"a worker process died.*fewer workers"):
            workers.run(dies, list(range(4)), advance=lambda _: None)
        assert workers.run(slow_square, [1, 2, 3], advance=lambda _: None) == [1, 4, 9]
