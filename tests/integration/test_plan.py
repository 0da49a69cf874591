"""If this fails, what `mlite plan` says before a run is not what the run then needs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.integration.jobs import TRAIN, Workspace

BAND = 0.15  # promised for peak memory
# Enough that the model, and not Python, is what one measures: 13 million parameters beside a few hundred MiB of activations.
MODEL = ("model.vocab_size=4096", "model.hidden_size=512", "model.num_hidden_layers=3", "model.intermediate_size=1536")
SHAPE = ("model.num_attention_heads=8", "model.max_position_embeddings=512", "training.sequence_length=512", "model.hidden_dropout=0.0")
RUN = ("training.steps=2", "training.global_batch_size=4", "training.micro_batch_size=2", "evaluation.max_sequences=2")
EXACT = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_MMAP_MAX_": "1000000",
}  # the C library gives back what is freed, so that resident is what was asked for


def test_the_run_agrees_with_its_plan(workspace: Workspace) -> None:
    """Peak memory within the promised band, checkpoint size exact; the run writes both numbers down and says them."""
    planned = workspace.command("mlite", "plan", str(workspace.config), *MODEL, *SHAPE, *RUN, "--json")
    assert planned.returncode == 0, planned.stderr
    plan = json.loads(planned.stdout)
    run = workspace.command(sys.executable, TRAIN, str(workspace.config), *MODEL, *SHAPE, *RUN, **EXACT)
    assert run.returncode == 0, run.stdout + run.stderr
    (event,) = workspace.events("a", "memory")
    assert event["planned_bytes"] == plan["memory"]["peak_bytes"]
    assert abs(event["planned_bytes"] / event["measured_bytes"] - 1) < BAND, event
    assert "peak memory of a rank: planned" in run.stdout
    assert saved_bytes(workspace.path("a") / "checkpoints" / "step_00000002") == plan["checkpoint_bytes"]


def saved_bytes(checkpoint: Path) -> int:
    """Bytes of tensors in the safetensors files, by their own headers."""
    total = 0
    for file in checkpoint.glob("*.safetensors"):
        data = file.read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        total += sum(last - first for name, entry in header.items() if name != "__metadata__" for first, last in [entry["data_offsets"]])
    return total


def test_plan_refuses_with_exit_code_2(workspace: Workspace) -> None:
    """If this fails, a script that asks `plan` first starts what can't fit."""
    fits = workspace.command("mlite", "plan", str(workspace.config), "--memory", "2GiB")
    assert fits.returncode == 0 and "together" in fits.stdout and "--rate" in fits.stdout, fits.stdout + fits.stderr
    refused = workspace.command("mlite", "plan", str(workspace.config), *MODEL, *SHAPE, "--memory", "940MiB", "--world", "2")
    assert refused.returncode == 2 and "these would fit" in refused.stderr, refused.stdout + refused.stderr
