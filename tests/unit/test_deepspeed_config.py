"""If this fails, DeepSpeed trains with other numbers than the run's config says, or a user's key is silently dropped."""

import pytest

from data_pipeline.errors import ConfigError
from megatron_lite.config import OptimizerConfig, ParallelConfig, TrainingConfig
from megatron_lite.training.deepspeed_config import deepspeed_config


def config(overrides=None, *, stage=1, precision="fp32", dp=2, clip=1.0):
    training = TrainingConfig(steps=1, global_batch_size=16, precision=precision)
    return deepspeed_config(training, OptimizerConfig(max_grad_norm=clip), ParallelConfig(zero_stage=stage), dp=dp, overrides=overrides)


def test_always_written_keys() -> None:
    """The defaults of these are wrong for us: accumulation in bf16, a bucket of 2 GB, clipping at 1.0, division by gas."""
    got = config(precision="bf16")
    assert got["gradient_accumulation_steps"] == 1
    assert (got["train_batch_size"], got["train_micro_batch_size_per_gpu"]) == (16, 8)
    assert got["communication_data_type"] == got["data_types"]["grad_accum_dtype"] == "fp32"
    assert got["bf16"] == {"enabled": True, "immediate_grad_update": True, "check_grad_overflow": True}
    assert got["zero_optimization"]["reduce_bucket_size"] < 5e8
    assert got["gradient_clipping"] == 1.0
    assert config(precision="bf16", stage=2)["bf16"]["immediate_grad_update"] is False


@pytest.mark.parametrize("clip", [0.0, None])
def test_B091_no_clipping_is_said_not_left_out(clip: float | None) -> None:
    """B091: 0 and null are off; a missing key would be DeepSpeed's 1.0."""
    assert config(clip=clip)["gradient_clipping"] == 0.0


@pytest.mark.parametrize("clip", [-1.0, float("nan"), float("inf")])
def test_B091_negative_or_non_finite_clip_is_refused(clip: float) -> None:
    """B091: a negative norm would turn every gradient round."""
    with pytest.raises(ValueError):
        OptimizerConfig(max_grad_norm=clip)


def test_stage_0_does_not_clip_twice() -> None:
    assert config(stage=0)["gradient_clipping"] == 0.0


def test_users_keys_are_merged() -> None:
    mine = {"zero_optimization": {"overlap_comm": True, "reduce_bucket_size": 1000, "stage": "auto"}, "wall_clock_breakdown": True}
    got = config(mine)
    assert got["zero_optimization"]["overlap_comm"] is True
    assert got["zero_optimization"]["reduce_bucket_size"] == 1000
    assert got["zero_optimization"]["stage"] == 1
    assert got["wall_clock_breakdown"] is True
    assert mine["zero_optimization"]["stage"] == "auto", "the user's mapping was changed"


def test_owned_keys_may_be_auto_or_equal() -> None:
    assert config({"train_batch_size": 16, "gradient_clipping": 1.0, "bf16": {"enabled": False}}) == config()


def test_owned_keys_that_differ_name_ours_all_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        config({"gradient_accumulation_steps": 4, "zero_optimization": {"stage": 3}, "gradient_clipping": 0.5})
    text = str(caught.value)
    for part in ("deepspeed.gradient_accumulation_steps", "training.micro_batch_size", "parallel.zero_stage", "optimizer.max_grad_norm"):
        assert part in text
    assert len(caught.value.faults) == 3 and caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"optimizer": {"type": "Adam"}}, "optimizer section"),
        ({"fp16": {"enabled": True}}, "training.precision"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "checkpoints"),
        ({"zero_optimization": {"reduce_buket_size": 5}}, "did you mean zero_optimization.reduce_bucket_size"),
        ({"zero_optimisation": {"stage": 2}}, "did you mean zero_optimization.stage"),
        ({"sparse_attention": {"mode": "fixed"}}, "valid keys"),
        ({"bf16": {"bf16_master_weights_and_grads": True}}, "a key that may be set here"),
        ({"zero_optimization": {"zero_hpz_partition_size": 2}}, "a key that may be set here"),
        ({"steps_per_print": 10}, "logging.interval_steps"),  # these four would change and show nothing
        ({"dump_state": True}, "config.yaml and deepspeed.json"),
        ({"comms_logger": {"enabled": True}}, "mlite plan"),
        ({"zero_optimization": {"allgather_partitions": True}}, "reads it nowhere"),
    ],
)
def test_keys_that_do_not_belong_are_refused(overrides: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config(overrides)
