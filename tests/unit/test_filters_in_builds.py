"""If this fails, what filters dropped is not in the books, or a build keeps what another one would drop."""

from __future__ import annotations

import datetime
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from data_pipeline.build import build
from data_pipeline.config import DataConfig
from data_pipeline.document import Document
from data_pipeline.errors import ConfigError, DataError
from data_pipeline.read import ReadOptions, read_file
from data_pipeline.schema import validate
from data_pipeline.step import Ledger
from tests.cleaning_texts import GOOD
from tests.corpus_fixtures import config as corpus_config
from tests.corpus_fixtures import digests, jsonl, write_corpus


def filtered(tmp_path: Path, filters: dict[str, Any] | None, **more: Any) -> DataConfig:
    """A config over tmp_path/raw.jsonl with these filters, bytes tokenizer, nothing held out."""
    more = {"sources": [{"name": "web", "files": str(tmp_path / "raw.jsonl")}], **more}
    return corpus_config(
        tmp_path, tmp_path / "out", filters=filters, tokenizer={"type": "bytes"}, validation={"fraction": 0.0}, packing=[], **more
    )


def test_every_drop_is_counted_and_written_out_with_its_reason(tmp_path: Path) -> None:
    records = [
        {"text": GOOD, "url": "https://good.example/"},
        {"text": GOOD + "\nTwo words\n", "url": "https://bad.example/x"},
        {"text": "short"},
        {"text": GOOD.replace(".", ".\nuse cookies, please\n", 1), "url": 7},
    ]
    (tmp_path / "raw.jsonl").write_text("\n".join(json.dumps(record) for record in records))
    filters = {"url": {"block": ["bad.example"]}, "gopher_quality": {}, "c4": {}, "write_dropped": True}
    dataset = build(filtered(tmp_path, filters), quiet=True)
    ledger = Ledger.from_dict(dataset.manifest.ledger)
    ledger.balance(chain=["read", "normalise", "filters", "dedup", "encode"])
    tally = ledger.tally("filters", "web")
    assert {name: count.documents for name, count in tally.dropped.items()} == {"quality_few_words": 1, "url_host": 1}
    assert tally.notes == {"lines_cut": 1} and tally.written.bytes == 2 * len(GOOD)
    raw = zstandard.ZstdDecompressor().stream_reader((dataset.path / "dropped" / "web-00000.jsonl.zst").read_bytes()).read()
    dropped = [json.loads(line) for line in raw.splitlines()]
    assert [(line["record"], line["reason"], line["text"]) for line in dropped] == [
        (2, "url_host", records[1]["text"]),
        (3, "quality_few_words", "short"),
    ]
    assert dropped[0]["fields"] == {"url": "https://bad.example/x"} and dropped[0]["source"] == "web"


def test_fields_that_json_or_utf8_has_no_spelling_for_are_written_so_that_anyone_can_read_them(tmp_path: Path) -> None:
    """A lone surrogate in an address, and a date from parquet."""
    address = "https://bad.example/\ud800/Grüße"
    (tmp_path / "raw.jsonl").write_text(json.dumps({"text": "Größe: " + GOOD, "url": address}) + "\n" + json.dumps({"text": GOOD}))
    table = pyarrow.table({"text": ["short"], "url": [datetime.date(2024, 2, 29)]})
    pyarrow.parquet.write_table(table, tmp_path / "raw.parquet")
    filters = {"url": {"block": ["bad.example"]}, "gopher_quality": {}, "write_dropped": True}
    dataset = build(filtered(tmp_path, filters, sources=[{"name": "web", "files": str(tmp_path / "raw.*")}]), quiet=True)
    path = dataset.path / "dropped" / "web-00000.jsonl.zst"
    raw = zstandard.ZstdDecompressor().stream_reader(path.read_bytes()).read()
    first, second = raw.decode("utf-8").splitlines()
    assert json.loads(first)["fields"] == {"url": address} and "\\ud800/Grüße" in first and "Größe" in first
    assert json.loads(second)["fields"] == {"url": "2024-02-29"}
    again = [each.text for each in read_file(str(path), ReadOptions(format="jsonl"), source="dropped") if isinstance(each, Document)]
    assert again == ["Größe: " + GOOD, "short"]


