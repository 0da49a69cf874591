"""If this fails, nobody can say which document a token of a training row came from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from data_pipeline.build import build
from data_pipeline.dataset import Dataset
from data_pipeline.errors import ConfigError, DataError
from data_pipeline.loader import NO_TARGET, RowSource
from data_pipeline.packing import PLAN_VERSIONS
from data_pipeline.trace import find_document, samples_of, trace
from launcher.commands.trace import rows_of
from launcher.commands.trace import trace as trace_command
from launcher.step_samples import samples_of_steps
from tests.corpus_fixtures import config, write_corpus
from tests.data_fixtures import tiny_dataset


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("trace")
    return build(config(write_corpus(folder / "raw", size=15), folder / "data", validation={"fraction": 0.1}), quiet=True)


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_every_target_is_traced_to_its_bytes(dataset: Dataset, packing: str) -> None:
    """The bytes named for the targets of a row are, document by document, the text that the tokens stand for."""
    rows = RowSource.open([(dataset, 1.0, None)], sequence_length=32, packing=packing, seed=3)  # type: ignore[arg-type]
    for sample in (0, 7, len(rows) + 2):
        row = rows[sample]
        for position in range(0, row.num_targets, 5):
            origin = trace(rows, sample, position)
            assert origin.token_id == row.targets[position] and origin.epoch == sample // len(rows)
            split, source, number = find_document(dataset, origin.document)
            assert (split, source) == ("train", origin.source)
            shard, inside = next(s for s in dataset.sources if s.name == source).find(number)
            assert shard.origin(inside) == (origin.file, origin.record)
            if origin.first_byte is None:
                assert origin.token_id == dataset.eod_id
            else:
                widths = dataset.token_bytes[shard.document(inside)].astype(np.int64)
                assert origin.first_byte == widths[: origin.token_in_document].sum()
                assert origin.last_byte == origin.first_byte + widths[origin.token_in_document] - 1
            assert sample in set(samples_of(rows, split=split, source=source, document=number, num_samples=len(rows) + 3))


def test_characters_count_characters(tmp_path: Path) -> None:
    dataset = tiny_dataset(tmp_path, ["é漢🙂 abc"], num_validation=0)
    rows = RowSource.open([(dataset, 1.0, None)], sequence_length=32, packing="concat", seed=0)
    origin = trace(rows, 0, 10)
    assert (origin.token, origin.first_byte, origin.first_character, origin.file, origin.record) == ("a", 10, 4, "tiny.jsonl", 1)
    assert (origin.before, origin.after) == ("é漢🙂 ", "bc<|endoftext|>")
    last = trace(rows, 0, 13)
    assert last.token_id == 256 and last.first_byte is last.first_character is None
    with pytest.raises(DataError, match="is padding: the row has 14 targets"):
        trace(rows, 0, 14)
    with pytest.raises(DataError, match="positions 0 to 31"):
        trace(rows, 0, 32)
    assert rows[0].targets[14] == NO_TARGET


def test_documents_are_found_by_the_beginning_of_their_id(dataset: Dataset) -> None:
    source = dataset.validation[0]
    shard, inside = source.find(source.num_documents - 1)
    id = shard.document_id(inside)
    assert find_document(dataset, id) == find_document(dataset, id[:11]) == ("validation", source.name, source.num_documents - 1)
    with pytest.raises(DataError, match="no document with an id"):
        find_document(dataset, "0" * 32)
    with pytest.raises(DataError, match="no document with an id"):
        find_document(dataset, "not hex")
    with pytest.raises(DataError, match="give more digits"):
        find_document(dataset, next(d for d in "0123456789abcdef" if sum(len(s.numbers_of(d)) for s in dataset.sources[0].shards) > 1))


# --------------------------------------------------------------------------------------------------- of a run


def traced(capsys: pytest.CaptureFixture[str], run: Path, **options: Any) -> list[dict[str, Any]]:
    trace_command(run, **options)
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Of two datasets whose sources and documents are called the same: 3 steps of 4 rows and two more that were lost; 2 steps of 2;
    then an attempt that was killed before it wrote its config, one that trained on with 3, and a version that wrote no samples down."""
    paths = [str(tiny_dataset(tmp_path / name, [[number] * 20] * 12, num_validation=2).path) for number, name in enumerate("ab")]
    data = {"sources": [{"path": paths[0], "weight": 0.5}, {"path": paths[1], "weight": 0.5}]}
    model = {"vocab_size": 257, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    training = {"steps": 30, "sequence_length": 16, "global_batch_size": 3}
    folder = tmp_path / "run"
    folder.mkdir()
    config = {"run": {"name": "a", "seed": 3}, "model": model, "data": data, "training": training}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    size = {"event": "changed", "key": "training.global_batch_size"}
    (folder / "events.jsonl").write_text(
        "".join(
            json.dumps(event) + "\n"
            for event in (
                {"attempt": 1, "event": "started", "step": 0, "samples": 0},
                {"attempt": 2, "event": "started", "step": 3, "samples": 12},
                {"attempt": 2, **size, "old": 4, "new": 2},
                {"attempt": 3, "event": "started", "step": 5, "samples": 16},
                {"attempt": 3, **size, "old": 2, "new": 3},
                {"attempt": 4, "event": "started", "step": 5, "samples": 16},
                {"attempt": 4, **size, "old": 2, "new": 3},
                {"attempt": 5, "event": "started", "step": 7},
            )
        )
    )
    return folder


def test_a_step_of_a_run_is_traced_under_the_batch_size_that_it_had(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each attempt has its own; and back, a sample is found at the step and row that took it."""
    sizes = [4, 4, 4, 2, 2, 3, 3, 3]
    taken = [(step, row) for step, size in enumerate(sizes, start=1) for row in range(size)]
    assert [traced(capsys, run, step=step, row=row)[0]["sample"] for step, row in taken] == list(range(len(taken)))
    for sample in (0, 13, 17, 24):
        document = traced(capsys, run, sample=sample)[0]["document"]
        assert (sample, *taken[sample]) in [(hit["sample"], hit["step"], hit["row"]) for hit in traced(capsys, run, document=document)]
    with pytest.raises(ConfigError, match=r"--row: got 2, wanted 0 to 1: the global batch of step 4 had 2 rows"):
        trace_command(run, step=4, row=2)
    seeded = samples_of_steps([{"event": "started", "attempt": 1, "step": 4, "samples": 10}], 2)  # of a run that another's checkpoint began
    assert (seeded.sample(5, 1), seeded.place(11), seeded.place(9)) == (11, (5, 1), None)
    with pytest.raises(ConfigError, match=r"--step: got 4, wanted a step that this run did: 5 or later"):
        seeded.sample(4, 0)


def test_a_run_whose_rows_were_packed_otherwise_is_not_traced(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What it trained on can't be told by a program that packs other documents together."""
    event: dict[str, Any] = {"event": "mixture", "step": 7, "phases": [{"from_sample": 0, "weights": [0.5, 0.5]}]}
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps({**event, "packing_version": PLAN_VERSIONS["best_fit"]}) + "\n")
    assert traced(capsys, run, sample=0)
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
    with pytest.raises(DataError, match="trained on rows of packing version 1, this program makes version"):
        trace_command(run, sample=0)
    with pytest.raises(DataError, match="trained on rows of packing version 1, this program makes version"):
        trace_command(run, sample=0, validation=True)


def test_a_document_of_any_dataset_of_a_mixture_is_found_where_it_is(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both have a source `tiny`, and documents of the same ids: what is told apart is the dataset, never the name."""
    document = traced(capsys, run, sample=1)[0]["document"]
    hits = traced(capsys, run, document=document, num_samples=28)
    rows, _ = rows_of(run, sequence_length=None, method=None, seed=None, split="train")
    wanted = set()
    for sample in range(28):
        for position in range(rows[sample].num_targets):
            if trace(rows, sample, position).document == document:
                wanted.add((sample, rows.place(sample).entry))
    assert [(hit["sample"], "ab".index(Path(hit["data"]).name)) for hit in sorted(hits, key=lambda hit: hit["sample"])] == sorted(wanted)
    assert {Path(hit["data"]).name for hit in hits} == {"a", "b"}
    with pytest.raises(ConfigError, match="a document of the held-out rows"):
        trace_command(run, document=document, validation=True)
    for options in ({"step": 1}, {"sample": 99}):
        with pytest.raises(ConfigError, match="--sample"):
            trace_command(run, validation=True, **options)
