"""The shares of a mixture from what a person asks for: weights, a temperature, changes during the run, caps on epochs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

from data_pipeline.errors import Fault
from data_pipeline.mixture import Mixture, Phase

PARTS = 1_000_000  # shares that are computed are whole millionths, so that they have a common denominator
RAMP_PIECES = 64  # a gradual change is a stair of at most so many steps


@dataclass(frozen=True)
class Change:
    """Other weights from a step on, reached gradually over some steps (0: at once)."""

    from_step: int
    weights: tuple[float, ...]
    over_steps: int = 0


def tempered(weights: Sequence[float], tokens: Sequence[int], temperature: float | None) -> list[float]:
    """Weights times tokens^(1/temperature): 1 draws by size, larger is more even (Devlin 2018, Xue et al. 2021). None: as they are."""
    if temperature is None:
        return list(weights)
    largest = max(tokens)
    return [weight * (count / largest) ** (1 / temperature) for weight, count in zip(weights, tokens)]


def millionths(weights: Sequence[float]) -> list[float]:
    """The shares, rounded to millionths that add up to 1; a source with a weight above 0 keeps at least one."""
    total = sum(weights)
    exact = [weight / total * PARTS for weight in weights]
    parts = [max(int(part), 1) if part > 0 else 0 for part in exact]
    by_rest = sorted(range(len(parts)), key=lambda i: (-(exact[i] - int(exact[i])), i))
    for i in by_rest[: max(0, PARTS - sum(parts))]:
        parts[i] += 1
    parts[max(range(len(parts)), key=lambda i: parts[i])] += PARTS - sum(parts)  # where many were lifted to one millionth
    return [part / PARTS for part in parts]


def scheduled(
    first: Sequence[float], changes: Sequence[Change], *, sample_of: Callable[[int], int]
) -> tuple[list[float], list[tuple[int, list[float]]]]:
    """(weights at the start, [(from which sample, which weights)]); `sample_of` a step, from 1, is its first sample.

    Without changes the weights stay as they are written. A gradual change is a stair: over each of at most RAMP_PIECES equal
    pieces the share in its middle.
    """
    if not changes:
        return list(first), []
    before = millionths(first)
    out: dict[int, list[float]] = {}
    for change in changes:
        after = millionths(change.weights)
        low, high = sample_of(change.from_step), sample_of(change.from_step + change.over_steps)
        pieces = min(RAMP_PIECES, high - low)
        for piece in range(pieces):
            far = (piece + 0.5) / pieces
            out[low + (high - low) * piece // pieces] = millionths([a + far * (b - a) for a, b in zip(before, after)])
        out[high] = before = after
    return millionths(first), list(out.items())


def epoch_faults(
    names: Sequence[str],
    caps: Sequence[float | None],
    phases: Sequence[Phase],
    rows: Sequence[int],
    *,
    num_samples: int,
    batch: int,
    about: bool = False,
) -> list[Fault]:
    """A fault for each source that the run would go through more often than its cap. `rows`: rows of one epoch of each;
    `batch`: samples a step, to say how many steps would do; `about`: the rows are an estimate, and the fault says so."""
    if all(cap is None for cap in caps):
        return []
    mixture = Mixture(phases)
    served = mixture.served(num_samples).tolist()
    faults = []
    for number, (name, cap, count, epoch) in enumerate(zip(names, caps, served, rows)):
        if cap is None or count <= cap * epoch:
            continue
        enough = _last(lambda samples, number=number, most=cap * epoch: mixture.served(samples)[number] <= most, num_samples)  # type: ignore[misc]
        share, most = count / num_samples, cap * epoch / num_samples
        faults.append(
            Fault(
                f"data.sources[{number}].max_epochs",
                cap,
                f"{_up(count / epoch)} or more: with a share of {100 * share:.2f} %, {count:,} of the {num_samples:,} samples come from {name}, "
                f"which has {'about ' if about else ''}{epoch:,} rows",
                f"give it at most {100 * most:.2f} %, train at most {enough // batch:,} steps, add text, or let it repeat",
            )
        )
    return faults


def _up(number: float) -> str:
    """Two decimals, never below the number."""
    return f"{ceil(number * 100) / 100:.2f}"


def _last(holds: Callable[[int], bool], limit: int) -> int:
    """The largest number up to `limit` for which a condition holds that never comes back once it fails."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
