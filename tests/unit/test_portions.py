"""If these fail, a corpus that several machines build together is not the one that a single machine would have built."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import IO

import pytest

from data_pipeline.build import build, build_portion
from data_pipeline.config import DataConfig
from data_pipeline.errors import DataError, RunInUseError
from data_pipeline.inputs import find_inputs
from data_pipeline.pool import started
from data_pipeline.portion import Portion
from data_pipeline.progress import Progress
from data_pipeline.storage import sha256_file
from data_pipeline.work_folder import held
from tests.corpus_fixtures import config, digests, write_corpus


def settings(tmp_path: Path, corpus: Path, name: str) -> DataConfig:
    """Every stage that looks at the whole corpus: dedup by field, exact and near, lines, a trained tokenizer."""
    dedup = {"field": "url", "lines": {"min_chars": 40}}
    return config(
        corpus, tmp_path / name / "data", dedup=dedup, filters={"pii": {}, "write_dropped": True}, packing=[{"sequence_length": 64}]
    )


def test_portions_done_in_advance_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of order, one of them twice and one never; what is left for the build is what that one would have done."""
    corpus = write_corpus(tmp_path / "corpus")
    same = [json.dumps({"text": f"page {n}, another text", "url": "http://one"}) for n in range(3)]
    (corpus / "web" / "e.jsonl").write_text("\n".join(same) + "\n")
    monkeypatch.setattr("data_pipeline.inputs.TASK_BYTES", 40_000)
    monkeypatch.setattr("data_pipeline.sharding.MIN_SHARD_BYTES", 20_000)
    expected = digests(build(settings(tmp_path, corpus, "alone"), quiet=True).path)
    assert sum(name.startswith("shards/") for name in expected) > 8
    mine = settings(tmp_path, corpus, "mine")
    for index in (2, 0, 2):
        build_portion(mine, "read", Portion(index, 4), quiet=True)
    with pytest.raises(DataError, match="the stage before this one"):
        build_portion(mine, "encode", Portion(0, 3), quiet=True)
    signatures = len(list((mine.work_folder / "signatures").glob("*.signatures")))
    assert 2 <= signatures < len(list((tmp_path / "alone" / "data.work" / "documents").glob("*.documents")))
    build_portion(mine, "join", Portion(0, 1), quiet=True)
    for index in (2, 1):
        with held(mine.work_folder, shared=True):  # beside another one
            build_portion(mine, "encode", Portion(index, 3), quiet=True)
    assert digests(build(mine, quiet=True).path) == expected
    assert not list((mine.work_folder / "signatures").iterdir()) and not list(mine.work_folder.glob("inputs-*"))


def test_the_lock_of_a_work_folder_is_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On NFS a shared lock needs that. A file system without locks stops nobody, and makes nobody tidy up after others."""
    leftover = tmp_path / ".x.tmp-1"
    found: list[bool] = []

    def flock(file: IO[str], kind: int) -> None:
        found.append(file.readable() and file.writable())
        raise error

    monkeypatch.setattr("fcntl.flock", flock)
    for shared in (True, False):
        leftover.touch()
        error: OSError = OSError(errno.ENOSYS, "Function not implemented")
        with held(tmp_path, shared=shared):
            assert leftover.exists()
        error = BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        with pytest.raises(RunInUseError, match="another build is writing"), held(tmp_path, shared=shared):
            pass
    assert found == [True] * 4


def test_hashes_that_another_task_takes_away_meanwhile_are_made_again(tmp_path: Path) -> None:
    (tmp_path / "raw.txt").write_text("some text")
    mine = config(tmp_path, tmp_path / "data", sources=[{"name": "x", "files": str(tmp_path / "raw.txt")}], packing=[])
    mine.work_folder.mkdir()
    (mine.work_folder / "inputs-0-of-2.json").symlink_to(tmp_path / "gone")  # listed, and not there when it is read
    with started(1) as workers:
        (task,) = find_inputs(mine, workers, Progress(quiet=True), search=None)
    assert task.files[0].hash == sha256_file(tmp_path / "raw.txt")
