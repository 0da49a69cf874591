"""If this fails, good documents are dropped or bad ones kept: a rule no longer does what its paper says."""

from __future__ import annotations

import datetime
import json
import shutil
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from data_pipeline.build import build
from data_pipeline.config import DataConfig
from data_pipeline.document import Document
from data_pipeline.errors import ConfigError, DataError
from data_pipeline.filters.c4 import c4
from data_pipeline.filters.config import (
    C4Config,
    FiltersConfig,
    FineWebConfig,
    GopherQualityConfig,
    GopherRepetitionConfig,
    RatiosConfig,
    UrlConfig,
)
from data_pipeline.filters.fineweb import fineweb
from data_pipeline.filters.gopher import quality, repetition
from data_pipeline.filters.ratios import ratios
from data_pipeline.filters.segments import DIGIT, LETTER, SPACE, SYMBOL, Segments, class_table
from data_pipeline.filters.stage import Filters
from data_pipeline.filters.url import url
from data_pipeline.read import ReadOptions, read_file
from data_pipeline.schema import validate
from data_pipeline.step import Drop, Ledger
from data_pipeline.words import words
from tests.corpus_fixtures import config as corpus_config
from tests.corpus_fixtures import digests, jsonl, write_corpus

SENTENCES = [
    "The quick brown fox jumps over the lazy dog while its owner looks on with some amusement.",
    "It was to be expected that nobody would have an answer to a question of that kind.",
    "Rivers carry sand and stones to the sea, and the sea gives them back to other shores.",
    "We went out early in the morning, before the first trains left, and walked along the canal.",
    "Her letters from that year are kept in a wooden box with a lock that has long been broken.",
    "A good map shows less than there is, so that a reader finds what matters on it at once.",
]
GOOD = "\n".join(SENTENCES)
ALL = FiltersConfig(
    gopher_repetition=GopherRepetitionConfig(),
    gopher_quality=GopherQualityConfig(),
    c4=C4Config(),
    fineweb=FineWebConfig(),
    ratios=RatiosConfig(),
)


def outcome(text: str, config: FiltersConfig = ALL) -> str:
    """The reason, or "" where the document stays."""
    result = Filters(config).apply(Document("0" * 32, text, "s"))
    return result.reason if isinstance(result, Drop) else ""


def test_a_good_text_passes_every_filter_unchanged() -> None:
    document = Document("0" * 32, GOOD, "s")
    assert Filters(ALL).apply(document) is document and document.text == GOOD


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Too short to be of any use to anybody who wants to learn.", "few_words"),
        ("the and of to " * 30_000, "many_words"),
        ("a b c d to of " * 20, "short_words"),
        ("the of " + "incomprehensibilities " * 60, "long_words"),
        (GOOD + " #" * 20, "hashes"),
        (GOOD + " ..." * 20, "ellipses"),
        ("\n".join("- " + line for line in SENTENCES), "bullet_lines"),
        ("\n".join(line + "..." if n < 2 else line for n, line in enumerate(SENTENCES)), "ellipsis_lines"),
        (GOOD + " 12 345" * 20, "words_without_letter"),
        (" ".join(word for word in GOOD.split() if word.lower() not in GopherQualityConfig().stop_words), "stop_words"),
    ],
)
def test_gopher_quality(text: str, reason: str) -> None:
    assert quality(Segments(text), GopherQualityConfig()) == reason
    assert quality(Segments(GOOD), GopherQualityConfig()) is None


def test_each_threshold_of_gopher_quality_is_at_its_edge() -> None:
    """Exactly the threshold passes, one more does not."""
    text = "The map of sand. " * 25  # 100 words, mean length 3.25, 25 sentences
    assert Segments(text).num_words == 100
    for passes, fails in (
        ({"min_words": 100}, {"min_words": 101}),
        ({"max_words": 100}, {"max_words": 99}),
        ({"min_mean_word_length": 3.0}, {"min_mean_word_length": 3.01}),
        ({"max_mean_word_length": 3.0}, {"max_mean_word_length": 2.99}),
        ({"min_stop_words": 2}, {"min_stop_words": 3}),
        ({"min_words_with_letter": 1.0}, None),
    ):
        assert quality(Segments(text), GopherQualityConfig(**passes)) is None, passes
        assert fails is None or quality(Segments(text), GopherQualityConfig(**fails)) is not None, fails
    hashes = text + "#" * 10
    assert quality(Segments(hashes), GopherQualityConfig()) is None
    assert quality(Segments(hashes + "#"), GopherQualityConfig()) == "hashes"


def plain_repetition(text: str, n: int) -> tuple[int, int]:
    """(characters of the occurrences of the most common n-gram, characters in n-grams that stood before), word by word."""
    found = words(text)
    ngrams = [tuple(found[at : at + n]) for at in range(len(found) - n + 1)]
    counts = Counter(ngrams)
    most = max(counts.values(), default=0)
    top = max((len(" ".join(gram)) * most for gram, count in counts.items() if count == most), default=0) if most > 1 else 0
    repeated, at, seen_at = 0, 0, {gram: ngrams.index(gram) for gram in counts}
    while at < len(ngrams):
        if seen_at[ngrams[at]] < at:
            repeated += len("".join(ngrams[at]))
            at += n
        else:
            at += 1
    return top, repeated


