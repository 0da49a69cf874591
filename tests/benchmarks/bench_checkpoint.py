"""Speed and memory of saving and loading a checkpoint in one process, as JSON: `python tests/benchmarks/bench_checkpoint.py`."""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from pathlib import Path

import torch

from megatron_lite.checkpoint.load import load_into, load_logical
from megatron_lite.checkpoint.manifest import RunState
from megatron_lite.checkpoint.save import save_checkpoint
from megatron_lite.checkpoint.slices import STATES, OwnedSlice
from megatron_lite.parallel.groups import ProcessGroups
from megatron_lite.parallel.shard_spec import Piece, ShardSpec

SHAPE = (2048, 1024)  # 8 MiB in fp32


def _peak_mb() -> float:
    unit = 2**20 if sys.platform == "darwin" else 2**10  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def _slices(megabytes: int) -> list[OwnedSlice]:
    found = []
    for number in range(max(megabytes // (8 * len(STATES)), 1)):
        spec = ShardSpec((Piece(f"layers.{number}.weight", SHAPE, (0, 0), SHAPE),), SHAPE, cut=False)
        size = SHAPE[0] * SHAPE[1]
        found += [OwnedSlice(f"layers.{number}", spec, state, 0, size, torch.rand(size)) for state in STATES]
    return found


def measure(megabytes: int, folder: Path) -> dict[str, float]:
    """Gigabytes a second, and how far the peak rose above the tensors themselves."""
    state = RunState(1, 1, 1, 1, 1, 1, {}, "", {})
    slices, groups = _slices(megabytes), ProcessGroups.single()
    gigabytes = sum(each.view.numel() for each in slices) * 4 / 1e9
    before, clock = _peak_mb(), time.perf_counter()
    path = save_checkpoint(folder, step=1, slices=slices, groups=groups, attempt=1, state=state)
    save_s, saved = time.perf_counter() - clock, _peak_mb()
    clock = time.perf_counter()
    load_into(path, slices, groups)
    load_s, loaded = time.perf_counter() - clock, _peak_mb()
    clock = time.perf_counter()
    whole = sum(tensor.numel() for _, tensor in load_logical(path)) * 4 / 1e9
    logical_s = time.perf_counter() - clock
    return {
        "gigabytes": gigabytes,
        "save_gb_s": gigabytes / save_s,
        "load_gb_s": gigabytes / load_s,
        "load_logical_gb_s": whole / logical_s,
        "save_extra_mb": saved - before,
        "load_extra_mb": loaded - saved,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=2000)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        print(json.dumps(measure(parser.parse_args().megabytes, Path(name))))
