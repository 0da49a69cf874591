"""If this fails, a dataset folder is not what its config and its text say: documents lost, doubled, or mixed up."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.build import build
from data_pipeline.config import load_data_config
from data_pipeline.dataset import Dataset
from data_pipeline.errors import ConfigError, DataError
from data_pipeline.loader import RowSource
from data_pipeline.progress import Progress, duration, size
from data_pipeline.split import held_out
from data_pipeline.step import Ledger
from data_pipeline.verify import verify_dataset
from tests.corpus_fixtures import all_texts, config, digests, jsonl, long_texts, simple, texts_of


def test_what_is_stored_is_what_was_read_less_what_the_books_say(dataset: Dataset) -> None:
    """B025 of the whole pipeline: ends = documents, and the pieces between them are the texts, in order."""
    texts = long_texts(240, seed=0)
    expected = {"web": texts[3:180], "books": texts[180:190], "table": texts[190:]}  # the first three stand twice: either copy may stay
    for source in dataset.sources:
        held = [text for other in dataset.validation if other.name == source.name for text in texts_of(dataset, other)]
        stored = texts_of(dataset, source)
        assert not set(stored) & set(held)
        remaining = [text for text in expected[source.name] if text not in held]
        assert [text for text in stored if text in set(remaining)] == remaining
    web = next(source for source in dataset.sources if source.name == "web")
    extra = set(texts_of(dataset, web)) - set(texts) - {texts[1][:-10] + " changed at the end\n"}
    held = {text for source in dataset.validation for text in texts_of(dataset, source)}
    wanted = {
        "first, after a byte order mark",
        "lone \ufffd surrogate, which JSON can spell",
        "an end <|endoftext|> that is text, and CRLF\nhere",
        "last line, without a newline \u2028 and with a separator",
    }
    assert extra | held >= wanted and extra <= wanted


def test_the_ledger_balances_and_names_every_loss(dataset: Dataset) -> None:
    """B005, B011, B021 and B024 in one file: each bad line costs itself, and is counted."""
    ledger = Ledger.from_dict(dataset.manifest.ledger)
    ledger.balance(chain=["read", "normalise", "dedup", "encode"])
    read = ledger.tally("read", "web")
    assert {kind: count.documents for kind, count in read.errors.items()} == {
        "invalid_json": 1,
        "invalid_utf8": 1,
        "no_text_field": 1,
        "text_not_string": 1,
    }
    assert {reason: count.documents for reason, count in read.dropped.items()} == {"blank_line": 1, "empty": 1}
    assert read.notes == {"bom_stripped": 1, "surrogates_replaced": 1}
    assert any(place.endswith("d.jsonl:4") for place in read.examples["invalid_json"])
    dropped = ledger.tally("dedup", "web").dropped
    assert {reason: count.documents for reason, count in dropped.items()} == {"exact_duplicate": 3, "near_duplicate": 1}
    lines = [json.loads(line) for line in (dataset.path / "duplicates.jsonl").read_text().splitlines()]
    exact = [(line["removed"]["record"], line["kept"]["record"]) for line in lines if line["reason"] == "exact"]
    assert sorted(min(pair) for pair in exact) == [1, 2, 3]  # all of them are listed, with the copy that stayed
    assert len([line for line in lines if line["reason"] == "near"]) == 1
    stored = sum(source.num_documents for source in [*dataset.sources, *dataset.validation])
    assert stored == ledger.total("encode").written.documents == ledger.total("read").read.documents - 6 - 4
    assert sum(source.text_bytes for source in [*dataset.sources, *dataset.validation]) == ledger.total("encode").written.bytes


def test_the_folder_is_whole_and_verifies(dataset: Dataset) -> None:
    names = set(digests(dataset.path))
    assert {
        "manifest.json",
        "manifest.sha256",
        "tokenizer.json",
        "tokenizer_config.json",
        "token_bytes.npy",
        "duplicates.jsonl",
        "report.html",
    } <= names
    assert {
        "packing/web-S64-best_fit.plan",
        "packing/web.validation-S32-concat.plan",
        "shards/web-00000.bin",
        "shards/books-00000.bin",
    } <= names
    verify_dataset(dataset.path, quiet=True)
    rows = RowSource.open([(dataset, 1.0, None)], sequence_length=64, packing="best_fit", seed=0)
    assert sum(row.num_targets for row in rows) == sum(source.num_tokens for source in dataset.sources)
    assert sum(row.target_bytes for row in rows) == sum(source.text_bytes for source in dataset.sources)
    page = (dataset.path / "report.html").read_text()
    assert "exact duplicate" in page and "http" not in page.replace("https", "http").split("<h2>Samples")[0]


def test_verify_names_everything_that_is_wrong(corpus: Path, tmp_path: Path) -> None:
    folder = build(config(corpus, tmp_path / "data"), quiet=True).path
    shard, plan, table = folder / "shards/web-00000.bin", folder / "packing/web-S64-best_fit.plan", folder / "token_bytes.npy"
    for path in (shard, plan, table):
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.unlink()  # a link to the work folder's copy stays sound
        path.write_bytes(raw)
    (folder / "shards/table-00000.bin").unlink()
    with pytest.raises(DataError, match="things wrong") as caught:
        verify_dataset(folder, quiet=True)
    for name in ("web-00000.bin: block 0", "web-S64-best_fit.plan", "token_bytes.npy", "table-00000.bin: is missing"):
        assert name in str(caught.value)


def test_b024_text_with_nothing_to_keep_is_an_error_that_says_why(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no documents in the input: .*1 blank line.*2 empty"):
        build(simple(tmp_path, b'{"text": ""}\n\n{"text": "  "}\n'), quiet=True)
    with pytest.raises(DataError, match="no documents in the input: 2 no text field"):
        build(simple(tmp_path, b'{"body": "x"}\n{"body": "y"}\n'), quiet=True)
    assert not (tmp_path / "out").exists()
    built = build(simple(tmp_path, b'{"text": ""}\n{"text": "a"}\n{"text": ""}\n'), quiet=True)
    assert all_texts(built) == ["a"] and built.sources[0].num_tokens == 2


def test_strict_stops_at_the_first_bad_record(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"raw\.jsonl:2"):
        build(simple(tmp_path, b'{"text": "a"}\n{"text": \n', strict=True), quiet=True)


def test_b046_a_fraction_that_holds_out_nothing_is_refused_with_one_that_would(tmp_path: Path) -> None:
    texts = [
        f"{word} {n}" for n, word in enumerate(["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"])
    ]
    with pytest.raises(ConfigError, match=r"validation\.fraction.*would give about"):
        build(simple(tmp_path, texts, validation={"fraction": 1e-9}), quiet=True)
    with pytest.raises(ConfigError, match="only 1 document"):
        build(simple(tmp_path, texts[:1], validation={"fraction": 0.01}), quiet=True)
    with pytest.raises(ConfigError, match="leaves documents to train on"):
        build(simple(tmp_path, texts, validation={"fraction": 0.9999999}), quiet=True)
    built = build(simple(tmp_path, texts, validation={"fraction": 0.4}), quiet=True)
    train, held = (set(texts_of(built, sources[0])) for sources in (built.sources, built.validation))
    assert held and not train & held and train | held == set(texts)


def test_the_held_out_choice_stays_as_the_corpus_grows_and_changes_with_the_seed() -> None:
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 256, size=(20_000, 16), dtype=np.uint8)
    kept = np.ones(20_000, dtype=bool)
    whole = held_out(keys, kept, fraction=0.05, seed=1)
    assert abs(whole.mean() - 0.05) < 0.006
    np.testing.assert_array_equal(held_out(keys[:5000], kept[:5000], fraction=0.05, seed=1), whole[:5000])
    assert (whole <= held_out(keys, kept, fraction=0.1, seed=1)).all()
    assert (held_out(keys, kept, fraction=0.05, seed=2) & whole).mean() < 0.01


def test_order_of_sources_decides_which_copy_stays(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_bytes(jsonl(["the same text", f"only in {name}"]))
    for first, second in (("a", "b"), ("b", "a")):
        sources = [{"name": name, "files": str(tmp_path / f"{name}.jsonl")} for name in (first, second)]
        built = build(simple(tmp_path, [], sources=sources, output=tmp_path / first), quiet=True)
        assert texts_of(built, built.sources[0]) == ["the same text", f"only in {first}"]
        assert texts_of(built, built.sources[1]) == [f"only in {second}"]


def test_a_file_in_two_sources_is_refused(tmp_path: Path) -> None:
    sources = [{"name": name, "files": str(tmp_path / "*.jsonl")} for name in ("a", "b")]
    with pytest.raises(ConfigError, match="each file in one source"):
        build(simple(tmp_path, ["x"], sources=sources), quiet=True)


def test_a_local_hugging_face_dataset_is_a_source(tmp_path: Path) -> None:
    folder = tmp_path / "hub"
    folder.mkdir()
    (folder / "train.jsonl").write_bytes(jsonl(["from a dataset", "and another"]))
    built = build(simple(tmp_path, [], sources=[{"name": "hf", "dataset": str(folder)}]), quiet=True)
    assert all_texts(built) == ["from a dataset", "and another"]
    (folder / "train.jsonl").write_bytes(jsonl(["changed"]))
    assert all_texts(build(simple(tmp_path, [], sources=[{"name": "hf", "dataset": str(folder)}]), quiet=True, replace=True)) == ["changed"]


def test_a_pretrained_tokenizer_is_taken_as_it_is(corpus: Path, dataset: Dataset, tmp_path: Path) -> None:
    """B007: the same ids and the same hash as the dataset that it came from, so that the two can be mixed."""
    settings = config(corpus, tmp_path / "data", tokenizer={"type": "pretrained", "name_or_path": str(dataset.path)})
    built = build(settings, quiet=True)
    assert built.tokenizer_hash == dataset.tokenizer_hash and built.vocabulary == dataset.vocabulary
    for ours, theirs in zip(built.sources, dataset.sources):
        assert all((a.document(n) == b.document(n)).all() for a, b in zip(ours.shards, theirs.shards) for n in range(a.num_documents))


def test_shards_are_cut_by_text_alone(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_pipeline.sharding.MIN_SHARD_BYTES", 40_000)
    monkeypatch.setattr("data_pipeline.ingest.PART_BYTES", 30_000)
    built = build(config(corpus, tmp_path / "data"), quiet=True)
    web = built.sources[0]
    assert len(web.shards) > 3 and len(list((tmp_path / "data.work" / "documents").glob("*.documents"))) > 4
    verify_dataset(built.path, quiet=True)
    texts = all_texts(built)
    assert len(texts) == len(set(texts))


def test_the_config_says_everything_that_is_wrong_at_once(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "output: ''\nsources: [{name: 'a b', file: x}, {name: c}]\ntokenizer: {type: bytes, vocab_size: 300}\nvalidation: {fraction: 1.5}\nworkers: 0\ndedub: {}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_data_config(path)
    text = str(caught.value)
    for part in (
        "output:",
        "sources.0.name",
        "did you mean sources.0.files?",
        "sources.1",
        "no vocab_size for a tokenizer of type bytes",
        "validation.fraction",
        "workers",
        "did you mean dedup?",
    ):
        assert part in text, text


def test_progress_is_plain_lines_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    progress = Progress(stream=stream, line_every_s=0.0)
    with progress.stage("read", 4_000_000) as advance:
        advance(1_000_000)
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("read: 25 % (1.0 MB of 4.0 MB, ") and lines[0].endswith(" left)")
    assert lines[-1].startswith("read: 4.0 MB in 0:00")
    quiet = io.StringIO()
    with Progress(quiet=True, stream=quiet).stage("read", 5) as advance:
        advance(5)
    assert quiet.getvalue() == ""
    assert [size(n) for n in (999, 1000, 2_500_000, 3e12)] == ["999 B", "1.0 kB", "2.5 MB", "3.0 TB"]
    assert [duration(s) for s in (5, 75, 4000)] == ["0:05", "1:15", "1:06:40"]


def test_the_summary_says_what_was_dropped_and_where_things_are(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build(config(corpus, tmp_path / "data", tokenizer={"type": "bpe", "vocab_size": 50_000}))
    said = capsys.readouterr().err
    for part in (
        "is ready after",
        "invalid json",
        "d.jsonl:4",
        "exact duplicate",
        "bytes a token",
        "50,000 were asked for",
        "% padding",
        "report.html",
        "safe to delete",
    ):
        assert part in said, said