def test_repetition_of_word_ngrams_is_what_counting_them_one_by_one_gives() -> None:
    """At 2,000 random texts of few words, the limits one below and at the plain count decide as they should."""
    rng = np.random.default_rng(0)
    for _ in range(2000):
        size = int(rng.integers(0, 40))
        text = " ".join(rng.choice(["a", "Bb", "ccc", "d-d", "ß"], size=size)) + "."
        n = int(rng.integers(1, 7))
        top, repeated = plain_repetition(text, n)
        loose = {"max_duplicate_lines": 1.0, "max_duplicate_paragraphs": 1.0, "max_top_ngram_chars": {}, "max_duplicate_ngram_chars": {}}
        for key, chars in (("max_top_ngram_chars", top), ("max_duplicate_ngram_chars", repeated)):
            if chars:
                passes, fails = min(1.0, (chars + 0.5) / len(text)), (chars - 0.5) / len(text)
                assert fails >= 1 or repetition(Segments(text), GopherRepetitionConfig(**{**loose, key: {n: fails}})) is not None
                assert passes == 1 or repetition(Segments(text), GopherRepetitionConfig(**{**loose, key: {n: passes}})) is None
            else:
                assert repetition(Segments(text), GopherRepetitionConfig(**{**loose, key: {n: 0.0}})) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("\n\n".join([GOOD, SENTENCES[0], SENTENCES[0], SENTENCES[0]]), "duplicate_paragraphs"),
        ("\n\n".join([GOOD, GOOD, SENTENCES[0], "x", "y", "z"]), "duplicate_paragraph_chars"),
        ("\n".join([GOOD, *["Share this"] * 6]), "duplicate_lines"),
        ("\n".join([GOOD, *SENTENCES[:1] * 4, *map(str, range(40))]), "duplicate_line_chars"),
        ("very good " * 30 + GOOD[:100], "top_2_gram"),
        (" ".join(SENTENCES[0].replace("fox", f"fox number {n}") for n in range(20)), "duplicate_5_grams"),
    ],
)
def test_gopher_repetition(text: str, reason: str) -> None:
    loose = GopherRepetitionConfig() if "top" in reason else GopherRepetitionConfig(max_top_ngram_chars={})
    assert repetition(Segments(text), loose) == reason
    assert repetition(Segments(GOOD), GopherRepetitionConfig()) is None


def test_b018_blank_lines_are_no_duplicates() -> None:
    """B018: ten different lines with two blank ones between them have no duplicate line, nor paragraph."""
    lines = [
        f"Line {name} says something else about {name}."
        for name in ["apple", "berry", "cedar", "dune", "elm", "fern", "grove", "heath", "ivy", "jasmine"]
    ]
    for gap in ("\n\n\n", "\n \n\t\n", "\n\n\n\n\n\n\n"):
        text = Segments(gap.join(lines))
        strict = GopherRepetitionConfig(
            max_duplicate_lines=0.0, max_duplicate_line_chars=0.0, max_duplicate_paragraphs=0.0, max_duplicate_paragraph_chars=0.0
        )
        assert repetition(text, strict.model_copy(update={"max_top_ngram_chars": {}})) is None
        assert len(text.lines) == len(text.paragraphs) == 10
        assert fineweb(text, FineWebConfig(max_duplicate_line_chars=0.0, max_newlines_per_word=10.0)) is None


@pytest.mark.parametrize("text", ["", "\n\n", "   ", "!!!", "...", "#", "\0", "\u2028", "{", "\ufeff", "-", "•", "a", "\n-\n", "\ud800"])
def test_b019_no_ratio_divides_by_zero(text: str) -> None:
    """B019: each filter alone, whatever its other limits, has an answer for texts without words, lines or characters."""
    segments = Segments(text)
    assert quality(segments, GopherQualityConfig(min_words=0)) in (None, "short_words", "hashes", "ellipses", "stop_words", "bullet_lines")
    assert repetition(segments, GopherRepetitionConfig()) is None
    assert c4(segments, C4Config()) in ("few_sentences", "curly_bracket")
    assert c4(segments, C4Config(min_sentences=0, drop_curly_bracket=False)) == "nothing_left"
    assert fineweb(segments, FineWebConfig()) in ("empty", "unpunctuated_lines", "short_lines", "newlines")
    assert ratios(segments, RatiosConfig()) in (None, "symbols", "white_space")
    assert outcome(text) == "quality_few_words"


def test_b019_in_the_books(tmp_path: Path) -> None:
    """B019: blank documents are dropped as empty before any filter, and nothing in the books is NaN."""
    (tmp_path / "raw.jsonl").write_bytes(jsonl(["", "\n\n", "   ", "!!!", GOOD]))
    dataset = build(filtered(tmp_path, {"gopher_quality": {}}), quiet=True)
    ledger = Ledger.from_dict(dataset.manifest.ledger)
    assert {name: count.documents for name, count in ledger.total("read").dropped.items()} == {"empty": 3}
    assert {name: count.documents for name, count in ledger.total("filters").dropped.items()} == {"quality_few_words": 1}
    assert "NaN" not in (dataset.path / "manifest.json").read_text()


