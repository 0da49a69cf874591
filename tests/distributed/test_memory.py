"""If this fails, `mlite plan` counts other activations than a tensor-parallel rank keeps."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_lite.config import ParallelConfig, TrainingConfig
from megatron_lite.model_config import ModelConfig
from tests.ranks import Ranks, groups_of
from tests.unit.test_memory import MODEL, kept_by_autograd, planned_activations


def kept_on_a_rank(extra: dict[str, Any], tp: int, split: bool, checkpointing: Any) -> int:
    config = ModelConfig(**{**MODEL, **extra})
    training = TrainingConfig(steps=1, sequence_length=32, activation_checkpointing=checkpointing)
    return kept_by_autograd(config, training, groups=groups_of(tp=tp, sequence_parallel=split))


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("extra", [{}, {"num_key_value_heads": 1, "hidden_dropout": 0.1}])
def test_activations_of_a_rank(ranks2: Ranks, extra: dict[str, Any], split: bool, checkpointing: Any) -> None:
    """tp 2, also with a KV head that both ranks share, with and without sequence parallelism."""
    config = ModelConfig(**{**MODEL, **extra})
    training = TrainingConfig(steps=1, sequence_length=32, activation_checkpointing=checkpointing)
    planned = planned_activations(config, training, parallel=ParallelConfig(tp=2, sequence_parallel=split))
    for kept in ranks2.run(kept_on_a_rank, extra, 2, split, checkpointing):
        assert planned == pytest.approx(kept, rel=0.03)
