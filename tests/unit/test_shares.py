"""If these fail, a mixture is other than the config asks for, a source is gone through too often, or a resume draws others."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data_pipeline.errors import ConfigError
from data_pipeline.loader import Phase, RowSource, batch_id
from data_pipeline.schema import validate
from data_pipeline.shares import PARTS, RAMP_PIECES, Change, epoch_faults, millionths, scheduled, tempered
from launcher.batches import Batches
from launcher.commands.plan import known_mixture
from launcher.config import RunConfig
from launcher.mixture import (
    cap_faults,
    describe_mixture,
    expected_mixture,
    mixture_lines,
    next_phases,
    phases_for,
    phases_of_run,
    require_epochs,
)
from launcher.run_folder import RunFolder
from megatron_lite.parallel.groups import Axis
from tests.data_fixtures import tiny_dataset

BATCH, S = 12, 16


def test_temperature_draws_between_by_size_and_evenly() -> None:
    tokens = [8_000, 1_000]
    assert tempered([1.0, 3.0], tokens, None) == [1.0, 3.0]
    assert millionths(tempered([1.0, 1.0], tokens, 1.0)) == [0.888889, 0.111111]
    assert millionths(tempered([1.0, 1.0], tokens, 3.0)) == [0.666667, 0.333333]  # 8 ** (1 / 3) = 2
    assert millionths(tempered([1.0, 1.0], tokens, 1e9)) == [0.5, 0.5]
    assert millionths(tempered([1.0, 2.0], tokens, 3.0)) == [0.5, 0.5]


def test_shares_add_up_and_nobody_is_rounded_away() -> None:
    for weights in ([1, 1, 1], [1e-9, 1.0], [0.0, 2.0, 5.0], [1e-9] * 3 + [1.0], list(np.random.default_rng(0).random(50))):
        parts = [round(share * PARTS) for share in millionths(weights)]
        assert sum(parts) == PARTS and all((part > 0) == (weight > 0) for part, weight in zip(parts, weights))
        exact = np.array(weights) / sum(weights) * PARTS
        assert np.abs(exact - parts).max() < 1 + sum(0 < x < 1 for x in exact)


def test_a_schedule_in_samples() -> None:
    def sample_of(step: int) -> int:
        return (step - 1) * 10

    assert scheduled([1.0, 2.0], [], sample_of=sample_of) == ([1.0, 2.0], [])
    first, changes = scheduled([1.0, 0.0], [Change(5, (1.0, 1.0)), Change(9, (0.0, 1.0), 4)], sample_of=sample_of)
    assert first == [1.0, 0.0] and changes[0] == (40, [0.5, 0.5])
    ramp = changes[1:]
    assert [place for place, _ in ramp] == list(range(80, 121)) and ramp[-1] == (120, [0.0, 1.0])
    assert ramp[0] == (80, [0.49375, 0.50625]) and all(a[1][0] > b[1][0] for a, b in pairwise(ramp))
    many = scheduled([1.0, 0.0], [Change(2, (0.0, 1.0), 1000), Change(1002, (0.5, 0.5))], sample_of=sample_of)[1]
    assert len(many) == RAMP_PIECES + 1 and many[-1] == (10_010, [0.5, 0.5])  # the next change stands for the ramp's end


def test_caps_say_what_would_do() -> None:
    phases, rows = [Phase(0, (3.0, 1.0))], [1000, 50]
    assert epoch_faults(["web", "wiki"], [None, None], phases, rows, num_samples=10**6, batch=10) == []
    assert epoch_faults(["web", "wiki"], [4.0, 1.0], phases, rows, num_samples=200, batch=10) == []
    (fault,) = epoch_faults(["web", "wiki"], [4.0, 2.0], phases, rows, num_samples=500, batch=10)
    assert fault.field == "data.sources[1].max_epochs" and fault.got == 2.0
    assert fault.want == "2.50 or more: with a share of 25.00 %, 125 of the 500 samples come from wiki, which has 50 rows"
    assert fault.fix == "give it at most 20.00 %, train at most 40 steps, add text, or let it repeat"
    assert epoch_faults(["web", "wiki"], [4.0, 2.0], phases, rows, num_samples=400, batch=10) == []


# ---------------------------------------------------------------------------------------------------- in a run


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    """Datasets whose ids don't overlap, of 60, 40 and 20 documents."""
    sizes, folders = {"a": 60, "b": 40, "c": 20}, []
    for number, (name, count) in enumerate(sizes.items()):
        texts = [[number * 1000 + n] * (1 + (n * 7) % 20) for n in range(count)]
        folders.append(tiny_dataset(tmp_path / name, texts, vocab=4000, num_validation=0).path)
    return folders


