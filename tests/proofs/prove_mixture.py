"""Real runs of a mixture with a schedule, stopped after every step and resumed on another number of ranks. Into mixture.md."""

from __future__ import annotations

import tempfile
import time
from fractions import Fraction
from pathlib import Path

import yaml

from data_pipeline.loader import Phase
from data_pipeline.mixture import Mixture
from launcher.mixture import phases_of_run
from launcher.run_folder import RunFolder
from tests.data_fixtures import tiny_dataset, tiny_texts
from tests.integration.conftest import CONFIG
from tests.integration.jobs import Workspace

STEPS, BATCH, MOST_RANKS = 6, 12, 4
SCHEDULE = [{"from_step": 3, "weights": [0.2, 0.2, 0.6]}, {"from_step": 5, "weights": [0.0, 0.5, 0.5], "over_steps": 2}]
# What is proved is which rows come, not what is learnt from them: as little model as there can be, and the engine that starts fastest.
SMALLEST = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 8}
HEAD = f"""# Mixtures: resumed at every step, on any number of ranks, the batches are the same

Written by `python -m tests.proofs.prove mixture`. Three sources, weights 0.6, 0.3, 0.1 that change at step 3 and gradually from step 5 on; {STEPS} steps of
{BATCH} sequences. Each chain of runs is stopped after every step by its limit of steps and resumed on another number of ranks (gloo, CPU), so each
resume is followed by another one; `batch_id`s are compared with those of one run on one rank.

| chain | ranks at each step | batch_ids |
|---|---|---|
"""


def prove(folder: Path) -> bool:
    """Write mixture.md; True where every batch_id is that of the straight run and every prefix is within a sample of its share."""
    began, rows, good = time.monotonic(), [], True
    with tempfile.TemporaryDirectory() as temporary:
        workspace = _workspace(Path(temporary))
        code, output = workspace.run("run.name=straight", timeout_s=600)
        assert code == 0, output
        wanted = [line["batch_id"] for line in workspace.metrics("straight") if "batch_id" in line]
        assert len(set(wanted)) == STEPS, wanted
        for chain in range(MOST_RANKS):
            name, worlds = f"chain{chain}", [(chain + step) % MOST_RANKS + 1 for step in range(STEPS)]
            for step, world in enumerate(worlds, start=1):
                code, output = workspace.run(f"run.name={name}", f"training.steps={step}", world=world, timeout_s=600)
                assert code == 0, (name, step, world, output)
            found = [line["batch_id"] for line in workspace.metrics(name) if "batch_id" in line]
            good &= found == wanted
            rows.append(
                f"| {chain + 1} | {', '.join(map(str, worlds))} | {'all the same' if found == wanted else f'DIFFER: {found} for {wanted}'} |"
            )
            print(rows[-1], flush=True)
        phases = phases_of_run(RunFolder(workspace.path("straight")))
        assert phases is not None
    worst = furthest(phases, STEPS * BATCH)
    good &= worst <= 1
    end = f"At each of the {STEPS * BATCH} samples every source is within {float(worst):.3f} samples of its share so far. {time.monotonic() - began:.0f} s."
    (folder / "mixture.md").write_text(HEAD + "\n".join(rows) + f"\n\n{end}\n")
    return good


def furthest(phases: list[Phase], num_samples: int) -> Fraction:
    """The largest |served - w t|, in exact arithmetic, w t being the sum of the shares in force."""
    mixture, (phase,) = Mixture(phases), phases
    pieces, worst = [(0, phase.weights), *phase.changes], Fraction(0)
    due = [Fraction(0)] * len(phase.weights)
    for sample in range(num_samples):
        weights = [Fraction(str(weight)) for weight in [these for start, these in pieces if start <= sample][-1]]
        due = [before + weight / sum(weights) for before, weight in zip(due, weights)]
        worst = max(worst, *(abs(count - share) for count, share in zip(mixture.served(sample + 1).tolist(), due)))
    return worst


def _workspace(folder: Path) -> Workspace:
    sources = []
    for number, (weight, documents) in enumerate(((0.6, 60), (0.3, 40), (0.1, 20))):
        path = folder / f"source{number}"
        tiny_dataset(path, tiny_texts(documents, seed=number))
        sources.append({"path": str(path), "weight": weight})
    training = {**CONFIG["training"], "steps": STEPS, "global_batch_size": BATCH, "micro_batch_size": 1, "engine": "torch"}
    tree = {
        **CONFIG,
        "model": {**CONFIG["model"], **SMALLEST},
        "data": {"sources": sources, "schedule": SCHEDULE},
        "training": training,
        "evaluation": {"interval_steps": None},
    }
    tree |= {"parallel": {"zero_stage": 0}, "checkpoint": {"interval_steps": 1}, "lr_scheduler": {"name": "constant", "warmup_steps": 0}}
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump(tree))
    return Workspace(folder, config)
