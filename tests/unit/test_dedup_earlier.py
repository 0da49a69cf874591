"""If this fails, a corpus can't grow: copies of an earlier dataset come in again, or what is new goes."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_pipeline.blockfile import write_blockfile
from data_pipeline.build import build
from data_pipeline.config import DataConfig
from data_pipeline.dataset import Dataset
from data_pipeline.dedup import external
from data_pipeline.dedup.candidates import Candidates
from data_pipeline.dedup.columns import Columns, Table
from data_pipeline.dedup.config import MinHashConfig
from data_pipeline.errors import ConfigError, DataError
from data_pipeline.notebook import open_dataset
from data_pipeline.step import Ledger
from tests.corpus_fixtures import config as corpus_config
from tests.corpus_fixtures import digests, jsonl, long_texts

TEXTS = [text.strip() for text in long_texts(30, seed=3)]


def settings(tmp_path: Path, name: str, texts: list[str], *, dedup: dict[str, Any] | None, **more: Any) -> DataConfig:
    (tmp_path / f"{name}.jsonl").write_bytes(jsonl(texts))
    tree = {
        "sources": [{"name": name, "files": str(tmp_path / f"{name}.jsonl")}],
        "tokenizer": {"type": "bytes"},
        "validation": {"fraction": 0.0},
        "packing": [],
        "dedup": dedup,
    }
    return corpus_config(tmp_path, tmp_path / "data" / name, **{**tree, **more})


def texts_of(dataset: Dataset) -> list[str]:
    return [document.text for document in open_dataset(dataset.path).documents]


def test_b017_a_copy_of_an_earlier_document_goes_and_the_report_names_it(tmp_path: Path) -> None:
    first = build(settings(tmp_path, "first", TEXTS[:3], dedup={}, validation={"fraction": 0.4}), quiet=True)
    before = digests(first.path)
    new = [TEXTS[10], TEXTS[1], TEXTS[11], TEXTS[2] + " and more", TEXTS[11]]
    second = build(settings(tmp_path, "second", new, dedup={"earlier": [str(first.path)]}), quiet=True)
    assert texts_of(second) == [TEXTS[10], TEXTS[11]]
    after = digests(first.path)
    assert {name: after[name] for name in before} == before
    assert [Path(name).parent.name for name in set(after) - set(before)] == ["dedup"]
    lines = [json.loads(line) for line in (second.path / "duplicates.jsonl").read_text().splitlines()]
    found = [(line["removed"]["record"], line["reason"], line["kept"].get("dataset"), line["kept"]["record"]) for line in lines]
    own = [each for each in found if each[2] is None]
    assert [each for each in found if each[2]] == [(2, "exact", str(first.path), 2), (4, "near", str(first.path), 3)]
    assert own in ([(5, "exact", None, 3)], [(3, "exact", None, 5)])  # either copy may stay
    lines = [line for line in lines if "dataset" in line["kept"]]
    opened = open_dataset(first.path)
    named = {*(document.id for document in opened.documents), *(document.id for document in opened.heldout)}
    assert {line["kept"]["id"] for line in lines} < named
    ledger = Ledger.from_dict(second.manifest.ledger)
    assert {reason: count.documents for reason, count in ledger.total("dedup").dropped.items()} == {
        "exact_duplicate": 1,
        "exact_duplicate_of_earlier": 1,
        "near_duplicate_of_earlier": 1,
    }


def test_a_corpus_that_grows_keeps_what_one_build_of_all_would(tmp_path: Path) -> None:
    rng = random.Random(0)
    old = [*TEXTS[:15], *(text + f" addition {n}" for n, text in enumerate(TEXTS[:4]))]
    new = [*TEXTS[15:], *(f"introduction {n} {text}" for n, text in enumerate(TEXTS[10:20])), *TEXTS[5:8]]
    rng.shuffle(new)
    first = build(settings(tmp_path, "first", old, dedup={}), quiet=True)
    (tmp_path / "second.jsonl").write_bytes(jsonl(new))
    both = [{"name": name, "files": str(tmp_path / f"{name}.jsonl")} for name in ("first", "second")]
    joined = build(settings(tmp_path, "joined", [], dedup={}, sources=both), quiet=True)
    grown = build(settings(tmp_path, "second", new, dedup={"earlier": [str(first.path)]}), quiet=True)
    wanted = [document.id for document in open_dataset(joined.path).documents.of("second")]
    assert [document.id for document in open_dataset(grown.path).documents] == wanted and 10 < len(wanted) < len(new)


def test_the_index_is_made_once_and_all_of_it_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two near documents stay in an earlier dataset; a copy of either goes."""
    twins = [TEXTS[0] + " one", TEXTS[0] + " two words", TEXTS[0] + " one"]
    build(settings(tmp_path, "first", twins, dedup=None), quiet=True)
    other = build(settings(tmp_path, "other", TEXTS[5:9], dedup=None), quiet=True)
    earlier = [str(tmp_path / "data" / name) for name in ("first", "other")]
    new = [TEXTS[0] + " two words", TEXTS[1], TEXTS[0] + " one", TEXTS[8], "x " + TEXTS[0] + " two words"]
    second = build(settings(tmp_path, "second", new, dedup={"earlier": earlier}, workers=2), quiet=True)
    assert texts_of(second) == [TEXTS[1]]

    def fails(*_: object) -> bytes:
        raise AssertionError("the index is there")

    monkeypatch.setattr("data_pipeline.earlier.index_part", fails)
    third = build(settings(tmp_path, "third", [*new, TEXTS[2]], dedup={"earlier": earlier}), quiet=True)
    assert texts_of(third) == [TEXTS[1], TEXTS[2]]
    index = next((other.path / "dedup").glob("*.index"))
    raw = bytearray(index.read_bytes())
    raw[5000] ^= 1
    index.write_bytes(raw)
    with pytest.raises(DataError, match="does not match its checksum"):
        build(settings(tmp_path, "fourth", [*new, TEXTS[3]], dedup={"earlier": earlier}), quiet=True)