def config_of(folders: list[Path], *, steps: int = 24, batch: int = BATCH, weights: Any = (0.6, 0.3, 0.1), **data: Any) -> RunConfig:
    sources = [{"path": str(folder), "weight": weight} for folder, weight in zip(folders, weights)]
    training = {"steps": steps, "sequence_length": S, "global_batch_size": batch}
    return validate(RunConfig, {"run": {"name": "x"}, "data": {"sources": sources, **data}, "training": training})


def open_rows(config: RunConfig, phases: list[dict[str, Any]]) -> RowSource:
    from data_pipeline.loader import Dataset

    mixture = [(Dataset.open(source.path), source.weight, None) for source in config.data.mixture]
    rows = RowSource.open(mixture, sequence_length=S, packing=config.data.packing, seed=3)
    return rows.with_phases([Phase.from_dict(phase) for phase in phases])


def phases_at(config: RunConfig, saved: Any = None, step: int = 0, samples: int = 0) -> list[dict[str, Any]]:
    from data_pipeline.loader import Dataset

    datasets = [Dataset.open(source.path) for source in config.data.mixture]
    return phases_for(config, datasets, saved=json.loads(json.dumps(saved or [])), step=step, samples=samples)


SCHEDULE = [{"from_step": 6, "weights": [0.2, 0.2, 0.6]}, {"from_step": 12, "weights": [0, 0.5, 0.5], "over_steps": 6}]


def ids_of(rows: RowSource, *, ranks: int, first: int, count: int) -> list[str]:
    """batch_ids as so many data-parallel ranks read them, through the loader that training uses."""
    digests: list[list[bytes]] = [[] for _ in range(count)]
    for rank in range(ranks):
        axis = Axis(name="dp", size=ranks, rank=rank, ranks=tuple(range(ranks)))
        batches = Batches(
            rows, dp=axis, global_batch_size=BATCH, micro_batch_size=1, document_mask=True, device=torch.device("cpu"), start_sample=first
        )
        for number in range(count):
            digests[number] += next(batches).digests
        batches.close()
    return [batch_id(some) for some in digests]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_resumed_at_every_step_of_a_schedule_the_batches_are_the_same(three: list[Path], ranks: int) -> None:
    """Three sources, a change and a gradual change; stopped at every step, and again a step later, on 1 to 4 ranks."""
    config = config_of(three, schedule=SCHEDULE)
    phases = phases_at(config)
    straight = open_rows(config, phases)
    wanted = [batch_id([straight[n].digest() for n in range(step * BATCH, (step + 1) * BATCH)]) for step in range(24)]
    assert len(set(wanted)) == 24
    for step in range(23):
        once = phases_at(config, phases, step, step * BATCH)
        assert ids_of(open_rows(config, once), ranks=ranks, first=step * BATCH, count=1) == wanted[step : step + 1]
        again = phases_at(config, once, step + 1, (step + 1) * BATCH)
        assert again == phases
        assert ids_of(open_rows(config, again), ranks=ranks, first=(step + 1) * BATCH, count=1) == wanted[step + 1 : step + 2]


def test_a_changed_schedule_at_a_resume_changes_what_comes_and_repeats_nothing(three: list[Path]) -> None:
    first = config_of(three, schedule=SCHEDULE)
    second = config_of(three, schedule=[SCHEDULE[0], {"from_step": 10, "weights": [1, 0, 0]}])
    phases = phases_at(first)
    straight = open_rows(first, phases)
    for step in range(1, 20):
        changed = phases_at(second, phases, step, step * BATCH)
        rows = open_rows(second, changed)
        assert changed[0] == phases[0] and len(changed) == 2 and changed[1]["from_sample"] == step * BATCH
        assert [rows[n].digest() for n in range(step * BATCH)] == [straight[n].digest() for n in range(step * BATCH)]
        per_epoch = rows.rows_per_epoch
        seen: dict[tuple[int, int], list[int]] = {}
        for sample in range(24 * BATCH):
            place = rows.place(sample)
            seen.setdefault((place.entry, place.epoch), []).append(place.row)
        assert all(len(set(places)) == len(places) <= per_epoch[entry] for (entry, _), places in seen.items())
        late = {rows.place(sample).entry for sample in range(max(9, step) * BATCH, 24 * BATCH)}
        assert late == {0}
        assert phases_at(second, changed, step + 1, (step + 1) * BATCH) == changed  # and then it stays


def test_another_batch_size_keeps_the_steps_of_the_schedule(three: list[Path]) -> None:
    phases = phases_at(config_of(three, schedule=SCHEDULE[:1]))
    assert phases[0]["changes"] == [{"from_sample": 5 * BATCH, "weights": [0.2, 0.2, 0.6]}]
    larger = config_of(three, schedule=SCHEDULE[:1], batch=24)
    assert phases_at(larger, phases, 3, 36)[1:] == [
        {"from_sample": 36, "weights": [0.6, 0.3, 0.1], "changes": [{"from_sample": 36 + 2 * 24, "weights": [0.2, 0.2, 0.6]}]}
    ]
    assert phases_at(larger, phases, 7, 7 * BATCH) == phases  # the change lies behind: nothing else is to come


