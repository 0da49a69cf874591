"""The learning rate as a pure function of the update's number: nothing to save, nothing to restore.

Updates are counted from 1. The first has a learning rate above zero, the last update of the warm-up has the peak, and the
run's last update has min_lr_ratio * peak; the constant shape keeps the peak, and inverse_sqrt doesn't know of a last one.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from megatron_lite.config import SchedulerConfig


def _cosine(progress: float, floor: float) -> float:
    """Loshchilov and Hutter 2017, one half period."""
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


def _linear(progress: float, floor: float) -> float:
    return 1.0 - (1.0 - floor) * progress


def _constant(progress: float, floor: float) -> float:
    return 1.0


# name -> factor of the peak at a progress in [0, 1], from the peak down to the floor
SHAPES: dict[str, Callable[[float, float], float]] = {"cosine": _cosine, "linear": _linear, "constant": _constant}


def lr_at(step: int, *, peak: float, num_steps: int, scheduler: SchedulerConfig) -> float:
    """Learning rate of update number `step` (1 is the first) in a run of `num_steps` updates.

    Warm-up: peak * step / warmup_steps. Then the shape, which begins at the peak with the last warm-up update (or the first
    update where there is no warm-up) and reaches its end with update `num_steps`; past that it stays there. inverse_sqrt:
    peak * sqrt(warmup_steps / step), without an end.
    """
    assert step >= 1, step
    if step < scheduler.warmup_steps:
        return peak * step / scheduler.warmup_steps
    begin = max(scheduler.warmup_steps, 1)
    if scheduler.name == "inverse_sqrt":  # Vaswani et al. 2017, section 5.3, where the peak is (hidden_size * warmup_steps)^-1/2
        return peak * math.sqrt(begin / step)
    progress = 0.0 if step == begin else min((step - begin) / max(num_steps - begin, 1), 1.0)
    return peak * SHAPES[scheduler.name](progress, scheduler.min_lr_ratio)
