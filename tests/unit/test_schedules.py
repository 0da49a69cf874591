"""If this fails, runs train with another learning rate than their config says."""

import math

import pytest

from data_pipeline.errors import ConfigError
from data_pipeline.schema import validate
from megatron_lite.config import SchedulerConfig, TrainingConfig, scheduler_faults
from megatron_lite.training.schedules import SHAPES, lr_at


def rates(name: str, *, warmup: int, total: int, peak: float = 1.0, floor: float = 0.1) -> list[float]:
    scheduler = SchedulerConfig(name=name, warmup_steps=warmup, min_lr_ratio=floor)
    return [lr_at(step, peak=peak, num_steps=total, scheduler=scheduler) for step in range(1, total + 1)]


def test_linear_exact_values() -> None:
    assert rates("linear", warmup=4, total=8, floor=0.0) == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0.0], abs=1e-15)


def test_cosine_exact_values() -> None:
    expected = [0.5, 1.0, *(0.1 + 0.45 * (1 + math.cos(math.pi * k / 4)) for k in (1, 2, 3, 4))]
    assert rates("cosine", warmup=2, total=6) == pytest.approx(expected, abs=1e-15)


def test_constant_exact_values() -> None:
    assert rates("constant", warmup=2, total=5, peak=3e-3) == pytest.approx([1.5e-3, 3e-3, 3e-3, 3e-3, 3e-3])


@pytest.mark.parametrize("name", SHAPES)
def test_B083_warm_up_of_0_1_and_the_whole_run(name: str) -> None:
    """B083: no denominator is zero; without warm-up the first update is at the peak."""
    assert rates(name, warmup=0, total=5)[0] == 1.0
    assert rates(name, warmup=1, total=5) == rates(name, warmup=0, total=5)
    assert rates(name, warmup=5, total=5) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates(name, warmup=0, total=1) == [1.0]


def test_B083_warm_up_longer_than_the_run_is_a_fault() -> None:
    """B083: (warmup, total) = (6, 5) is refused with what may stand there."""
    faults = scheduler_faults(SchedulerConfig(warmup_steps=6), TrainingConfig(steps=5))
    assert [fault.field for fault in faults] == ["lr_scheduler.warmup_steps"]
    assert scheduler_faults(SchedulerConfig(warmup_steps=5), TrainingConfig(steps=5)) == []


@pytest.mark.parametrize("name", ["constant", "inverse_sqrt"])
def test_an_end_that_the_shape_does_not_have_is_a_fault(name: str) -> None:
    assert validate(SchedulerConfig, {"name": name, "min_lr_ratio": 0.1}) == SchedulerConfig(name=name)  # the default itself says nothing
    with pytest.raises(
        ConfigError, match=rf"min_lr_ratio: got 0\.0, wanted its default \(0\.1\) with name: {name}.*only name: cosine or linear"
    ):
        validate(SchedulerConfig, {"name": name, "min_lr_ratio": 0.0})


def test_B084_first_update_moves_the_weights() -> None:
    """B084: warm-up 4 to peak 1.0 makes its first update at 0.25."""
    assert rates("cosine", warmup=4, total=10)[0] == 0.25


def test_B081_B082_resumed_rates_are_those_of_the_straight_run() -> None:
    """B081, B082: the rate is a function of the step alone, so there is no state to lose and none to advance twice."""
    scheduler = SchedulerConfig(name="cosine", warmup_steps=4)
    straight = rates("cosine", warmup=4, total=10)
    for _ in range(2):  # two resumes in a row
        assert [lr_at(step, peak=1.0, num_steps=10, scheduler=scheduler) for step in range(7, 11)] == straight[6:]


def test_B085_rate_knows_nothing_of_accumulation_or_ranks() -> None:
    """B085: a global batch twice as large in half the steps gives the rates of half the steps, not of micro-batches."""
    by_tokens = TrainingConfig(tokens=8 * 16 * 256, global_batch_size=16, micro_batch_size=4)
    assert by_tokens.num_steps == 8
    assert rates("linear", warmup=2, total=by_tokens.num_steps)[1:] == sorted(rates("linear", warmup=2, total=8)[1:], reverse=True)


@pytest.mark.parametrize("name", SHAPES)
def test_rate_stays_at_its_end_past_the_run(name: str) -> None:
    scheduler = SchedulerConfig(name=name, warmup_steps=1, **({} if name == "constant" else {"min_lr_ratio": 0.25}))
    last = lr_at(10, peak=2.0, num_steps=10, scheduler=scheduler)
    assert lr_at(11, peak=2.0, num_steps=10, scheduler=scheduler) == last
    assert last == (2.0 if name == "constant" else pytest.approx(0.5))


@pytest.mark.parametrize("step", [1, 10, 4000, 4001, 16000, 100_000])
def test_inverse_sqrt_is_the_paper_s(step: int) -> None:
    """Vaswani et al. 2017, equation 3, for the base model: d^-0.5 * min(step^-0.5, step * warmup^-1.5); the run's length is nothing to it."""
    scheduler = SchedulerConfig(name="inverse_sqrt", warmup_steps=4000)
    rate = lr_at(step, peak=(512 * 4000) ** -0.5, num_steps=100_000, scheduler=scheduler)
    assert rate == pytest.approx(512**-0.5 * min(step**-0.5, step * 4000**-1.5), rel=1e-12)
    assert rate == lr_at(step, peak=(512 * 4000) ** -0.5, num_steps=5000, scheduler=scheduler)
