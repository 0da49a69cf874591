"""How long a job takes from its command to the end of its first step, beside a bare DeepSpeed script that does one.

    python -m tests.benchmarks.bench_start [--rounds 5] [--output FILE]

Ours checks the config, opens the run folder and the data, builds the model with its exact initial values, watches for
signals, trains one step and saves a verified checkpoint; the bare script makes the same model of torch.nn parts, gives it to
DeepSpeed ZeRO-1 and trains one step on random tokens. One process each, in turns, medians; `cpu_s` is processor time. The
bare script too skips the shared-memory operator that DeepSpeed would compile first, for a minute and a half.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from tests.benchmarks.bench_dedup import cpu_name
from tests.benchmarks.bench_quality import timed
from tests.benchmarks.turns import ROOT

BARE = """
import os
os.environ.setdefault("DS_ACCELERATOR", "cpu"); os.environ.update(LOCAL_RANK="0")
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
import deepspeed
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
layer = torch.nn.TransformerEncoderLayer(128, 4, 344, batch_first=True, dropout=0.0)
model = torch.nn.Sequential(torch.nn.Embedding(257, 128), *(torch.nn.TransformerEncoder(layer, 4).layers), torch.nn.Linear(128, 257))
config = {"train_batch_size": 12, "zero_optimization": {"stage": 1, "reduce_bucket_size": 1 << 24, "allgather_bucket_size": 1 << 24},
          "zero_allow_untested_optimizer": True}
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
rows = torch.randint(257, (12, 65))
engine.backward(torch.nn.functional.cross_entropy(engine(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()))
engine.step()
os._exit(0)
"""

CONFIG = {
    "model": {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 344,
        "max_position_embeddings": 64,
    },
    "training": {"steps": 1, "sequence_length": 64, "global_batch_size": 12},
    "evaluation": {"max_sequences": 0},
    "logging": {"wandb": {"mode": "disabled"}},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    report = {"hardware": cpu_name(), "rounds": options.rounds, **medians(options.rounds)}
    if options.output:
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


def medians(rounds: int) -> dict[str, dict[str, float]]:
    """{whose: {process_s, cpu_s}} over so many turns, after one that only fills the page cache."""
    times: dict[str, list[dict[str, float]]] = {"ours": [], "bare DeepSpeed": [], "python -c 'import deepspeed'": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build(folder)
        for number in range(rounds + 1):
            run = {"run": {"name": "start", "dir": f"{folder}/run-{number}"}, "data": {"path": f"{folder}/data", "packing": "concat"}}
            config = folder / f"run-{number}.yaml"
            config.write_text(json.dumps({**CONFIG, **run}))
            commands = [[str(ROOT / "launcher" / "train.py"), "--config", str(config)], ["-c", BARE], ["-c", "import deepspeed"]]
            for side, command in zip(times, commands, strict=True):
                spent = timed([sys.executable, *command], threads=1)[1]
                times[side] += [spent] if number else []
    return {side: {clock: round(statistics.median(run[clock] for run in runs), 2) for clock in runs[0]} for side, runs in times.items()}


def build(folder: Path) -> None:
    """A small dataset of bytes."""
    (folder / "text.txt").write_text("What begins fast is begun often. " * 2000)
    (folder / "data.yaml").write_text(
        f"output: {folder}/data\nsources: [{{name: text, files: {folder}/text.txt, format: txt}}]\ntokenizer: {{type: bytes}}\n"
        "validation: {fraction: 0}\npacking: [{sequence_length: 64, method: concat}]\n"
    )
    timed([sys.executable, "-m", "launcher.cli", "data", "build", str(folder / "data.yaml")], threads=1)


if __name__ == "__main__":
    main()
