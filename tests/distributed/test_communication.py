"""If this fails, `mlite plan` tells of other traffic than a step causes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_lite.communication import communicated_bytes
from megatron_lite.config import OptimizerConfig, ParallelConfig, TrainingConfig
from megatron_lite.model_config import ModelConfig
from megatron_lite.models.batch import Batch
from megatron_lite.training.engine import build_engine
from megatron_lite.training.step import train_step
from tests.ranks import Ranks, groups_of

MODEL = {"vocab_size": 80, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96}
COLLECTIVES = {
    "all_reduce": "all_reduce",
    "all_gather_single": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_single": "reduce_scatter",
}
A_FEW_NUMBERS = 64  # bytes


def num_bytes(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def counted(function: Callable[..., Any], name: str, counts: Counter[str]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        size = max((num_bytes(value) for value in [*args, *kwargs.values()]), default=0)
        counts[name] += size if size > A_FEW_NUMBERS else 0
        return function(*args, **kwargs)

    return call


def traffic_of_a_step(extra: dict[str, Any], keys: dict[str, Any], parallel: dict[str, Any], dp: int) -> dict[str, int]:
    """On a rank: bytes by collective of the second step."""
    layout = ParallelConfig(**parallel)
    groups = groups_of(dp=dp, tp=layout.tp, sequence_parallel=layout.sequence_parallel)
    config, training = ModelConfig(**{**MODEL, **extra}), training_of(keys)
    counts: Counter[str] = Counter()
    originals = {name: getattr(dist, name) for name in COLLECTIVES}
    try:
        for name, function in originals.items():  # before DeepSpeed looks them up
            setattr(dist, name, counted(function, COLLECTIVES[name], counts))
        engine = build_engine(config, training, OptimizerConfig(), layout, groups, seed=0, device=torch.device("cpu"))
        ids = np.random.default_rng(groups.dp.rank).integers(0, config.vocabulary, (2, 32))
        batch = Batch.from_rows(ids, ids, [[0]] * 2, range(2), document_mask=True)
        if config.family == "seq2seq":
            batch = batch.with_source(ids[:, : training.encoder_length], [[0]] * 2)
        batches = [batch] * (training.global_batch_size // dp // 2)
        train_step(engine, batches, step=1, lr=1e-3, seed=0)
        counts.clear()
        train_step(engine, batches, step=2, lr=1e-3, seed=0)
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)
    return {name: count for name, count in counts.items() if count}


def training_of(keys: dict[str, Any]) -> TrainingConfig:
    return TrainingConfig(**{"steps": 2, "sequence_length": 32, "global_batch_size": 4, "micro_batch_size": 2, **keys})


TORCH = {"engine": "torch"}
PAIRS = {"family": "seq2seq", "num_key_value_heads": 1, "encoder": {"num_hidden_layers": 2}}
TORCH_PAIRS = {**TORCH, "source_length": 24}


@pytest.mark.parametrize(
    ("extra", "keys", "parallel", "dp"),
    [
        ({}, TORCH, {"zero_stage": 0, "tp": 2}, 1),
        ({}, TORCH, {"zero_stage": 0, "tp": 2, "sequence_parallel": True}, 1),
        ({}, {**TORCH, "activation_checkpointing": "full"}, {"zero_stage": 0, "tp": 2}, 1),
        ({}, {**TORCH, "activation_checkpointing": "full"}, {"zero_stage": 0, "tp": 2, "sequence_parallel": True}, 1),
        ({}, {**TORCH, "activation_checkpointing": "selective"}, {"zero_stage": 0, "tp": 2}, 1),
        ({"num_key_value_heads": 1}, {**TORCH, "precision": "bf16"}, {"zero_stage": 0, "tp": 2}, 1),
        ({"num_key_value_heads": 1}, {**TORCH, "activation_checkpointing": "full"}, {"zero_stage": 0, "tp": 2}, 1),
        (PAIRS, TORCH_PAIRS, {"zero_stage": 0, "tp": 2}, 1),
        (PAIRS, {**TORCH_PAIRS, "activation_checkpointing": "full"}, {"zero_stage": 0, "tp": 2, "sequence_parallel": True}, 1),
        ({}, {**TORCH, "global_batch_size": 8}, {"zero_stage": 0}, 2),
        ({}, {"global_batch_size": 8}, {"zero_stage": 1}, 2),
        ({}, {"global_batch_size": 8}, {"zero_stage": 2}, 2),
    ],
)
def test_bytes_of_a_step(ranks2: Ranks, extra: dict[str, Any], keys: dict[str, Any], parallel: dict[str, Any], dp: int) -> None:
    """Exact, by collective. DeepSpeed keeps the gathering function of the first engine in a process, which may escape our count."""
    config = ModelConfig(**{**MODEL, **extra})
    planned = communicated_bytes(config, training_of(keys), ParallelConfig(**parallel), dp=dp, micro_batch_size=2)
    (collectives,) = planned.values()
    for found in ranks2.run(traffic_of_a_step, extra, keys, parallel, dp):
        escaped = {"all_gather"} if "engine" not in keys and "all_gather" not in found else set()
        assert found == {name: count for name, count in collectives.items() if count and name not in escaped}