def test_c4_lines_and_documents() -> None:
    lines = [
        *SENTENCES[:5],
        "Please enable JavaScript to see this page.",
        "Read our Privacy Policy and tell us what you think.",
        "two words",
        "x" * 1001 + " is a word of 1,001 characters.",
        "Without an end",
        "It was founded in 1901.[12] Nobody knows why.[citation needed]",
    ]
    kept = c4(Segments("\n".join(lines)), C4Config())
    assert isinstance(kept, Segments)
    assert kept.text.split("\n") == [*SENTENCES[:5], "Without an end", "It was founded in 1901. Nobody knows why."]
    strict = c4(Segments("\n".join(lines)), C4Config(terminal_punctuation=True))
    assert isinstance(strict, Segments) and strict.text.split("\n") == [*SENTENCES[:5], "It was founded in 1901. Nobody knows why."]
    assert c4(Segments(GOOD + "\nLorem Ipsum dolor."), C4Config()) == "lorem_ipsum"
    assert c4(Segments(GOOD + "\nif (x) {"), C4Config()) == "curly_bracket"
    assert isinstance(c4(Segments(GOOD + "\nif (x) {"), C4Config(drop_curly_bracket=False)), Segments)


@pytest.mark.parametrize(
    ("text", "sentences"), [("One. Two two. Three.", 3), ("Costs 3.50 and more", 1), ('He said "No." Then left', 2), ("好。是？", 2)]
)
def test_c4_counts_sentences(text: str, sentences: int) -> None:
    loose = {"min_words_per_line": 0}
    assert isinstance(c4(Segments(text), C4Config(min_sentences=sentences, **loose)), Segments)
    assert c4(Segments(text), C4Config(min_sentences=sentences + 1, **loose)) == "few_sentences"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("\n".join(f"{line[:-1]}, and so on and so forth" for line in SENTENCES), "unpunctuated_lines"),
        ("\n".join([*SENTENCES, *(f"Menu {n}." for n in range(14))]), "short_lines"),
        ("\n".join([*SENTENCES, SENTENCES[0]]), "duplicate_line_chars"),
        ("\n".join(line + "\n" * 10 for line in SENTENCES), "newlines"),
    ],
)
def test_fineweb(text: str, reason: str) -> None:
    assert fineweb(Segments(text), FineWebConfig()) == reason
    assert fineweb(Segments(GOOD), FineWebConfig()) is None


def test_ratios_of_characters() -> None:
    for text, reason in (
        ("a!b?c", "symbols"),
        ("abcd1٣", "digits"),
        ("a b c\td", "white_space"),
        ("see https://example.com/a for it", "urls"),
        ("see www.example.com for it", "urls"),
        ("Grüße नमस्ते 你好", None),
    ):
        assert ratios(Segments(text), RatiosConfig(max_urls=0.5)) == reason, text
        assert ratios(Segments(text), RatiosConfig(max_symbols=1.0, max_digits=1.0, max_urls=1.0, max_white_space=1.0)) is None


def test_urls_are_blocked_by_host_and_by_word(tmp_path: Path) -> None:
    listed = tmp_path / "hosts.zst"
    listed.write_bytes(zstandard.compress(b"# a list\n0.0.0.0 bad.example\nhttp://worse.example/\n\nUPPER.example # said why\n"))
    config = UrlConfig(block=["evil.test"], blocklists=[str(listed)], block_words=["casino"])
    for address, reason in (
        ("https://bad.example/page", "host"),
        ("http://www.deep.bad.example:8080/", "host"),
        ("worse.example", "host"),
        ("//upper.example./x", "host"),
        ("https://user@evil.test/x", "host"),
        ("https://notevil.test/", None),
        ("https://evil.test.com/", None),
        ("https://good.example/Online-Casino_2", "word"),
        ("https://good.example/casinos", None),
        ("http://[broken", None),
        ("", None),
        (None, None),
        (7, None),
    ):
        assert url(address, config) == reason, address
    listed.write_text("example.com/one/page\n")
    with pytest.raises(DataError, match=r"hosts.zst:1: 'example.com/one/page' is a page"):
        url("https://x.example/", UrlConfig(blocklists=[str(listed)], block=["other.test"]))


# -------------------------------------------------------------------------------------------- in a build


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


def test_classes_of_characters_are_unicodes() -> None:
    table = class_table()
    for point in range(0, 0x110000, 7):
        character, category = chr(point), unicodedata.category(chr(point))
        wanted = SPACE if character.isspace() else LETTER if category[0] == "L" else DIGIT if category == "Nd" else None
        assert wanted is None or table[point] == wanted, hex(point)
        assert wanted is not None or table[point] in (0, SYMBOL), hex(point)


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