def test_plain_weights_are_kept_as_they_are_written(three: list[Path]) -> None:
    assert phases_at(config_of(three, weights=[1.0, 2.0, 4.0])) == [{"from_sample": 0, "weights": [1.0, 2.0, 4.0]}]
    assert next_phases([], [1.0], samples=0) == [{"from_sample": 0, "weights": [1.0]}]


def test_temperature_in_a_run(three: list[Path]) -> None:
    config = config_of(three, weights=[1, 1, 1], temperature=1.0)
    (phase,) = phases_at(config)
    rows = open_rows(config, [phase])
    tokens = [sum(source.num_tokens for source in rows.dataset(n).sources) for n in range(3)]
    np.testing.assert_allclose(phase["weights"], np.array(tokens) / sum(tokens), atol=1e-6)


def test_a_cap_refuses_and_epochs_are_reported(three: list[Path], tmp_path: Path) -> None:
    config = config_of(three, schedule=SCHEDULE)
    rows = open_rows(config, phases_at(config))
    described = describe_mixture(config, rows, first=0, last=24 * BATCH)
    assert [source["samples"] for source in described] == rows.served(24 * BATCH)
    assert [source["epochs"] for source in described] == [round(epochs, 4) for epochs in rows.epochs_at(24 * BATCH)]
    assert sum(source["samples"] for source in described) == 24 * BATCH
    assert f"{described[2]['epochs']:.2f} epochs by the end" in mixture_lines(described)[2]
    tree = config.model_dump(mode="json")
    tree["data"]["sources"][2]["max_epochs"] = 1.5
    capped = validate(RunConfig, tree)
    with pytest.raises(
        ConfigError, match=r"data\.sources\[2\]\.max_epochs: got 1\.5, wanted .* of the 288 samples come from .*/c, which has \d+ rows"
    ):
        require_epochs(capped, rows, num_samples=24 * BATCH)
    require_epochs(capped, rows, num_samples=4 * BATCH)
    require_epochs(config, rows, num_samples=24 * BATCH)
    datasets = [rows.dataset(n) for n in range(3)]
    expected = expected_mixture(config, datasets)
    assert [source["samples"] for source in expected] == rows.served(24 * BATCH) and abs(
        sum(source["share"] for source in expected) - 1
    ) < 1e-5
    assert all(real["epochs"] <= about["epochs"] for about, real in zip(expected, described))
    assert known_mixture(config) == expected
    with pytest.raises(ConfigError, match=r"which has about \d+ rows"):
        known_mixture(capped)
    assert [fault.field for fault in cap_faults(capped, datasets)] == ["data.sources[2].max_epochs"] and cap_faults(config, datasets) == []
    folder = RunFolder(tmp_path / "run")
    assert phases_of_run(folder) is None
    folder.path.mkdir()
    lines = [{"event": "started"}, {"event": "mixture", "phases": [phase.to_dict() for phase in rows.phases]}]
    folder.events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert phases_of_run(folder) == list(rows.phases)
    with open(folder.events, "ab") as file:  # a writer that was killed, in the middle of a letter; the next attempt's first line follows
        file.write(b'{"event": "mixture", "phases": "\xc3{"event": "started"}\n{"event": "mixture", "pha')
    assert phases_of_run(folder) == list(rows.phases)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ({"path": "a", "temperature": 2.0}, "sources where there is a temperature or a schedule"),
        ({"path": "a", "schedule": [{"from_step": 5, "weights": [1]}]}, "one dataset has no shares"),
        (
            {"sources": [{"path": "a"}, {"path": "b"}], "schedule": [{"from_step": 5, "weights": [1]}]},
            "a weight of 0 or more for each of 2 sources",
        ),
        ({"sources": [{"path": "a", "weight": 0}]}, "one above 0"),
        ({"sources": [{"path": "a"}, {"path": "b"}], "schedule": [{"from_step": 5, "weights": [0, -1]}]}, "a weight of 0 or more"),
        (
            {
                "sources": [{"path": "a"}, {"path": "b"}],
                "schedule": [{"from_step": 5, "weights": [1, 1], "over_steps": 10}, {"from_step": 14, "weights": [1, 0]}],
            },
            "from_step 14 comes too early after from_step 5 over 10 steps",
        ),
    ],
)
def test_wrong_mixtures_are_refused(data: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        validate(RunConfig, {"run": {"name": "x"}, "data": data, "training": {"steps": 10}})
