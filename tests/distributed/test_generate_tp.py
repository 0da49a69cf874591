"""If this fails, text depends on how many processes share the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_lite.inference.beam import BeamOptions
from megatron_lite.inference.generate import generate_beams, start_sampling
from megatron_lite.inference.sampling import SamplingOptions
from megatron_lite.model_config import ModelConfig
from megatron_lite.models.build import build_model
from megatron_lite.parallel.groups import ProcessGroups
from tests.ranks import Ranks, groups_of

PROMPTS = [[5, 9, 2], [1, 2, 3, 4, 5, 6, 7, 8, 60], [17]]
OPTIONS = [
    SamplingOptions(temperature=0, repetition_penalty=1.3),
    SamplingOptions(temperature=0.9, top_k=30, seed=4),
    SamplingOptions(top_p=0.8, min_p=0.01, frequency_penalty=0.5, seed=5),
]
BEAMS = BeamOptions(num_beams=3, n_best=2, length_penalty=0.7)
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "max_position_embeddings": 32}


def _config(**changes: Any) -> ModelConfig:
    return ModelConfig.model_validate({**SIZES, "vocab_size": 61, "num_key_value_heads": 2, "init": {"std": 0.15}, **changes})


def _texts(groups: ProcessGroups, config: ModelConfig, padding: float | None = None) -> list[list[int]]:
    """Sampled, and the two best of beam search."""
    model = build_model(config, groups, seed=3)
    if padding is not None:  # rows of the vocabulary's padding, which training keeps at 0
        head = model.lm_head
        with torch.no_grad():
            head.weight[head.cut.num_valid :] = padding
    sampled = start_sampling(model, PROMPTS, max_new_tokens=10, sampling=OPTIONS).finish()
    found = generate_beams(model, PROMPTS, max_new_tokens=10, beams=BEAMS, stop_ids=[11])
    return [answer.tokens for answer in (*sampled, *(each for prompt in found for each in prompt))]


def _on_rank(tp: int, dp: int, sequence_parallel: bool, changes: dict[str, Any], padding: float | None) -> list[list[int]]:
    return _texts(groups_of(tp=tp, dp=dp, sequence_parallel=sequence_parallel), _config(**changes), padding)


@pytest.mark.parametrize(
    ("tp", "dp", "sequence_parallel", "changes"),
    [(2, 2, True, {}), (4, 1, False, {}), (4, 1, True, {"num_key_value_heads": 1, "tie_word_embeddings": True})],
)
def test_tp_says_the_same(ranks4: Ranks, tp: int, dp: int, sequence_parallel: bool, changes: dict[str, Any]) -> None:
    """Greedy, sampled and searched text of unequal prompts is that of one process, on every rank, also where ranks share KV heads."""
    want = _texts(ProcessGroups.single(), _config(**changes))
    assert all(got == want for got in ranks4.run(_on_rank, tp, dp, sequence_parallel, changes, None))


@pytest.mark.parametrize("value", [50.0, -50.0])
def test_padding_is_never_sampled(ranks4: Ranks, value: float) -> None:
    """B136: 61 tokens padded to 64, the padding's logits raised: no id from 61 on, and the text is unchanged."""
    for answers in ranks4.run(_on_rank, 4, 1, False, {}, value):
        assert answers == _texts(ProcessGroups.single(), _config())
        assert max(token for answer in answers for token in answer) < 61
