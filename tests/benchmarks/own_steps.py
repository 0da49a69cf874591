"""Our training step for the speed benchmark: `python -m tests.benchmarks.own_steps JSON`, as peer_llama.py has it.

JSON has besides `engine`, `compile` and `pieces` (document pieces a row; 0: no document mask).
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch

from launcher.distributed import start_device
from launcher.environment import Environment
from megatron_lite.config import OptimizerConfig, ParallelConfig, TrainingConfig
from megatron_lite.model_config import InitConfig, ModelConfig
from megatron_lite.models.batch import Batch
from megatron_lite.parallel.groups import ProcessGroups
from megatron_lite.training.engine import Engine, build_engine
from megatron_lite.training.step import train_step
from tests.benchmarks.turns import serve


def own_engine(shape: dict[str, Any]) -> Engine:
    """The engine as a run of this shape would have it, in this process alone."""
    keys = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size", "tie_word_embeddings", "rms_norm_eps")  # fmt: skip
    init = InitConfig(scaled_residual=False)  # as the peers', so that the losses can be compared
    model = ModelConfig(**{key: shape[key] for key in keys}, max_position_embeddings=shape["sequence_length"], init=init)
    training = TrainingConfig(
        steps=1000,
        sequence_length=shape["sequence_length"],
        global_batch_size=shape["batch_size"],
        precision=shape["precision"],
        engine=shape["engine"],
        compile=shape["compile"],
    )
    optimizer = OptimizerConfig(**{key: shape[key] for key in ("lr", "betas", "eps", "weight_decay", "max_grad_norm")})
    parallel = ParallelConfig(zero_stage=1 if shape["engine"] == "deepspeed" else 0)
    device = start_device(Environment())
    torch.set_num_threads(shape["threads"])
    return build_engine(model, training, optimizer, parallel, ProcessGroups.single(), seed=shape["seed"], device=device)


def random_rows(shape: dict[str, Any]) -> Batch:
    """The peers' rows; with `pieces`, each cut into so many documents of unequal length."""
    size, length = shape["batch_size"], shape["sequence_length"]
    rows = torch.randint(shape["vocab_size"], (size, length + 1), generator=torch.Generator().manual_seed(shape["seed"])).numpy()
    starts = [[0]] * size
    if shape["pieces"]:
        random = np.random.default_rng(shape["seed"])
        starts = [[0, *sorted(random.choice(np.arange(1, length), shape["pieces"] - 1, replace=False))] for _ in range(size)]
    return Batch.from_rows(rows[:, :-1], rows[:, 1:], starts, range(size), document_mask=bool(shape["pieces"]))


def main(shape: dict[str, Any]) -> None:
    engine, batch = own_engine(shape), random_rows(shape)
    number = 0

    def step() -> float:
        nonlocal number
        number += 1
        return train_step(engine, [batch], step=number, lr=shape["lr"], seed=shape["seed"]).loss

    about = {"torch": torch.__version__, "parameters": sum(weight.numel() for weight in engine.model.parameters())}
    serve(step, about)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
