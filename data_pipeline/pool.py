"""Worker processes: always spawned, never forked (a fork after threads have started hangs or corrupts)."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait as wait_for
from typing import Any, TypeVar

from data_pipeline.errors import DataError, MegatronLiteError

Task = TypeVar("Task")
Result = TypeVar("Result")
Report = Callable[[int], None]
_POLL_S = 0.2

_done: Any = None  # in a worker: the counter that it shares with its parent


class Workers:
    """Runs tasks in `count` processes, or in this one where `count` is 1."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool: ProcessPoolExecutor | None = None
        self._counter: Any = None

    def run(self, function: Callable[[Task, Report], Result], tasks: Sequence[Task], *, advance: Report) -> list[Result]:
        """Results in the order of the tasks. `function` (of a module, so that it can be sent) is told a callable that it
        tells how much it has done; the sum comes out of `advance` here. The first failure ends the rest and is raised."""
        if self.count == 1 or len(tasks) < 2:
            return [function(task, advance) for task in tasks]
        pool = self._started()
        seen = self._counter.value
        futures: dict[Future[Result], int] = {pool.submit(_call, function, task): number for number, task in enumerate(tasks)}
        results: list[Any] = [None] * len(tasks)
        pending = set(futures)
        try:
            while pending:
                finished, pending = wait(pending, timeout=_POLL_S, return_when=FIRST_COMPLETED)
                advance(self._counter.value - seen)
                seen = self._counter.value
                for future in finished:
                    results[futures[future]] = future.result()
        except BrokenProcessPool:
            self.close()
            raise MegatronLiteError(
                "a worker process died, most likely because memory ran out. What was finished is kept: run the same command again, with fewer workers."
            ) from None
        except BaseException:
            self.close()
            raise
        return results

    def _started(self) -> ProcessPoolExecutor:
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._counter = context.Value("q", 0)
            self._pool = ProcessPoolExecutor(self.count, mp_context=context, initializer=_begin, initargs=(self._counter,))
        return self._pool

    def close(self) -> None:
        """End the workers at once: whatever they were writing is a temporary file."""
        if self._pool is not None:
            processes = list((self._pool._processes or {}).values())
            self._pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.terminate()
            for process in processes:
                process.join()
            self._pool = None


@contextmanager
def started(count: int) -> Iterator[Workers]:
    workers = Workers(count)
    try:
        yield workers
    finally:
        workers.close()


def _begin(counter: Any) -> None:
    """In a new worker: share the counter, leave Ctrl-C to the parent, and go when the parent is gone, however it went."""
    global _done
    _done = counter
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_go_with, args=(parent.sentinel,), daemon=True).start()


def _go_with(sentinel: int) -> None:
    wait_for([sentinel])
    os._exit(1)


def _call(function: Callable[[Any, Report], Any], task: Any) -> Any:
    try:
        return function(task, _report)
    except MegatronLiteError as error:
        raise DataError(str(error)) from None  # a plain one survives the way back; others may not unpickle


def _report(amount: int) -> None:
    with _done.get_lock():
        _done.value += amount
