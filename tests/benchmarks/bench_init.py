"""Seconds and peak memory of making one rank's share of a model at tp=8, and that no full tensor of it ever stands in memory.

    python tests/benchmarks/bench_init.py [--layers 32] [--dtype bf16] [--json FILE]

The model is an 8B Llama shape. For each module the peak of resident memory, above what had been there, is compared with
the largest full logical tensor that the module holds a part of. Linux only (/proc/self/clear_refs resets the peak).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import platform
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from megatron_lite.model_config import ModelConfig
from megatron_lite.models.build import build_model
from megatron_lite.models.init import materialise
from megatron_lite.parallel.groups import Axis, ProcessGroups
from megatron_lite.parallel.shard_spec import spec_of
from megatron_lite.sizes import num_parameters

TP = 8


def config_8b(layers: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=128256,
        hidden_size=4096,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14336,
        max_position_embeddings=8192,
    )


def memory_bytes(key: str) -> int:
    """VmRSS now, or VmHWM, its peak since the last reset."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def measure(layers: int, dtype: torch.dtype) -> dict[str, float | str]:
    """Make the share of tp rank 3; raises AssertionError where a module's peak reaches its largest full tensor."""
    config = config_8b(layers)
    groups = dataclasses.replace(ProcessGroups.single(), tp=Axis("tp", TP, 3))  # nothing is communicated
    model = build_model(config, groups, seed=0, materialise=False)
    names = {id(module): name for name, module in model.named_modules()}
    worst = 0.0
    start_bytes = memory_bytes("VmRSS")
    before = start_bytes
    reset_peak()

    def check(module: nn.Module, parameters: list[nn.Parameter]) -> None:
        nonlocal before, worst
        above = memory_bytes("VmHWM") - before
        full = 4 * max(math.prod(piece.global_shape) for parameter in parameters for piece in spec_of(parameter).pieces)
        if full > 2**26:  # below that, the allocator's own habits are what one measures
            worst = max(worst, above / full)
            assert above < full, f"{names[id(module)]}: {above / 2**20:.0f} MiB above what was there; a full tensor has {full / 2**20:.0f}"
        before = memory_bytes("VmRSS")
        reset_peak()

    began = time.perf_counter()
    materialise(model, config, seed=0, device="cpu", dtype=dtype, after_module=check)
    seconds = time.perf_counter() - began
    share = sum(parameter.numel() for parameter in model.parameters())
    largest = 4 * max(math.prod(piece.global_shape) for parameter in model.parameters() for piece in spec_of(parameter).pieces)
    return {
        "parameters": num_parameters(config),
        "share_parameters": share,
        "share_bytes": share * dtype.itemsize,
        "largest_full_tensor_bytes": largest,
        "seconds": round(seconds, 1),
        "ns_per_parameter": round(seconds / share * 1e9, 1),
        "resident_bytes_above_start": memory_bytes("VmRSS") - start_bytes,
        "worst_peak_over_full_tensor": round(worst, 3),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "machine": f"{platform.machine()} {platform.system()}",
        "command": "python " + " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%d"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result = measure(arguments.layers, torch.bfloat16 if arguments.dtype == "bf16" else torch.float32)
    print(json.dumps(result, indent=1))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
