"""If this fails, a build takes for done what changed or was damaged, or does anew what was done."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_pipeline.blockfile import BlockFile
from data_pipeline.build import build
from data_pipeline.config import DataConfig
from data_pipeline.dataset import Dataset
from data_pipeline.errors import ConfigError, DataError, RunInUseError
from data_pipeline.progress import Progress
from data_pipeline.store import DocumentStore
from data_pipeline.tokenizer.byte_level import bytes_tokenizer_json
from data_pipeline.tokenizer.stage import make_tokenizer
from data_pipeline.work_folder import held
from tests.corpus_fixtures import all_texts, config, digests, simple


def test_a_finished_build_is_found_and_only_plans_are_added(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build(config(corpus, tmp_path / "data"), quiet=True)
    before = digests(tmp_path / "data")
    build(config(corpus, tmp_path / "data", packing=[{"sequence_length": 128}], workers=3))
    assert "is up to date" in capsys.readouterr().err
    after = digests(tmp_path / "data")
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {
        f"packing/{source}{split}-S128-best_fit.plan"
        for source in ("web", "books", "table")
        for split in ("", ".validation")
        if f"packing/{source}{split}-S64-best_fit.plan" in before
    }


def test_without_its_work_folder_a_build_ends_with_the_same_bytes(corpus: Path, tmp_path: Path, dataset: Dataset) -> None:
    again = build(config(corpus, tmp_path / "data"), quiet=True)
    ours, theirs = digests(again.path), digests(dataset.path)
    assert {name: digest for name, digest in ours.items() if name != "report.html"} == {
        name: digest for name, digest in theirs.items() if name != "report.html"
    }
    assert ours["report.html"] == theirs["report.html"]


def test_b045_changed_text_is_seen_though_name_and_length_stay(tmp_path: Path) -> None:
    """Then the old dataset is kept until --replace, and the new one has the new text."""
    first = simple(tmp_path, ["one document", "two documents"])
    build(first, quiet=True)
    path = tmp_path / "raw.jsonl"
    stat = path.stat()
    path.write_bytes(path.read_bytes().replace(b"two", b"TWO"))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # even the time is put back
    with pytest.raises(ConfigError, match=r"output: .*--replace"):
        build(first, quiet=True)
    assert all_texts(Dataset.open(tmp_path / "out")) == ["one document", "two documents"]
    assert all_texts(build(first, quiet=True, replace=True)) == ["one document", "TWO documents"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out", "out.work", "raw.jsonl"]


@pytest.mark.parametrize(
    "change", [{"seed": 5}, {"tokenizer": {"type": "bpe", "vocab_size": 300}}, {"normalise": {"newlines": "keep"}}, {"dedup": None}]
)
def test_another_config_does_not_take_the_place_of_a_dataset(tmp_path: Path, change: dict[str, Any]) -> None:
    texts = [f"document {n} " * 5 for n in range(20)]
    build(simple(tmp_path, texts), quiet=True)
    with pytest.raises(ConfigError, match="choose another output, or add --replace"):
        build(simple(tmp_path, texts, **change), quiet=True)


def test_a_folder_that_is_no_dataset_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("precious")
    for replace in (False, True):
        with pytest.raises(ConfigError, match=r"a folder that doesn't exist yet"):
            build(simple(tmp_path, ["text"]), quiet=True, replace=replace)
    assert (tmp_path / "out" / "thesis.tex").read_text() == "precious"


def test_two_builds_of_one_output_do_not_meet(tmp_path: Path) -> None:
    settings = simple(tmp_path, ["text"])
    with held(settings.work_folder), pytest.raises(RunInUseError, match="another build"):
        build(settings, quiet=True)
    build(settings, quiet=True)


def test_b007_b045_a_pretrained_tokenizer_that_changed_is_seen(tmp_path: Path) -> None:
    """Its files stand elsewhere under the same name: a build that took the old ids for the new ones would never be noticed."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    tree = json.loads(bytes_tokenizer_json())
    tree["added_tokens"].append({**tree["added_tokens"][0], "id": 257, "content": "<|other|>"})
    (theirs / "tokenizer.json").write_text(json.dumps(tree))
    settings = simple(tmp_path, ["abc abc", "cab"], tokenizer={"type": "pretrained", "name_or_path": str(theirs)})
    first = build(settings, quiet=True)
    assert build(settings, quiet=True).manifest_hash == first.manifest_hash and first.eod_id == 256
    (theirs / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|other|>"}))
    with pytest.raises(ConfigError, match=r"output: .*--replace"):
        build(settings, quiet=True)
    assert build(settings, quiet=True, replace=True).eod_id == 257
    vocabulary = tree["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (theirs / "tokenizer.json").write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match=r"output: .*--replace"):
        build(settings, quiet=True)
    last = build(settings, quiet=True, replace=True)
    assert sorted(all_texts(last)) == ["abc abc", "cab"] and last.tokenizer_hash != first.tokenizer_hash

    with pytest.raises(DataError, match="theirs changed while the build was running"):  # what it reads must be what its key says
        make_tokenizer(
            settings.tokenizer,
            DocumentStore([]),
            np.ones(0, dtype=bool),
            content={},
            seed=1,
            path=tmp_path / "t.json",
            workers=1,
            progress=Progress(quiet=True),
        )


def test_a_revision_is_part_of_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """B045 of a dataset on the Hub, which has no files here to be hashed; one whose revision isn't stated is said to be unknown."""
    import datasets

    asked: list[str | None] = []

    def load(name: str, config_name: str | None, *, split: str, streaming: bool, revision: str | None) -> list[dict[str, str]]:
        asked.append(revision)
        return [{"text": f"text of {name} at {revision}"}]

    monkeypatch.setattr(datasets, "load_dataset", load)

    def settings(**keys: str) -> DataConfig:
        return simple(tmp_path, [], sources=[{"name": "hub", "dataset": "owner/name", **keys}])

    assert all_texts(build(settings())) == ["text of owner/name at None"] and "owner/name may hold" not in capsys.readouterr().err
    build(settings())
    assert "owner/name may hold other text by now" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"output: .*--replace"):
        build(settings(revision="abc"), quiet=True)
    assert all_texts(build(settings(revision="abc"), replace=True)) == ["text of owner/name at abc"] and asked == [None, "abc"]
    build(settings(revision="abc"))
    assert "owner/name may hold" not in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"sources\.hub\.revision: .*nothing for a local folder"):
        build(simple(tmp_path, [], sources=[{"name": "hub", "dataset": str(tmp_path), "revision": "abc"}]), quiet=True)