def test_an_earlier_dataset_that_cannot_be_written_to_is_read_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build(settings(tmp_path, "first", TEXTS[:3], dedup={}), quiet=True)

    def write(path: Path, *, kind: str) -> AbstractContextManager[Any]:
        if first.path in path.parents:
            raise PermissionError(path)
        return write_blockfile(path, kind=kind)

    monkeypatch.setattr("data_pipeline.earlier.write_blockfile", write)
    second = build(settings(tmp_path, "second", TEXTS[2:5], dedup={"earlier": [str(first.path)]}), quiet=True)
    assert texts_of(second) == TEXTS[3:5] and not (first.path / "dedup").exists()


def test_another_earlier_dataset_is_another_dataset(tmp_path: Path) -> None:
    first = build(settings(tmp_path, "first", TEXTS[:3], dedup={}), quiet=True)
    config = settings(tmp_path, "second", TEXTS[2:5], dedup={"earlier": [str(first.path)]})
    build(config, quiet=True)
    build(settings(tmp_path, "first", TEXTS[4:6], dedup={}), quiet=True, replace=True)
    with pytest.raises(ConfigError, match="choose another output, or add --replace"):
        build(config, quiet=True)
    assert texts_of(build(config, quiet=True, replace=True)) == TEXTS[2:4]
    with pytest.raises(ConfigError, match=r"dedup\.earlier: .*other than the output"):
        build(settings(tmp_path, "second", TEXTS, dedup={"earlier": [str(config.folder)]}), quiet=True, replace=True)
    with pytest.raises(ConfigError, match="exact or minhash with earlier"):
        settings(tmp_path, "second", TEXTS, dedup={"earlier": ["x"], "exact": False, "minhash": None})
    with pytest.raises(DataError):
        build(settings(tmp_path, "third", TEXTS, dedup={"earlier": [str(tmp_path / "nothing")]}), quiet=True)


