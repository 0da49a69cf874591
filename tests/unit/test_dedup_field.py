"""If this fails, pages of one address stay twice, or pages without an address are taken for copies of each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from data_pipeline.build import build
from data_pipeline.config import DataConfig
from data_pipeline.dataset import Dataset
from data_pipeline.dedup.config import DedupConfig
from data_pipeline.dedup.keepers import keepers_of
from data_pipeline.document import Document, content_key, document_id
from data_pipeline.step import Ledger
from data_pipeline.store import DocumentStore, Part, write_part
from tests.corpus_fixtures import config, digests, long_texts

TEXTS = long_texts(12, seed=5)


def settings(folder: Path, output: Path, **more: Any) -> DataConfig:
    sources = [{"name": name, "files": str(folder / name)} for name in ("best", "rest")]
    tree = {"sources": sources, "dedup": {"field": "url"}, "tokenizer": {"type": "bytes"}, "validation": {"fraction": 0.0}, "packing": []}
    return config(folder, output, **{**tree, **more})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten records with five addresses, in two sources and two formats; three records have none, and two the number 7."""
    (tmp_path / "best").mkdir()
    (tmp_path / "rest").mkdir()
    best = [("https://a.example/", TEXTS[0]), ("https://b.example/", TEXTS[1][:60]), (None, TEXTS[2]), (7, TEXTS[3] + "longer")]
    rest = [("https://a.example/", TEXTS[0] * 2), (" https://b.example/\n", TEXTS[4]), ("", TEXTS[5]), ("https://c.example/", TEXTS[6])]
    table = [("https://c.example/", TEXTS[7] * 3), ("https://d.example/", TEXTS[8])]
    (tmp_path / "best" / "a.jsonl").write_text("".join(json.dumps({"text": text, "url": url}) + "\n" for url, text in best))
    lines = [json.dumps({"text": text, "url": url}) for url, text in rest]
    lines += [json.dumps({"text": TEXTS[9]}), json.dumps({"text": TEXTS[10], "url": 7})]
    (tmp_path / "rest" / "b.jsonl").write_text("\n".join(lines))
    columns = {"url": [url for url, _ in table], "text": [text for _, text in table]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "rest" / "c.parquet")
    return tmp_path


def removed(dataset: Dataset) -> set[tuple[str, int, str, int, str]]:
    lines = [json.loads(line) for line in (dataset.path / "duplicates.jsonl").read_text().splitlines()]
    return {(x["removed"]["file"], x["removed"]["record"], x["kept"]["file"], x["kept"]["record"], x["reason"]) for x in lines}


def test_one_document_of_each_address_stays(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The best source's, then the longest; addresses that are empty or absent are no one's."""
    dataset = build(settings(folder, folder / "out"))
    assert "dedup: 4 by field, 0 exact and 0 near duplicates of 12 documents" in capsys.readouterr().err
    assert removed(dataset) == {
        ("b.jsonl", 1, "a.jsonl", 1, "field"),
        ("b.jsonl", 2, "a.jsonl", 2, "field"),
        ("b.jsonl", 4, "c.parquet", 1, "field"),
        ("b.jsonl", 6, "a.jsonl", 4, "field"),
    }
    ledger = Ledger.from_dict(dataset.manifest.ledger)
    ledger.balance(chain=["read", "normalise", "dedup", "encode"])
    assert {reason: count.documents for reason, count in ledger.total("dedup").dropped.items()} == {"field_duplicate": 4}


def test_a_copy_of_a_document_that_went_by_its_address_stays(tmp_path: Path) -> None:
    """What is gone can't stand for a text that is like it: nothing would be left of it."""
    records = [{"text": TEXTS[0] * 2, "url": "u"}, {"text": TEXTS[1], "url": "u"}, {"text": TEXTS[1], "url": "v"}]
    (tmp_path / "raw.jsonl").write_text("\n".join(map(json.dumps, records)))
    made = settings(tmp_path, tmp_path / "out", sources=[{"name": "s", "files": str(tmp_path / "raw.jsonl")}])
    assert removed(build(made, quiet=True)) == {("raw.jsonl", 2, "raw.jsonl", 1, "field")}


def test_the_result_does_not_depend_on_the_workers(folder: Path) -> None:
    for workers in (1, 2):
        build(settings(folder, folder / f"out{workers}", workers=workers), quiet=True)
    first, second = digests(folder / "out1"), digests(folder / "out2")
    assert {name for name in first if first[name] != second.get(name)} <= {"report.html", "report.json"}


def test_without_a_field_a_config_says_nothing_of_it() -> None:
    assert "field" not in DedupConfig().model_dump(mode="json")
    assert DedupConfig(field="url").model_dump(mode="json")["field"] == "url"


def test_a_field_called_like_ours_takes_no_place(tmp_path: Path) -> None:
    records = [{"text": TEXTS[0], "file": "x", "record": 9}, {"text": TEXTS[1], "file": "x"}]
    (tmp_path / "raw.jsonl").write_text("\n".join(map(json.dumps, records)))
    sources = [{"name": "s", "files": str(tmp_path / "raw.jsonl")}]
    dataset = build(settings(tmp_path, tmp_path / "out", sources=sources, dedup={"field": "file"}), quiet=True)
    [(file, record, kept_file, kept_record, reason)] = removed(dataset)
    assert (file, kept_file, reason, {record, kept_record}) == ("raw.jsonl", "raw.jsonl", "field", {1, 2})


def test_the_keepers_order_is_that_of_plain_tuples(tmp_path: Path) -> None:
    """Of all documents and of some; with texts of one length, and equal ones."""
    texts = ["b" * 30, "a" * 30, "a" * 30, "longer than " * 9, "", "ä" * 15, "x"]
    parts = []
    for number, source in enumerate(("rest", "best", "rest")):
        with write_part(tmp_path / str(number)) as writer:
            for record, text in enumerate(texts, start=1):
                writer.add(Document(document_id(source, str(number), record), text, source, {"file": str(number), "record": record}))
        parts.append((source, Part(tmp_path / str(number))))
    store = DocumentStore(parts)

    assert store.texts_of([20, 3, 8, 3, 0]) == [texts[6], texts[3], texts[1], texts[3], texts[0]] and store.texts_of([]) == []

    def worth(number: int) -> tuple[int, int, bytes, str]:
        part, inside = store.find(number)
        (text,) = store.texts_of([number])
        return ["best", "rest"].index(store.source(part)), -len(text.encode()), content_key(text), store.parts[part].id(inside)

    assert keepers_of(store, ["best", "rest"]).tolist() == sorted(range(store.num_documents), key=worth)
    some = np.array([0, 2, 3, 8, 9, 15, 16, 20])
    assert keepers_of(store, ["best", "rest"], among=some).tolist() == sorted(some.tolist(), key=worth)
