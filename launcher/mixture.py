"""The mixture of a run: from its config and its datasets to phases, and back from what a run wrote down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

from data_pipeline.dataset import TokenSource
from data_pipeline.errors import ConfigError, Fault
from data_pipeline.loader import Dataset, Phase
from data_pipeline.mixture import Mixture
from data_pipeline.pair_loader import PairRowSource
from data_pipeline.pair_packing import too_long
from data_pipeline.pair_plans import left_out_words
from data_pipeline.shares import Change, epoch_faults, millionths, scheduled, tempered
from launcher.config import DataSection, RunConfig
from launcher.datasets import AnyRows
from launcher.metrics import JsonLines
from launcher.run_folder import RunFolder


def phases_for(
    config: RunConfig, datasets: Sequence[Dataset], *, saved: list[dict[str, Any]] | None = None, step: int = 0, samples: int = 0
) -> list[dict[str, Any]]:
    """The phases of a run that has done `step` steps and consumed `samples` samples under the phases that it saved."""
    batch = config.training.global_batch_size
    weights, changes = plan_of(config.data, datasets, batch=batch, step=step, samples=samples)
    return next_phases(saved or [], weights, samples=samples, changes=changes)


def next_phases(
    phases: list[dict[str, Any]], weights: list[float], *, samples: int, changes: Sequence[tuple[int, list[float]]] = ()
) -> list[dict[str, Any]]:
    """The mixture's phases from here on: those of the run, and a new one where other shares are to come than they plan.

    `weights` and `changes` (from which sample, which weights): what is wanted, as if from the beginning. A phase that has
    begun is kept with all that it planned, since which sample came from where follows from the whole of it.
    """
    wanted = [(0, weights), *changes]
    if phases and _to_come(_planned(phases), samples) == _to_come(wanted, samples):
        return phases
    before = [phase for phase in phases if phase["from_sample"] < samples]
    start = samples if before else 0
    now = [these for sample, these in wanted if sample <= start][-1]
    later = [{"from_sample": sample, "weights": these} for sample, these in changes if sample > start]
    return [*before, {"from_sample": start, "weights": now, **({"changes": later} if later else {})}]


def _planned(phases: Sequence[Mapping[str, Any]]) -> list[tuple[int, list[float]]]:
    """(from which sample, which weights) as the phases have them, each ended by the next."""
    ends = [*(phase["from_sample"] for phase in phases[1:]), float("inf")]
    pieces: list[tuple[int, list[float]]] = []
    for phase, end in zip(phases, ends):
        pieces.append((phase["from_sample"], phase["weights"]))
        pieces += [(change["from_sample"], change["weights"]) for change in phase.get("changes", ()) if change["from_sample"] < end]
    return pieces


def _to_come(pieces: Sequence[tuple[int, list[float]]], samples: int) -> list[tuple[int, list[float]]]:
    """The shares in force at `samples`, and each later change of them."""
    found: list[tuple[int, list[float]]] = []
    for start, weights in pieces:
        place, shares = max(start, samples), _shares(weights)
        if found and found[-1][0] == place:
            found.pop()
        if not found or found[-1][1] != shares:
            found.append((place, shares))
    return found


def _shares(weights: Sequence[float]) -> list[float]:
    total = sum(weights)
    return [round(weight / total, 12) for weight in weights]


def plan_of(
    data: DataSection, datasets: Sequence[Dataset], *, batch: int, step: int, samples: int
) -> tuple[list[float], list[tuple[int, list[float]]]]:
    """(weights from sample 0, changes): what the config asks for if steps before `step` had had the size of those after it."""
    tokens = [sum(source.num_tokens for source in dataset.sources) for dataset in datasets]

    def asked(weights: Sequence[float]) -> list[float]:
        if data.temperature is None:
            return list(weights)
        return millionths(tempered(weights, tokens, data.temperature))

    first = asked([source.weight for source in data.mixture])
    changes = [Change(change.from_step, tuple(asked(change.weights)), change.over_steps) for change in data.schedule]
    return scheduled(first, changes, sample_of=lambda at: max(0, samples + (at - 1 - step) * batch))


def require_epochs(config: RunConfig, rows: AnyRows, *, num_samples: int) -> None:
    """Raises ConfigError where the run would go through a source more often than its `max_epochs`."""
    sources = config.data.mixture
    faults = epoch_faults(
        [source.path for source in sources],
        [source.max_epochs for source in sources],
        rows.phases,
        rows.rows_per_epoch,
        num_samples=num_samples,
        batch=config.training.global_batch_size,
    )
    if faults:
        raise ConfigError(faults)


def cap_faults(config: RunConfig, datasets: Sequence[Dataset]) -> list[Fault]:
    """What `require_epochs` would say of a new run, before rows are planned: from the number of tokens, and with 2 % to spare. Of pairs
    nothing: how much padding their rows have shows when they are planned."""
    if config.model.family == "seq2seq":
        return []
    training, sources = config.training, config.data.mixture
    return epoch_faults(
        [source.path for source in sources],
        [source.max_epochs for source in sources],
        [Phase.from_dict(phase) for phase in phases_for(config, datasets)],
        [ceil(count * 1.02) for count in _rows_about(config, datasets)],
        num_samples=training.num_steps * training.global_batch_size,
        batch=training.global_batch_size,
        about=True,
    )


def expected_mixture(config: RunConfig, datasets: Sequence[Dataset]) -> list[dict[str, Any]]:
    """What a new run will take from each source, as `describe_mixture`, from the number of tokens alone."""
    num_samples = config.training.num_steps * config.training.global_batch_size
    served = Mixture([Phase.from_dict(phase) for phase in phases_for(config, datasets)]).served(num_samples).tolist()
    return [
        {"path": source.path, "samples": count, "share": round(count / num_samples, 6), "epochs": round(count / rows, 4)}
        for source, count, rows in zip(config.data.mixture, served, _rows_about(config, datasets))
    ]


def _rows_about(config: RunConfig, datasets: Sequence[Dataset]) -> list[float]:
    """Rows of one epoch of each, as if there were no padding; of pairs, on the side that is fuller."""
    if config.model.family == "decoder":
        return [sum(source.num_tokens for source in dataset.sources) / config.training.sequence_length for dataset in datasets]
    return [sum(_pair_rows_about(config, source) for source in dataset.sources) for dataset in datasets]


def _pair_rows_about(config: RunConfig, source: TokenSource) -> float:
    lengths = {"source_length": config.training.encoder_length, "target_length": config.training.sequence_length}
    one, other = source.pair_lengths()
    fits = too_long(one, other, **lengths) == 0
    return max(float(side[fits].sum()) / length for side, length in zip((one, other), lengths.values()))


def describe_mixture(config: RunConfig, rows: AnyRows, *, first: int, last: int) -> list[dict[str, Any]]:
    """What samples first .. last - 1 take from each source, and how often the run has gone through it by then."""
    before, after, epochs = rows.served(first), rows.served(last), rows.epochs_at(last)
    left_out = rows.left_out if isinstance(rows, PairRowSource) else None
    return [
        {
            "path": source.path,
            "rows": rows.rows_per_epoch[n],
            "samples": after[n] - before[n],
            "epochs": round(epochs[n], 4),
            **({"left_out": left_out[n]} if left_out is not None else {}),
        }
        for n, source in enumerate(config.data.mixture)
    ]


def mixture_lines(described: Sequence[dict[str, Any]]) -> list[str]:
    total = max(sum(source["samples"] for source in described), 1)
    return [
        f"data: {source['path']}: {100 * source['samples'] / total:.2f} % of the samples to come, {source['epochs']:.2f} epochs by the end"
        + left_out_words(list(source.get("left_out", {}).items()))
        for source in described
    ]


def mixture_of_run(folder: RunFolder) -> dict[str, Any] | None:
    """What the run's last attempt wrote down of the rows that it drew; None where it wrote nothing."""
    found = [event for _, event in JsonLines(folder.events).lines() if event is not None and event.get("event") == "mixture"]
    return found[-1] if found else None


def phases_of_run(folder: RunFolder) -> list[Phase] | None:
    """The phases that the run's last attempt drew by; None where it wrote none down."""
    found = mixture_of_run(folder)
    return [Phase.from_dict(phase) for phase in found["phases"]] if found else None
