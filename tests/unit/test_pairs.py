"""If these fail, an encoder-decoder is trained on sentences that don't belong together, or pairs are lost without a count."""

from __future__ import annotations

import gzip
import json
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_pipeline.build import build, build_portion
from data_pipeline.config import DataConfig
from data_pipeline.dataset import Dataset
from data_pipeline.document import Document, document_id
from data_pipeline.errors import ConfigError, DataError
from data_pipeline.loader import RowSource
from data_pipeline.notebook import open_dataset
from data_pipeline.pair_loader import NO_TARGET, PairRowSource, Prefetcher, batch_id
from data_pipeline.pair_packing import plan_pair_rows
from data_pipeline.portion import Portion
from data_pipeline.read import ReadOptions
from data_pipeline.read_pairs import read_fields
from data_pipeline.schema import validate
from data_pipeline.show import show_dataset, show_pair_rows
from data_pipeline.step import Ledger
from data_pipeline.tokenizer.encode import Encoder
from data_pipeline.trace import find_document, samples_of, trace_pairs
from data_pipeline.trace_input import trace_input
from data_pipeline.verify import verify_dataset
from launcher.mixture import mixture_lines
from tests.corpus_fixtures import digests
from tests.data_fixtures import WORDS

LENGTHS = {"source_length": 48, "target_length": 64}
Pair = tuple[str, str]


def sentences(num_pairs: int, *, seed: int = 0, most: int = 9) -> list[Pair]:
    rng = np.random.default_rng(seed)
    german = [word[::-1] + "ü" for word in WORDS]
    chosen = [rng.integers(len(WORDS), size=int(rng.integers(1, most))) for _ in range(num_pairs)]
    return [(f"{n} " + " ".join(WORDS[w] for w in words), f"{n} " + " ".join(german[w] for w in words)) for n, words in enumerate(chosen)]