def test_a_damaged_shard_in_the_work_folder_is_made_again(corpus: Path, tmp_path: Path, dataset: Dataset) -> None:
    """B016: what a crash or a disk left behind is never mixed into a dataset."""
    settings = config(corpus, tmp_path / "data")
    built = build(settings, quiet=True)
    for path in built.path.rglob("*"):
        if path.is_file():
            path.unlink()
    (built.path / "shards").rmdir()
    (built.path / "packing").rmdir()
    shard = next(path for path in (settings.work_folder / "shards").glob("*.bin"))
    raw = bytearray(shard.read_bytes())
    raw[5000] ^= 1
    shard.write_bytes(raw)
    (settings.work_folder / "shards" / ".x.bin.tmp-1-abc").write_bytes(b"half")
    assert digests(build(settings, quiet=True).path) == digests(dataset.path)
    assert not list(settings.work_folder.rglob("*.tmp-*"))


def test_changing_the_tokenizer_reads_nothing_again(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(config(corpus, tmp_path / "data"), quiet=True)

    def no_reading(*_: object) -> None:
        raise AssertionError("an input was read again")

    monkeypatch.setattr("data_pipeline.ingest.read_task", no_reading)
    monkeypatch.setattr("data_pipeline.dedup.stage.opened_table", no_reading)
    built = build(config(corpus, tmp_path / "data", tokenizer={"type": "bytes"}), quiet=True, replace=True)
    assert built.vocab_size == 257


def test_documents_of_the_work_folder_are_checksummed(corpus: Path, tmp_path: Path) -> None:
    settings = config(corpus, tmp_path / "data")
    build(settings, quiet=True)
    part = max((settings.work_folder / "documents").glob("*.documents"), key=lambda path: path.stat().st_size)
    raw = bytearray(part.read_bytes())
    raw[6000] ^= 1
    part.write_bytes(raw)
    with pytest.raises(DataError, match="block 0"):
        BlockFile(part, kind="documents").verify()
