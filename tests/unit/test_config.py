"""Model, layout and training sections: if these fail, a layout that can't be crashes after an hour in the queue."""

import pytest

from data_pipeline.errors import ConfigError
from data_pipeline.schema import validate
from megatron_lite.config import (
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    SchedulerConfig,
    TrainingConfig,
    layout_faults,
    scheduler_faults,
)


def model(**keys: object) -> ModelConfig:
    return validate(
        ModelConfig,
        {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, **keys},
        prefix="model",
    )


def layout(model_config: ModelConfig, *, world_size: int, training: dict | None = None, **parallel: object) -> list[str]:
    training_config = validate(TrainingConfig, {"steps": 10, "sequence_length": 16, "global_batch_size": 8, **(training or {})})
    return [str(fault) for fault in layout_faults(model_config, validate(ParallelConfig, parallel), training_config, world_size=world_size)]


@pytest.mark.parametrize(
    "keys",
    [
        {"num_attention_heads": 4, "num_key_value_heads": 3},
        {"hidden_size": 30, "num_attention_heads": 4},
        {"hidden_size": 36, "num_attention_heads": 4},  # head_dim 9 is odd
        {"head_dim": 7},
        {"vocab_size": 1},
        {"hidden_dropout": 1.0},
    ],
)
def test_impossible_shapes_are_refused(keys: dict) -> None:
    """B052: heads that do not divide end in a sentence at the start, not in a reshape error inside."""
    with pytest.raises(ConfigError) as caught:
        model(**keys)
    assert caught.value.faults


@pytest.mark.parametrize(
    ("heads", "kv", "tp", "good"),
    [
        (4, 2, 1, True),
        (4, 2, 2, True),
        (4, 2, 4, True),
        (4, 1, 4, True),
        (6, 4, 2, False),
        (6, 2, 4, False),
        (6, 2, 6, False),
        (12, 4, 3, False),
        (12, 4, 6, False),
    ],
)
def test_heads_and_tp(heads: int, kv: int, tp: int, good: bool) -> None:
    """B052: tp divides the heads, and KV heads divide tp or tp divides them; 4/2/4 is legal."""
    if heads % kv:
        with pytest.raises(ConfigError, match="num_key_value_heads"):
            model(hidden_size=8 * heads, num_attention_heads=heads, num_key_value_heads=kv)
        return
    config = model(hidden_size=8 * heads, num_attention_heads=heads, num_key_value_heads=kv)
    said = [line for line in layout(config, world_size=tp, training={"global_batch_size": tp * 4}, tp=tp) if line.startswith("parallel.tp")]
    # 6/2/6: three ranks would share a head of 8 rows
    assert bool(said) != good, said


def test_every_layout_fault_is_named_with_the_nearest_sizes() -> None:
    """All at once, each with the numbers that would do."""
    said = layout(model(), world_size=8, training={"global_batch_size": 10, "micro_batch_size": 3}, tp=2)
    assert len(said) == 1
    assert "use 8 or 12" in said[0]
    said = layout(model(), world_size=4, training={"micro_batch_size": 3}, tp=2)
    assert "training.micro_batch_size" in said[0]
    assert "use 2 or 4" in said[0]
    said = layout(model(intermediate_size=50), world_size=3, training={"sequence_length": 4096}, tp=4, sequence_parallel=True, zero_stage=0)
    assert {line.split(":")[0] for line in said} == {"parallel.tp", "model.intermediate_size", "training.sequence_length"}
    assert any("deepspeed --num_gpus 4 launcher/train.py" in line for line in said)


def test_bf16_with_stage_0_is_refused_with_the_reason() -> None:
    """DeepSpeed's bf16 stage 0 trains wrongly; the sentence says so and names the way out."""
    said = layout(model(), world_size=1, training={"precision": "bf16"}, zero_stage=0)
    assert "stage 1 serves dp = 1" in said[0]
    assert not layout(model(), world_size=1, training={"precision": "bf16"}, zero_stage=1)


def test_torch_engine_shards_nothing() -> None:
    """A ZeRO stage that the engine would ignore is refused, not ignored."""
    assert "parallel.zero_stage" in layout(model(), world_size=1, training={"engine": "torch"}, zero_stage=1)[0]


@pytest.mark.parametrize("clip", [-1.0, float("nan"), float("inf")])
def test_bad_clip_is_refused(clip: float) -> None:
    """B091: a negative clip value would turn gradients round."""
    with pytest.raises(ConfigError, match="max_grad_norm"):
        validate(OptimizerConfig, {"max_grad_norm": clip})


@pytest.mark.parametrize("clip", [0, None, 1.0])
def test_clip_off_is_zero_or_null(clip: float | None) -> None:
    """B091: 0 and null are the documented ways to switch clipping off."""
    assert validate(OptimizerConfig, {"max_grad_norm": clip}).max_grad_norm == clip


def test_length_is_steps_or_tokens() -> None:
    """Tokens round up to whole steps; both or neither is refused."""
    assert validate(TrainingConfig, {"tokens": 16 * 256 * 10 + 1}).num_steps == 11
    for keys in ({}, {"steps": 1, "tokens": 1}):
        with pytest.raises(ConfigError, match="exactly one"):
            validate(TrainingConfig, keys)


@pytest.mark.parametrize(("warmup", "total", "good"), [(0, 5, True), (1, 5, True), (5, 5, True), (6, 5, False)])
def test_warmup_longer_than_the_run_is_refused(warmup: int, total: int, good: bool) -> None:
    """B083: no division by zero at the edges, a clear error past them."""
    said = scheduler_faults(SchedulerConfig(warmup_steps=warmup), validate(TrainingConfig, {"steps": total}))
    assert (not said) == good
