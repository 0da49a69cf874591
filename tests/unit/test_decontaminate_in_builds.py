"""If this fails, a build leaves evaluation items in its text, or removes text and leaves no evidence."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.build import build
from data_pipeline.cache_key import cache_key
from data_pipeline.config import DataConfig
from data_pipeline.decontaminate.check import check_dataset, config_for
from data_pipeline.errors import ConfigError, DataError
from data_pipeline.step import Ledger
from tests.cleaning_texts import QUESTION, filler
from tests.corpus_fixtures import config as corpus_config
from tests.corpus_fixtures import jsonl


def build_config(tmp_path: Path, decontaminate: dict[str, Any] | None, **more: Any) -> DataConfig:
    output = more.pop("output", tmp_path / "out")
    rng = random.Random(8)
    texts = [f"{filler(rng, 60)} {QUESTION if number % 10 == 3 else ''} {filler(rng, 60)}" for number in range(40)]
    for part in range(2):
        (tmp_path / f"raw{part}.jsonl").write_bytes(jsonl(texts[20 * part : 20 * part + 20]))
    (tmp_path / "exam.jsonl").write_text(json.dumps({"question": QUESTION, "answer": "the oldest"}) + "\n")
    sources = [{"name": "web", "files": str(tmp_path / "raw*.jsonl")}]
    extra = (
        {}
        if decontaminate is None
        else {"decontaminate": {"evaluations": [{"name": "exam", "files": str(tmp_path / "exam.jsonl")}], **decontaminate}}
    )
    tree = {"sources": sources, "tokenizer": {"type": "bytes"}, "validation": {"fraction": 0.0}, "packing": [], **extra, **more}
    return corpus_config(tmp_path, output, **tree)


def test_a_build_leaves_evidence_and_does_not_depend_on_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_pipeline.inputs.TASK_BYTES", 1)
    dataset = build(build_config(tmp_path, {}), quiet=True)
    ledger = Ledger.from_dict(dataset.manifest.ledger)
    assert ledger.tally("decontaminate", "web").dropped["contaminated_exam"].documents == 4
    found = [json.loads(line) for line in (dataset.path / "contamination.jsonl").read_text().splitlines()]
    assert [(line["document"]["file"], line["document"]["record"]) for line in found] == [
        (f"raw{part}.jsonl", record) for part in range(2) for record in (4, 14)
    ]
    again = build(build_config(tmp_path, {}, output=tmp_path / "again", workers=2), quiet=True)
    assert (again.path / "contamination.jsonl").read_bytes() == (dataset.path / "contamination.jsonl").read_bytes()
    assert again.identity == dataset.identity
    cut_out = build(build_config(tmp_path, {"action": "span", "margin_chars": 20}, output=tmp_path / "span"), quiet=True)
    assert sum(source.num_documents for source in cut_out.sources) == 40
    assert "decontaminate" not in build_config(tmp_path, None).content()


def test_evaluations_are_hashed_once_and_not_for_every_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []

    def counted(stage: str, *parts: Any) -> str:
        hashed.append(stage)
        return cache_key(stage, *parts)

    monkeypatch.setattr("data_pipeline.decontaminate.stage.cache_key", counted)
    monkeypatch.setattr("data_pipeline.inputs.TASK_BYTES", 1)
    dataset = build(build_config(tmp_path, {}), quiet=True)
    assert hashed == ["decontaminate"]
    monkeypatch.setattr("data_pipeline.decontaminate.check.BATCH_BYTES", 1000)
    assert check_dataset(dataset.path, config_for([f"new={tmp_path / 'exam.jsonl'}"]), quiet=True) == 0
    assert hashed == ["decontaminate"] * 2


def test_another_evaluation_is_another_dataset(tmp_path: Path) -> None:
    config = build_config(tmp_path, {})
    build(config, quiet=True)
    with (tmp_path / "exam.jsonl").open("a") as file:
        file.write(json.dumps({"text": "Another one that was not there before"}) + "\n")
    with pytest.raises(ConfigError, match="choose another output, or add --replace"):
        build(config, quiet=True)
    (tmp_path / "exam.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match=r"evaluation exam: .*exam\.jsonl:1 has no text"):
        build(config, quiet=True, replace=True)


def test_a_finished_dataset_is_checked_against_a_new_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = build(build_config(tmp_path, None, validation={"fraction": 0.2}), quiet=True)
    config = config_for([f"new={tmp_path / 'exam.jsonl'}"])
    assert check_dataset(dataset.path, config, output=tmp_path / "found.jsonl", workers=2) == 1
    assert "new: 1 of 1 items found, in 4 documents" in capsys.readouterr().err
    found = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    places = {(line["document"]["file"], line["document"]["record"]) for line in found}  # held-out documents are among them
    assert places == {(f"raw{part}.jsonl", record) for part in range(2) for record in (4, 14)}
    (tmp_path / "other.jsonl").write_text(
        json.dumps({"text": "nothing of this stands in any of the documents that were built here at all"})
    )
    assert check_dataset(dataset.path, config_for([str(tmp_path / "other.jsonl")]), quiet=True) == 0


def test_the_evaluations_of_a_check_come_from_files_or_from_a_config(tmp_path: Path) -> None:
    config = config_for(["a/my exam.test.jsonl", "b=c/*.jsonl"], ["ngram=10", "require_answer=true"])
    assert [(each.name, each.files) for each in config.evaluations] == [("my-exam", "a/my exam.test.jsonl"), ("b", "c/*.jsonl")]
    assert config.ngram == 10 and config.require_answer
    (tmp_path / "data.yaml").write_text("decontaminate: {ngram: 11, evaluations: [{name: x, files: y.jsonl}]}\n")
    assert config_for([str(tmp_path / "data.yaml")]).ngram == 11
    (tmp_path / "data.yaml").write_text("output: x\n")
    with pytest.raises(ConfigError, match=r"decontaminate\.evaluations"):
        config_for([str(tmp_path / "data.yaml")])
