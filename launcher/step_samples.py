"""Which samples a step of a run took, and which step took a sample, whatever batch sizes its attempts had."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from data_pipeline.errors import ConfigError, Fault


@dataclass(frozen=True)
class Stretch:
    """Steps with one batch size: those after `step`, the first of which takes `sample` first."""

    step: int
    sample: int
    batch_size: int


@dataclass(frozen=True)
class StepSamples:
    """The stretches of a run, in order; the last one goes on for ever."""

    stretches: tuple[Stretch, ...]

    def after(self, step: int) -> int:
        """Samples consumed when `step` is done."""
        stretch = self.stretches[max(0, bisect_right(self.stretches, step, key=lambda each: each.step) - 1)]
        return stretch.sample + (step - stretch.step) * stretch.batch_size

    def sample(self, step: int, row: int) -> int:
        """The sample of a row of that step's global batch. Raises ConfigError for a step or a row that this run hasn't got."""
        begin = self.stretches[0].step
        if step <= begin:
            raise ConfigError(
                [Fault("--step", step, f"a step that this run did: {begin + 1} or later", "it began from another run's checkpoint")]
            )
        first, end = self.after(step - 1), self.after(step)
        if not 0 <= row < end - first:
            raise ConfigError([Fault("--row", row, f"0 to {end - first - 1}: the global batch of step {step} had {end - first} rows")])
        return first + row

    def place(self, sample: int) -> tuple[int, int] | None:
        """(step, row in its global batch) that takes the sample; None where that was before this run began."""
        number = bisect_right(self.stretches, sample, key=lambda each: each.sample) - 1
        if number < 0:
            return None
        stretch = self.stretches[number]
        steps, row = divmod(sample - stretch.sample, stretch.batch_size)
        return stretch.step + steps + 1, row


def samples_of_steps(events: Sequence[Mapping[str, Any]], batch_size: int) -> StepSamples:
    """Of a run's events, and the batch size of its config. Where an attempt went back, what was done after that step counts no more."""
    sizes: list[tuple[int, int, int | None]] = []
    end = float("inf")
    for started in reversed([event for event in events if event.get("event") == "started" and isinstance(event.get("step"), int)]):
        if started["step"] < end:
            sizes.append((started["step"], batch_size, started.get("samples")))
            end = started["step"]
        of_attempt = [event for event in events if event.get("event") == "changed" and event.get("attempt") == started.get("attempt")]
        batch_size = next((event["old"] for event in of_attempt if event.get("key") == "training.global_batch_size"), batch_size)
    stretches: list[Stretch] = []
    for step, size, samples in reversed(sizes):
        if samples is None:  # written by a version that left it out
            samples = StepSamples(tuple(stretches)).after(step) if stretches else step * size
        stretches.append(Stretch(step, samples, size))
    return StepSamples(tuple(stretches) or (Stretch(0, 0, batch_size),))
