"""If this fails, an option of `mlite data` is taken and does nothing, so that what comes out is not what was asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from data_pipeline.build import build
from data_pipeline.config import DataConfig
from data_pipeline.errors import ConfigError
from data_pipeline.schema import validate
from launcher.commands.data import app
from tests.data_fixtures import tiny_dataset

LENGTHS = ["--source-length", "8", "--target-length", "8"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """documents/ and pairs/, datasets; run/, which looks like a run."""
    folder = tmp_path_factory.mktemp("commands")
    tiny_dataset(folder / "documents")
    (folder / "en.txt").write_text("one\ntwo\n")
    (folder / "de.txt").write_text("eins\nzwei\n")
    source = {"name": "x", "files": str(folder / "en.txt"), "target_files": str(folder / "de.txt")}
    tree: dict[str, Any] = {"sources": [source], "tokenizer": {"type": "bytes"}, "validation": {"fraction": 0.0}, "workers": 1}
    build(validate(DataConfig, {"output": str(folder / "pairs"), **tree}), quiet=True)
    (folder / "run").mkdir()
    (folder / "run" / "config.yaml").write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["build", "x.yaml", "--slurm", "--quiet"], "--quiet"),
        (["build", "x.yaml", "--tasks", "4"], "--tasks"),
        (["build", "x.yaml", "--cluster", "h100"], "--cluster"),
        (["pack", "pairs", *LENGTHS, "-s", "8"], "--sequence-length"),
        (["pack", "pairs", *LENGTHS, "--method", "concat"], "--method"),
        (["pack", "documents", "-s", "8", "--source-length", "8"], "--source-length"),
        (["inspect", "pairs", *LENGTHS], "--source-length"),
        (["inspect", "documents", "-s", "8"], "--sequence-length"),
        (["inspect", "pairs", "--rows", "1", *LENGTHS, "-s", "8"], "--sequence-length"),
        (["trace", "run", "--sample", "0", *LENGTHS], "--source-length"),
        (["trace", "run", "--file", "a.txt", *LENGTHS], "--source-length"),
        (["trace", "run", "--sample", "0", "--method", "concat"], "--method"),
        (["trace", "pairs", "--sample", "0", *LENGTHS, "-s", "8"], "--sequence-length"),
        (["inspect", "documents", "--rows", "1", *LENGTHS], "--source-length"),
        (["trace", "run", "--sample", "0", "--seed", "7"], "--seed"),
        (["trace", "run", "--sample", "0", "--line", "2"], "--line"),
        (["trace", "run", "--sample", "0", "--row", "1"], "--row"),
        (["trace", "run", "--sample", "0", "--num-samples", "3"], "--num-samples"),
        (["trace", "run", "--document", "x", "--position", "1"], "--position"),
        (["trace", "run", "--file", "a.txt", "--step", "3"], "--step"),
        (["trace", "run", "--file", "a.txt", "--validation"], "--validation"),
        (["trace", "pairs", "--sample", "0", *LENGTHS, "--position", "3"], "--position"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_option_that_would_do_nothing_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], named: str) -> None:
    monkeypatch.chdir(folder)
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, ConfigError), result
    assert result.exception.faults[0].field == named and "wanted nothing here" in str(result.exception)


def test_what_belongs_is_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for words, said in (
        (["pack", "documents", "-s", "64"], "best_fit"),
        (["pack", "pairs", *LENGTHS], "x train"),
        (["trace", "pairs", "--sample", "0", *LENGTHS], "en.txt"),
    ):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0 and said in result.output, result