# ------------------------------------------------------------------------------------------------- losses, memory


def test_a_source_that_loses_more_than_it_may_stops_the_build(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [*TEXTS[:4], *TEXTS[:4], *TEXTS[:3], "", " "]  # 7 of 11 go; blank ones count for nothing
    stands = build(settings(tmp_path, "copies", texts, dedup={}, max_source_loss=0.7), quiet=True)
    with pytest.raises(DataError, match=r"max_source_loss \(60 %\) is gone\n  copies lost 6\d\.\d % of its text: 7 exact duplicate"):
        build(settings(tmp_path, "copies", texts, dedup={}, max_source_loss=0.6), quiet=True)  # of a dataset that is up to date, too
    assert Dataset.open(stands.path).manifest_hash == stands.manifest_hash
    with pytest.raises(DataError, match=r"max_source_loss \(60 %\) is gone\n  copies lost 6\d\.\d % of its text: 7 exact duplicate"):
        build(settings(tmp_path, "copies", texts, dedup={"minhash": None}, max_source_loss=0.6), quiet=True, replace=True)
    build(settings(tmp_path, "copies", texts, dedup={"minhash": None}), replace=True)
    assert "warning: copies lost 6" in capsys.readouterr().err
    line = "A long line that stands in every one of these documents " * 20
    with pytest.raises(DataError, match=r"cut lost 9\d\.\d % of its text: [\d,]+ bytes cut by lines"):
        build(
            settings(tmp_path, "cut", [f"{line}\n{n}" for n in range(20)], dedup={"minhash": None, "lines": {}}, max_source_loss=0.9),
            quiet=True,
        )


def test_the_limit_is_no_part_of_what_is_built(tmp_path: Path) -> None:
    assert settings(tmp_path, "a", TEXTS, dedup={}, max_source_loss=0.5).content() == settings(tmp_path, "a", TEXTS, dedup={}).content()


def test_memory_a_document_is_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bands and sketches lie on disk: of 239 bytes a document that they take, none is in memory."""
    monkeypatch.setattr(external, "RUN_RECORDS", 1 << 15)
    monkeypatch.setattr(external, "BUDGET_BYTES", 1 << 19)
    rng = np.random.default_rng(0)

    def columns(documents: int) -> Iterator[Columns]:
        for first in range(0, documents, 1000):
            yield Columns(
                ids=np.array([f"{number:032x}".encode() for number in range(first, first + 1000)]),
                priorities=np.zeros(1000, dtype=np.int64),
                lengths=np.full(1000, 2000),
                keys=rng.integers(0, 1 << 63, (1000, 2), dtype=np.uint64),
                bands=rng.integers(0, 1 << 63, (1000, 14), dtype=np.uint64),
                sketches=rng.integers(0, 256, (1000, 112), dtype=np.uint8),
                has_signature=np.ones(1000, dtype=np.bool_),
            )

    peaks = []
    for number, documents in enumerate((20_000, 100_000)):
        folder = tmp_path / str(number)
        folder.mkdir()
        tracemalloc.start()
        table = Table(columns(documents), MinHashConfig(), folder)
        candidates = Candidates([table.bands_path], np.arange(documents))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(candidates.ranks) == 0 and table.sketches(np.array([3, 5])).shape == (2, 112)
    assert (peaks[1] - peaks[0]) / 80_000 < 150


def test_an_earlier_dataset_in_object_storage_leaves_nothing_in_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build(settings(tmp_path, "first", TEXTS[:3], dedup=None), quiet=True)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))  # where the cache is
    second = build(settings(tmp_path, "second", [TEXTS[1], TEXTS[9]], dedup={"earlier": [f"file://{first.path}"]}), quiet=True)
    assert texts_of(second) == [TEXTS[9]]
    assert not list((tmp_path / "here").iterdir()) and not list((tmp_path / "temporary").rglob("*.index"))
    assert list(tmp_path.glob("data/second.work/dedup/*.index"))  # which all machines of a build share
