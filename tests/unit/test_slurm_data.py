"""If these fail, a data build waits in the queue for a mistake that was plain, can't see its files, or is started again for ever."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from data_pipeline.build import build, build_portion
from data_pipeline.config import DataConfig
from data_pipeline.errors import ConfigError
from data_pipeline.portion import Portion
from data_pipeline.schema import validate
from data_pipeline.work_folder import check_place
from launcher.slurm import data as jobs
from launcher.slurm.data import DataTask, folders_of, submit_build
from launcher.slurm.submission import ROOT


def settings(folder: Path, **more: Any) -> DataConfig:
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "raw.txt").exists():
        (folder / "raw.txt").write_text("some text")
    tree: dict[str, Any] = {"output": str(folder / "out" / "mine"), "sources": [{"name": "x", "files": str(folder / "raw.txt")}]}
    plain = {"tokenizer": {"type": "bytes"}, "validation": {"fraction": 0.0}, "workers": 1}
    return validate(DataConfig, {**tree, **plain, **more})


def test_a_container_sees_all_that_the_data_config_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the names that the config has, and where links lead; nothing of object storage."""
    here = tmp_path / "here"
    for name in ("here", "raw", "pairs", "store/eval", "before", "hub/snapshot", "hub/blobs", "lists"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "raw" / "one.txt").touch()
    (tmp_path / "lists" / "hosts.txt").touch()
    (tmp_path / "link").symlink_to(tmp_path / "store")
    (tmp_path / "hub" / "blobs" / "tokenizer.json").touch()
    (tmp_path / "hub" / "snapshot" / "tokenizer.json").symlink_to(tmp_path / "hub" / "blobs" / "tokenizer.json")
    monkeypatch.chdir(here)
    config = settings(
        here,
        output="../out/mine",
        work="../work",
        sources=[
            {"name": "a", "files": [str(tmp_path / "raw" / "one.txt"), "s3://bucket/x"], "target_files": f"{tmp_path}/pairs/*.de"},
        ],
        tokenizer={"type": "pretrained", "name_or_path": str(tmp_path / "hub" / "snapshot")},
        dedup={"earlier": ["../before", "s3://bucket/y"]},
        filters={"url": {"blocklists": [str(tmp_path / "lists" / "hosts.txt")]}},
        decontaminate={"evaluations": [{"name": "e", "files": str(tmp_path / "link" / "eval" / "*.jsonl")}]},
    )
    seen = {path.resolve() for path in folders_of(config)}
    assert folders_of(config)[:2] == [here, ROOT] and tmp_path / "link" / "eval" in folders_of(config)
    places = ("here", "out", "work", "raw", "pairs", "store/eval", "before", "hub/snapshot", "hub/blobs", "lists")
    assert seen == {ROOT, *(tmp_path / place for place in places)}


@pytest.fixture
def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], int]:
    """The exit code of a join that the time limit stops at its given start, having left a file in the work folder meanwhile."""

    def leave(code: int) -> None:
        raise SystemExit(code)

    def run(restarts: str, left: str) -> int:
        monkeypatch.setattr(jobs.os, "_exit", leave)
        monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
        config = settings(tmp_path)
        (config.work_folder / "documents").mkdir(parents=True, exist_ok=True)
        (config.work_folder / "documents" / "x.json").touch()
        stop = DataTask("x.yaml", "join")._stop_of(config)
        path = config.work_folder / left
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        with pytest.raises(SystemExit) as caught:
            stop(0, None)
        return int(str(caught.value.code))

    return run


@pytest.mark.parametrize(
    ("restarts", "left", "code"),
    [
        ("0", "lock", 75),  # the first start may have been a slow one
        ("1", "dedup/x.duplicates", 75),
        ("1", "inputs.json", 75),
        ("1", "lock", 1),
        ("1", "slurm/0001/2_0_log.out", 1),
        ("1", "dedup/.x.duplicates.tmp-7-ab", 1),
        ("1", "dedup/x.scratch/bands", 1),
    ],
)
def test_a_start_that_finishes_nothing_more_is_the_last(
    stopped: Callable[[str, str], int], capsys: pytest.CaptureFixture[str], restarts: str, left: str, code: int
) -> None:
    assert stopped(restarts, left) == code
    assert ("cluster.time=" in capsys.readouterr().err) == (code == 1)


def test_a_place_that_is_taken_is_refused_before_anything_is_queued(tmp_path: Path) -> None:
    """A foreign folder; a dataset of another config, or of other input, without --replace."""
    config = settings(tmp_path)
    (tmp_path / "data.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)))
    config.folder.mkdir(parents=True)
    (config.folder / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="a dataset of ours"):
        submit_build(tmp_path / "data.yaml", [], tasks=2, replace=True)
    (config.folder / "thesis.tex").unlink()
    build(config, quiet=True)
    check_place(config.folder, config.content(), replace=False)
    with pytest.raises(ConfigError, match="--replace"):
        submit_build(tmp_path / "data.yaml", ["seed=7"], tasks=2)
    check_place(config.folder, settings(tmp_path, seed=7).content(), replace=True)
    assert not (config.work_folder / "slurm").exists()
    (tmp_path / "raw.txt").write_text("another text")
    with pytest.raises(ConfigError, match="--replace"):
        build_portion(config, "join", Portion(0, 1), quiet=True)
    build_portion(config, "join", Portion(0, 1), quiet=True, replace=True)