def test_the_result_does_not_depend_on_the_workers_and_another_threshold_is_another_dataset(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    filters = {"gopher_quality": {"min_words": 60}, "pii": {}, "ratios": {}, "write_dropped": True}
    for workers in (1, 2):
        build(corpus_config(corpus, tmp_path / f"out{workers}", filters=filters, workers=workers), quiet=True)
    first, second = digests(tmp_path / "out1"), digests(tmp_path / "out2")
    assert {name for name in first if first[name] != second.get(name)} <= {"report.html", "report.json"}
    other = {**filters, "gopher_quality": {"min_words": 61}}
    with pytest.raises(ConfigError, match="another config"):
        build(corpus_config(corpus, tmp_path / "out1", filters=other), quiet=True)


def test_a_changed_block_list_is_another_dataset(tmp_path: Path) -> None:
    (tmp_path / "raw.jsonl").write_text(json.dumps({"text": GOOD, "url": "https://a.example"}) + "\n" + json.dumps({"text": GOOD + "!"}))
    listed = tmp_path / "hosts.txt"
    listed.write_text("b.example\n")
    config = filtered(tmp_path, {"url": {"blocklists": [str(listed)]}})
    build(config, quiet=True)
    listed.write_text("a.example\n")
    with pytest.raises(ConfigError, match="another config, or other input files"):
        build(config, quiet=True)
    listed.unlink()
    with pytest.raises(DataError, match=r"hosts.txt does not exist"):
        build(config, quiet=True)


def test_without_filters_the_config_of_a_dataset_says_nothing_of_them(tmp_path: Path) -> None:
    """A dataset that was built before there were filters keeps its key."""
    assert "filters" not in filtered(tmp_path, None).content()
    assert "filters" in filtered(tmp_path, {}).content()


def test_a_dataset_from_before_there_were_filters_is_still_up_to_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key as the version before filters made it; and the manifest, which names the checksums of shards since."""
    monkeypatch.chdir(tmp_path)
    Path("raw.jsonl").write_bytes(jsonl([GOOD, "short", GOOD]))
    tree = {
        "output": "out",
        "sources": [{"name": "web", "files": "raw.jsonl"}],
        "tokenizer": {"type": "bytes"},
        "validation": {"fraction": 0.0},
    }
    dataset = build(validate(DataConfig, tree), quiet=True)
    assert dataset.manifest.config["build_key"] == "731fd0564102cdce17a5e5984f24e6a5"
    assert digests(tmp_path / "out")["manifest.json"] == "22c50682ad8f6ec59c149824aa4327500ad8c5a6f9b6d9ad285f37bbd9661210"


def test_a_read_that_was_killed_is_done_again_to_the_same_bytes(tmp_path: Path) -> None:
    """Killed between its dropped documents and the file that says it is done: both are written anew, neither twice."""
    corpus = write_corpus(tmp_path / "corpus")
    settings = corpus_config(corpus, tmp_path / "out", filters={"gopher_quality": {}, "write_dropped": True}, dedup={"field": "url"})
    build(settings, quiet=True)
    wanted = digests(tmp_path / "out")
    assert len(list((tmp_path / "out" / "dropped").glob("*.jsonl.zst"))) == 3
    for path in [*(tmp_path / "out.work" / "documents").glob("*.json"), *(tmp_path / "out.work" / "documents").glob("*.documents")][::2]:
        path.unlink()
    for path in (tmp_path / "out.work" / "documents").glob("*.json"):
        if not list(path.parent.glob(f"{path.stem}*.documents")):
            path.unlink()
    shutil.rmtree(tmp_path / "out")
    build(settings, quiet=True)
    assert digests(tmp_path / "out") == wanted


def test_b019_in_the_books(tmp_path: Path) -> None:
    """B019: blank documents are dropped as empty before any filter, and nothing in the books is NaN."""
    (tmp_path / "raw.jsonl").write_bytes(jsonl(["", "\n\n", "   ", "!!!", GOOD]))
    dataset = build(filtered(tmp_path, {"gopher_quality": {}}), quiet=True)
    ledger = Ledger.from_dict(dataset.manifest.ledger)
    assert {name: count.documents for name, count in ledger.total("read").dropped.items()} == {"empty": 3}
    assert {name: count.documents for name, count in ledger.total("filters").dropped.items()} == {"quality_few_words": 1}
    assert "NaN" not in (dataset.path / "manifest.json").read_text()


def test_settings_that_cannot_be_meant_are_refused(tmp_path: Path) -> None:
    for filters, wanted in (
        ({"gopher_quality": {"min_word": 3}}, "did you mean .*min_words"),
        ({"url": {}}, "something to block"),
        ({"url": {"block": ["http://x.example/"]}}, "hosts such as example.com"),
        ({"gopher_repetition": {"max_top_ngram_chars": {2: 1.5}}}, "words .1 to 100.: share"),
        ({"language": {"keep": ["english"]}}, "ISO 639 codes"),
    ):
        with pytest.raises(ConfigError, match=wanted):
            validate(DataConfig, {"output": "x", "sources": [{"name": "a", "files": "b"}], "filters": filters})
    (tmp_path / "raw.jsonl").write_bytes(jsonl(["short"]))
    with pytest.raises(DataError, match=r"1 quality few words\. Loosen the filters"):
        build(filtered(tmp_path, {"gopher_quality": {}}), quiet=True)
