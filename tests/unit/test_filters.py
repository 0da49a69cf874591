"""If this fails, good documents are dropped or bad ones kept: a rule no longer does what its paper says."""

from __future__ import annotations

import unicodedata
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import zstandard

from data_pipeline.document import Document
from data_pipeline.errors import DataError
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
from data_pipeline.step import Drop
from data_pipeline.words import words
from tests.cleaning_texts import GOOD, SENTENCES

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


def test_classes_of_characters_are_unicodes() -> None:
    table = class_table()
    for point in range(0, 0x110000, 7):
        character, category = chr(point), unicodedata.category(chr(point))
        wanted = SPACE if character.isspace() else LETTER if category[0] == "L" else DIGIT if category == "Nd" else None
        assert wanted is None or table[point] == wanted, hex(point)
        assert wanted is not None or table[point] in (0, SYMBOL), hex(point)
