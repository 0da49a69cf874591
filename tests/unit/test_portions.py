"""If these fail, a corpus that several machines build together is not the one that a single machine would have built."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data_pipeline.build import build, build_portion
from data_pipeline.config import DataConfig
from data_pipeline.errors import DataError
from data_pipeline.portion import Portion
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
