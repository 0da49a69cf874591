"""A pool of gloo processes that runs many cases in one start.

    results = Ranks(4).run(function, *args)      # function(*args) on every rank; a list with each rank's result

A function must be importable by name, its arguments and results picklable. A rank's failure is raised here with its
traceback; what does not end in time is killed. After either, the next run starts a fresh pool.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from megatron_lite.parallel.grid import RankGrid
from megatron_lite.parallel.groups import ProcessGroups

PRELOADED = [
    *("launcher.job", "launcher.train", "megatron_lite.training.engine_torch", "megatron_lite.training.engine_deepspeed"),
    # And what those import when they first need it, which took a short run six times as long as all that it computed: optimizers
    # load dynamo, DeepSpeed's ZeRO loads inductor for an optimizer that nobody asked for, packing numba, the end of a run matplotlib.
    *("torch._dynamo", "deepspeed.runtime.zero.muon.original_muon", "megatron_lite.training.engine_deepspeed_partitions"),
    *("data_pipeline.exact_fill", "matplotlib.figure", "matplotlib.backends.backend_agg", "setuptools"),
]
START_TIMEOUT_S = 120.0
GRACE_S = 3.0  # for the other ranks to report, once one has failed


def forkserver() -> Any:
    """The context that all processes of tests start from: a server that has loaded all that they need once, and computed nothing."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed chooses when it is loaded
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


class RankError(AssertionError):
    """One or more ranks failed, hung or died."""


class Ranks:
    """`world_size` processes with torch.distributed over gloo, one thread each, started at the first run."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0, **kwargs: Any) -> list[Any]:
        """function(*args, **kwargs) on every rank; raises RankError."""
        if not self._processes:
            self._start()
        message = pickle.dumps((function, args, kwargs))
        try:
            for pipe in self._pipes:
                pipe.send_bytes(message)
        except OSError:
            self.close()
            raise RankError("a rank had died before the run") from None
        return self._collect(timeout_s, str(getattr(function, "__name__", function)))

    def close(self) -> None:
        """Kill what runs."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(10)
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context = forkserver()
        port = _free_port()
        for rank in range(self.world_size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, rank, self.world_size, port), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)
        self._collect(START_TIMEOUT_S, "the start of the pool")

    def _collect(self, timeout_s: float, what: str) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        results: dict[int, Any] = {}
        failures: list[str] = []
        while len(results) < self.world_size:
            waiting = [self._pipes[rank] for rank in range(self.world_size) if rank not in results]
            ready = wait(waiting, timeout=max(deadline - time.monotonic(), 0.0))
            if not ready:
                silent = sorted(set(range(self.world_size)) - results.keys())
                failures.append(f"no answer from ranks {silent}" + (f" within {timeout_s:.0f} s" if not failures else ""))
                break
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    failure, results[rank] = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, OSError):
                    failure, results[rank] = "died", None
                if failure:
                    failures.append(f"rank {rank}: {failure}")
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if failures:
            self.close()
            raise RankError(f"{what} on {self.world_size} ranks\n" + "\n".join(failures))
        return [results[rank] for rank in range(self.world_size)]


def groups_of(*, tp: int = 1, dp: int = 1, sequence_parallel: bool = False) -> ProcessGroups:
    """On a rank: the groups of this layout, made once in the pool's life."""
    return _groups(tp, dp, sequence_parallel)


@functools.cache
def _groups(tp: int, dp: int, sequence_parallel: bool) -> ProcessGroups:
    return ProcessGroups.create(RankGrid(tp=tp, dp=dp), sequence_parallel=sequence_parallel)


@functools.cache
def pool(world_size: int) -> Ranks:
    """The session's pool of this size."""
    return Ranks(world_size)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _serve(pipe: Connection, rank: int, world_size: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
        DS_ACCELERATOR="cpu",
    )
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    pipe.send_bytes(pickle.dumps((None, None)))
    while True:
        try:
            function, args, kwargs = pickle.loads(pipe.recv_bytes())
        except EOFError:  # the parent closed the pool, or died
            return
        except Exception:  # a function that this process can't import
            pipe.send_bytes(pickle.dumps((traceback.format_exc(), None)))
            continue
        try:
            answer = pickle.dumps((None, function(*args, **kwargs)))
        except Exception:
            answer = pickle.dumps((traceback.format_exc(), None))
        finally:
            _forget_deepspeed()
        pipe.send_bytes(answer)


def _forget_deepspeed() -> None:
    """DeepSpeed keeps the first mpu that it was given in a module; the next case may have another layout."""
    groups = sys.modules.get("deepspeed.utils.groups")
    if groups is not None:
        groups.mpu = None  # type: ignore[attr-defined]