def write_files(folder: Path, pairs: list[Pair]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.en").write_bytes(b"".join(one.encode() + b"\n" for one, _ in pairs))
    (folder / "train.de.gz").write_bytes(gzip.compress(b"".join(other.encode() + b"\n" for _, other in pairs), mtime=0))


def pair_config(folder: Path, output: Path, **more: Any) -> DataConfig:
    tree: dict[str, Any] = {
        "output": str(output),
        "sources": [{"name": "files", "files": str(folder / "train.en"), "target_files": str(folder / "train.de.gz")}],
        "dedup": {"minhash": None},
        "tokenizer": {"vocab_size": 320},
        "validation": {"fraction": 0.1},
        "packing": [LENGTHS],
        "workers": 1,
    }
    return validate(DataConfig, {**tree, **more})


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train.en and train.de.gz: 120 pairs, two copies, and lines of every kind of trouble; fields.jsonl: 40 pairs and more trouble."""
    folder = tmp_path_factory.mktemp("pairs")
    pairs = sentences(120)
    one = [side.encode() for side, _ in pairs] + [
        pairs[3][0].encode(),
        b"",
        b"alone",
        b"  ",
        b"bad \xff",
        b"nfd e\xcc\x81 \xe2\x80\xa8 here\r",
    ]
    other = [side.encode() for _, side in pairs] + [pairs[3][1].encode(), b"", b"", b"allein", b"gut", "zerlegt u\u0308".encode()]
    one += [pairs[5][0].encode(), b"long " * 90]  # the same source with another target is no copy
    other += [b"etwas anderes", b"lang"]
    (folder / "train.en").write_bytes(b"\xef\xbb\xbf" + b"\n".join(one))
    (folder / "train.de.gz").write_bytes(gzip.compress(b"\n".join(other) + b"\n", mtime=0))
    lines = [json.dumps({"translation": {"en": a, "de": b}}).encode() for a, b in sentences(40, seed=1)]
    lines += [b'{"translation": {"en": "no target"}}', b'{"translation": {"en": "a", "de": 7}}', b'{"translation": "x"}', b"[]", b"{", b""]
    lines += [b'{"translation": {"en": "two\\nlines", "de": "zwei\\nZeilen"}}', b'{"translation": {"en": "", "de": "leer"}}']
    (folder / "fields.jsonl").write_bytes(b"\n".join(lines))
    return folder


def both(raw: Path, output: Path, **more: Any) -> DataConfig:
    files = {"name": "files", "files": str(raw / "train.en"), "target_files": str(raw / "train.de.gz")}
    fields = {"name": "fields", "files": str(raw / "fields.jsonl"), "source_field": "translation.en", "target_field": "translation.de"}
    return pair_config(raw, output, sources=[files, fields], **more)


@pytest.fixture(scope="module")
def dataset(raw: Path, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return build(both(raw, tmp_path_factory.mktemp("out") / "data"), quiet=True)


def stored_pairs(dataset: Dataset) -> dict[str, Pair]:
    encoder = Encoder.open(dataset.tokenizer_path)
    out: dict[str, Pair] = {}
    for source in [*dataset.sources, *dataset.validation]:
        for number in range(source.num_documents):
            shard, inside = source.find(number)
            one, other = shard.sides(inside)
            assert one[-1] == other[-1] == dataset.eod_id
            out[shard.document_id(inside)] = (encoder.decode(one[:-1].tolist()), encoder.decode(other[:-1].tolist()))
    return out


def test_every_pair_is_stored_as_it_was_or_counted(raw: Path, dataset: Dataset) -> None:
    """Round trip: what is decoded from the shards is the normalised text of both sides, under an id made of where it stood."""
    nfc = unicodedata.normalize("NFC", "nfd e\u0301 \u2028 here")
    expected = {document_id("files", "train.en", n): pair for n, pair in enumerate(sentences(120), start=1)}
    more = {126: (nfc, "zerlegt ü"), 127: (sentences(120)[5][0], "etwas anderes"), 128: ("long " * 90, "lang")}
    expected |= {document_id("files", "train.en", n): pair for n, pair in more.items()}
    expected |= {document_id("fields", "fields.jsonl", n): pair for n, pair in enumerate(sentences(40, seed=1), start=1)}
    expected[document_id("fields", "fields.jsonl", 47)] = ("two\nlines", "zwei\nZeilen")
    copies = {document_id("files", "train.en", 4), document_id("files", "train.en", 121)}
    stored = stored_pairs(dataset)
    assert len(set(stored) & copies) == 1  # either may stay
    assert {id: pair for id, pair in stored.items() if id not in copies} == {id: pair for id, pair in expected.items() if id not in copies}
    ledger = Ledger.from_dict(dataset.manifest.ledger)
    ledger.balance(chain=list(ledger.stages))
    files, fields = ledger.tally("read", "files"), ledger.tally("read", "fields")
    assert {kind: count.documents for kind, count in files.errors.items()} == {
        "source_empty": 1,
        "target_empty": 1,
        "source_invalid_utf8": 1,
    }
    assert {kind: count.documents for kind, count in fields.errors.items()} == {
        "target_no_field": 1,
        "target_not_string": 1,
        "source_no_field": 1,
        "not_an_object": 1,
        "invalid_json": 1,
        "source_empty": 1,
    }
    assert files.dropped["blank_line"].documents == fields.dropped["blank_line"].documents == 1 and files.notes["bom_stripped"] == 1
    assert files.examples["target_empty"][0].endswith("train.de.gz:123") and ledger.total("dedup").dropped["exact_duplicate"].documents == 1
    verify_dataset(dataset.path, quiet=True)


def test_rows_hold_every_pair_that_fits_once_with_its_partner(dataset: Dataset) -> None:
    rows = PairRowSource.open([(dataset, 1.0, None)], **LENGTHS, seed=7)
    pairs = Counter[tuple[tuple[int, ...], tuple[int, ...]]]()
    for row in rows:
        assert row.source.size == 48 and row.targets.size == row.inputs.size == 64
        assert row.num_source_tokens == (row.source_segments < row.num_pairs).sum()
        assert row.num_targets == (row.targets != NO_TARGET).sum()
        for k in range(row.num_pairs):
            source, target = row.source[row.source_segments == k], row.targets[row.target_segments == k]
            shifted = row.inputs[row.target_segments == k]
            assert shifted[0] == dataset.eod_id and (shifted[1:] == target[:-1]).all()
            assert (row.source_positions[row.source_segments == k] == np.arange(source.size)).all()
            assert (row.target_positions[row.target_segments == k] == np.arange(target.size)).all()
            pairs[tuple(source.tolist()), tuple(target.tolist())] += 1
    wanted = Counter[tuple[tuple[int, ...], tuple[int, ...]]]()
    too_long = 0
    for source in dataset.sources:
        for number in range(source.num_documents):
            shard, inside = source.find(number)
            one, other = shard.sides(inside)
            if one.size > 48 or other.size > 64:
                assert rows.why_left_out(source, number) == "source_too_long"
                too_long += 1
            else:
                assert rows.why_left_out(source, number) is None
                wanted[tuple(one.tolist()), tuple(other.tolist())] += 1
    assert pairs == wanted and too_long == 1
    assert rows.left_out == [{"source_too_long": 1, "target_too_long": 0, "both_too_long": 0}]
    assert max(pairs.values()) == 1 and sum(row.target_bytes for row in rows) > 0
    assert sum(row.num_pairs for row in rows) > 3 * len(rows)
    (line,) = mixture_lines([{"path": "data/x", "samples": 4, "epochs": 1.0, "left_out": rows.left_out[0]}])
    assert line.endswith("1.00 epochs by the end; left out: 1 source too long")
    held_out = PairRowSource.open([(dataset, 1.0, None)], **LENGTHS, seed=1, split="validation")
    assert not list(samples_of(held_out, split="validation", source="none", document=0, num_samples=len(held_out) + 9))


def test_batches_are_the_same_on_any_number_of_ranks_and_after_any_resume(dataset: Dataset) -> None:
    """Rank r of n reads its share of each global batch from a source that it opened itself; the digests in order name the batch."""

    def ids(num_ranks: int, *, first_step: int = 0) -> list[str]:
        opened = [PairRowSource.open([(dataset, 1.0, None)], **LENGTHS, seed=7) for _ in range(num_ranks)]
        batches = [range(12 * step, 12 * (step + 1)) for step in range(first_step, 6)]
        share = 12 // num_ranks
        per_rank = []
        for rank, rows in enumerate(opened):
            with Prefetcher(rows, [batch[rank * share : (rank + 1) * share] for batch in batches]) as read:
                per_rank.append([[row.digest() for row in mine] for mine in read])
        return [batch_id([digest for rank in per_rank for digest in rank[step]]) for step in range(len(batches))]

    expected = ids(1)
    assert all(ids(num_ranks) == expected for num_ranks in (2, 3, 4)) and len(set(expected)) == 6
    assert ids(2, first_step=4) == expected[4:]
    other = PairRowSource.open([(dataset, 1.0, None)], **LENGTHS, seed=8)
    assert batch_id([other[sample].digest() for sample in range(12)]) != expected[0]


def test_the_result_does_not_depend_on_workers_and_decoders_are_refused(raw: Path, dataset: Dataset, tmp_path: Path) -> None:
    again = build(both(raw, tmp_path / "data", workers=2), quiet=True)
    assert digests(again.path) == digests(dataset.path)
    with pytest.raises(DataError, match="has aligned pairs, and these rows are made of documents"):
        RowSource.open([(dataset, 1.0, None)], sequence_length=32, packing="best_fit", seed=0)
    heldout = PairRowSource.open([(dataset, 1.0, None)], **LENGTHS, seed=0, split="validation")
    assert sum(row.num_pairs for row in heldout) == sum(source.num_documents for source in dataset.validation) > 5


@pytest.mark.parametrize("short", ["train.en", "train.de.gz"])
def test_files_that_are_not_aligned_are_refused_with_both_counts(tmp_path: Path, short: str) -> None:
    pairs = sentences(50)
    write_files(tmp_path, pairs)
    whole = {"train.en": (tmp_path / "train.en").read_bytes(), "train.de.gz": (tmp_path / "train.de.gz").read_bytes()}
    write_files(tmp_path, pairs[:37])
    kept = "train.de.gz" if short == "train.en" else "train.en"
    (tmp_path / kept).write_bytes(whole[kept])
    with pytest.raises(DataError, match=rf"{short} has 37 ") as caught:
        build(pair_config(tmp_path, tmp_path / "out"), quiet=True)
    assert f"{kept} has 50 " in str(caught.value)
    (tmp_path / "train.de.gz").write_bytes(whole["train.de.gz"][:-30])
    with pytest.raises(DataError, match=r"train\.de\.gz: is truncated at line \d+"):
        build(pair_config(tmp_path, tmp_path / "out"), quiet=True)
    with pytest.raises(ConfigError, match="as many as files, 1"):
        sources = [{"name": "x", "files": str(tmp_path / "train.en"), "target_files": str(tmp_path / "train.*")}]
        build(pair_config(tmp_path, tmp_path / "out", sources=sources), quiet=True)


def test_a_pair_goes_where_a_filter_drops_either_side(tmp_path: Path) -> None:
    write_files(
        tmp_path, [("one two three four", "eins"), ("one", "eins zwei drei vier"), ("five six seven eight", "fünf sechs sieben acht")]
    )
    filters = {"gopher_quality": {"min_words": 3, "min_stop_words": 0, "min_mean_word_length": 1.0}, "write_dropped": True, "pii": {}}
    dataset = build(pair_config(tmp_path, tmp_path / "out", filters=filters, validation={"fraction": 0.0}), quiet=True)
    assert list(stored_pairs(dataset).values()) == [("five six seven eight", "fünf sechs sieben acht")]
    dropped = Ledger.from_dict(dataset.manifest.ledger).total("filters").dropped
    assert {reason: count.documents for reason, count in dropped.items()} == {"target_quality_few_words": 1, "source_quality_few_words": 1}
    (found,) = trace_input([dataset], "train.de.gz", 2)
    assert (found["outcome"], found["reason"]) == ("dropped", "quality_few_words")


@pytest.mark.parametrize("window", [1 << 20, 500])
def test_packing_fills_rows_to_near_what_is_possible(window: int) -> None:
    rng = np.random.default_rng(0)
    source = rng.integers(2, 40, size=4000)
    target = np.maximum(2, (source * rng.normal(1.2, 0.25, size=4000)).astype(np.int64))
    rows = list(plan_pair_rows(source, target, source_length=128, target_length=150, key="k", window_pairs=window))
    pairs = np.concatenate([some.pairs for some in rows])
    starts = np.cumsum(np.concatenate([[0], *(some.pairs_per_row for some in rows)]))
    assert sorted(pairs.tolist()) == list(range(4000))
    assert np.add.reduceat(source[pairs], starts[:-1]).max() <= 128 and np.add.reduceat(target[pairs], starts[:-1]).max() <= 150
    least = max(source.sum() / 128, target.sum() / 150)
    assert starts.size - 1 <= 1.06 * least
    again = list(plan_pair_rows(source, target, source_length=128, target_length=150, key="k", window_pairs=window))
    assert all((a.pairs == b.pairs).all() for a, b in zip(rows, again))


def test_pairs_can_be_traced_and_looked_at(dataset: Dataset, capsys: pytest.CaptureFixture[str]) -> None:
    rows = PairRowSource.open([(dataset, 1.0, None)], **LENGTHS, seed=7)
    origin = next(origin for sample in range(9) for origin in trace_pairs(rows, sample) if origin.source == "files")
    row = rows[origin.sample]
    encoder = Encoder.open(dataset.tokenizer_path)
    span = row.targets[origin.target_start : origin.target_start + origin.target_tokens - 1]
    assert encoder.decode(span.tolist()) == origin.target_text and origin.file == "train.en + train.de.gz"
    for file in ("train.en", "raw/train.de.gz"):
        assert trace_input([dataset], file, origin.record)[0]["document"] == origin.document
    split, source, number = find_document(dataset, origin.document)
    assert list(samples_of(rows, split=split, source=source, document=number, num_samples=len(rows))) == [origin.sample]
    assert open_dataset(dataset.path).documents[origin.document].text == f"{origin.source_text}\n{origin.target_text}"
    show_pair_rows(dataset.path, number=origin.sample + 1, **LENGTHS, seed=7, tokens=False)
    show_dataset(dataset.path, number=1, tokens=False)
    shown = capsys.readouterr().out
    assert f"{origin.source_text}\n{origin.target_text}\n" in shown and "rows of" not in shown.split("=== sample")[0]
    report = (dataset.path / "report.html").read_text()
    assert "tokens of the target side" in report and "left out: source too long" in report


def test_configs_say_what_pairs_are() -> None:
    source = {"name": "a", "files": "x.en", "target_files": "x.de"}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"sources": [source, {"name": "b", "files": "y.txt"}]}, "all pairs, or none"),
        ({"packing": [{"sequence_length": 8}]}, "source_length and target_length"),
        ({"packing": [{"source_length": 8}]}, "target_length together"),
        ({"dedup": {"substring": {}}}, "dedup.substring for pairs"),
        ({"sources": [{**source, "txt_documents": "line"}]}, "txt_documents for pairs"),
        ({"sources": [{"name": "a", "files": "x.jsonl", "source_field": "en"}]}, "target_field together"),
    ]
    for change, said in wrong:
        with pytest.raises(ConfigError, match=said):
            validate(DataConfig, {"output": "o", "sources": [source], **change})
    plain = validate(DataConfig, {"output": "o", "sources": [{"name": "b", "files": "y.txt"}]}).content()["sources"][0]
    assert not {"target_files", "source_field", "target_field"} & set(plain)  # older datasets keep their keys


@pytest.mark.parametrize("pairs_first", [False, True])
def test_the_same_files_as_documents_and_as_pairs_are_two_things(tmp_path: Path, pairs_first: bool) -> None:
    """In one work folder: what was read as the one is never taken for the other."""
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("".join(f"{name} {line}\n" for line in range(3)))
    a, b = str(tmp_path / "a.txt"), str(tmp_path / "b.txt")
    kinds = {False: {"files": [a, b]}, True: {"files": a, "target_files": b}}
    plain = {"tokenizer": {"type": "bytes"}, "validation": {"fraction": 0.0}, "packing": []}
    for is_pairs in (pairs_first, not pairs_first):
        config = pair_config(tmp_path, tmp_path / "data", sources=[{"name": "x", **kinds[is_pairs]}], **plain)
        (source,) = build(config, quiet=True, replace=True).sources
        assert (source.pairs, source.num_documents) == (is_pairs, 3 if is_pairs else 2)


def test_the_fields_of_a_pair_are_text_whatever_the_format(tmp_path: Path) -> None:
    """Dedup compares by a field: what parquet has as bytes must be what jsonl has."""
    records = [{"en": f"one {n}", "de": f"eins {n // 2}"} for n in range(6)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet")
    found = []
    for path in ("a.jsonl", "a.parquet"):
        options = ReadOptions(text_field="en", fields=["de"])
        documents = list(read_fields(str(tmp_path / path), ("en", "de"), options, source="x", name="a"))
        found.append([document.meta["fields"] for document in documents if isinstance(document, Document)])
    assert found[0] == found[1] == [{"de": record["de"]} for record in records]


def test_a_line_end_inside_a_side_makes_no_copy(tmp_path: Path) -> None:
    """Two pairs whose sides join to one text both stay, here, where signatures are made before, and beside an earlier dataset."""
    cut = [("a\nb", "c"), ("a", "b\nc")]

    def settings(name: str, pairs: list[Pair], dedup: dict[str, Any]) -> DataConfig:
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"s": one, "t": other}) + "\n" for one, other in pairs))
        source = {"name": "x", "files": str(tmp_path / f"{name}.jsonl"), "source_field": "s", "target_field": "t"}
        plain = {"tokenizer": {"type": "bytes"}, "validation": {"fraction": 0.0}, "packing": []}
        return pair_config(tmp_path, tmp_path / name, sources=[source], dedup=dedup, **plain)

    config = settings("first", [*cut, cut[0]], {})
    build_portion(config, "read", Portion(0, 1), quiet=True)
    for of_signatures in (config, settings("exact", [*cut, cut[1]], {"minhash": None})):
        assert sorted(stored_pairs(build(of_signatures, quiet=True)).values()) == sorted(cut)
    build(settings("before", [cut[0]], {}), quiet=True)
    after = build(settings("after", [*cut, ("a", "b")], {"earlier": [str(tmp_path / "before")]}), quiet=True)
    assert sorted(stored_pairs(after).values()) == [("a", "b"), cut[1]]
