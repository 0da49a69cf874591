"""Rows of the coming batches, read by threads while the model computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, Protocol, TypeVar

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class RowReader(Protocol[R_co]):
    def __getitem__(self, sample: int) -> R_co: ...


class Prefetcher(Iterator[list[R]], Generic[R]):
    """Iterates over the rows of each batch of sample numbers, in order, `depth` batches ahead, each read by `num_threads` side by side.

    An exception in a thread comes out at its batch's turn. `close` (or leaving a `with`) waits for what is being read.
    """

    def __init__(self, rows: RowReader[R], batches: Iterable[Sequence[int]], *, depth: int = 2, num_threads: int = 1) -> None:
        assert depth >= 1 and num_threads >= 1
        self._rows, self._batches = rows, iter(batches)
        self._pool = ThreadPoolExecutor(max_workers=num_threads, thread_name_prefix="rows")
        self._num_threads = num_threads
        self._ahead: deque[list[Future[list[R]]]] = deque()
        for _ in range(depth):
            self._submit()

    def _submit(self) -> None:
        batch = next(self._batches, None)
        if batch is not None:
            samples = list(batch)
            share = max(1, -(-len(samples) // self._num_threads))
            shares = [samples[first : first + share] for first in range(0, len(samples), share)]
            self._ahead.append([self._pool.submit(self._read, each) for each in shares])

    def _read(self, batch: list[int]) -> list[R]:
        return [self._rows[sample] for sample in batch]

    def __next__(self) -> list[R]:
        if not self._ahead:
            raise StopIteration
        rows = [row for share in self._ahead.popleft() for row in share.result()]
        self._submit()
        return rows

    def close(self) -> None:
        self._ahead.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Prefetcher[R]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()
