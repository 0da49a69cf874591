"""Settings of cleaning; defaults are the published ones. Apart from the code, so that reading a data config loads nothing heavy."""

from __future__ import annotations

import re

from pydantic import Field, field_validator, model_validator

from data_pipeline.schema import Section

_LANGUAGE = re.compile(r"[a-z]{2,3}")


class UrlConfig(Section):
    """Drop documents from blocked hosts. Documents without the field, or with one that is no text, pass."""

    field: str = Field("url", min_length=1)  # of a record: where the document came from
    block: list[str] = []  # hosts, each with everything below it: `example.com` blocks `www.example.com` too
    blocklists: list[str] = []  # files of hosts, one a line, # begins a comment; plain, .gz or .zst
    block_words: list[str] = []  # a URL with one of these words between its punctuation is blocked

    @field_validator("block")
    @classmethod
    def _hosts(cls, value: list[str]) -> list[str]:
        if wrong := [host for host in value if not re.fullmatch(r"[^\s/:@]+\.[^\s/:@]+", host)]:
            raise ValueError(f"hosts such as example.com, without scheme or path | {wrong[0]!r} is none")
        return value

    @model_validator(mode="after")
    def _something(self) -> UrlConfig:
        if not (self.block or self.blocklists or self.block_words):
            raise ValueError("something to block | give block, blocklists or block_words, or leave url out")
        return self


class LanguageConfig(Section):
    """Keep documents in these languages, as py3langid's model sees a sample of the text (FineWeb's threshold). Needs the extra
    `language`: pip install 'megatron-lite[language]'."""

    keep: list[str] = Field(min_length=1)  # ISO 639 codes: [en, de]
    min_score: float = Field(0.65, ge=0.0, le=1.0)  # the model's probability for the language, below which a document goes
    sample_chars: int = Field(1000, ge=50)  # a longer text is judged by this much of it: its beginning, middle and end

    @field_validator("keep")
    @classmethod
    def _codes(cls, value: list[str]) -> list[str]:
        if wrong := [code for code in value if not _LANGUAGE.fullmatch(code)]:
            raise ValueError(f"ISO 639 codes such as en, de, zh | {wrong[0]!r} is none")
        return value


class GopherRepetitionConfig(Section):
    """Repetition within a document (Rae et al. 2021, table A1): shares of lines and paragraphs that stood before, and of
    characters in them, in the most common word n-gram, and in word n-grams that stood before. Blank lines never count."""

    max_duplicate_lines: float = Field(0.30, ge=0.0, le=1.0)  # share of the lines
    max_duplicate_paragraphs: float = Field(0.30, ge=0.0, le=1.0)  # share of the paragraphs, which stand between blank lines
    max_duplicate_line_chars: float = Field(0.20, ge=0.0, le=1.0)  # share of the characters
    max_duplicate_paragraph_chars: float = Field(0.20, ge=0.0, le=1.0)  # share of the characters
    max_top_ngram_chars: dict[int, float] = {2: 0.20, 3: 0.18, 4: 0.16}  # words: share of the characters
    max_duplicate_ngram_chars: dict[int, float] = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}  # words: share of the characters

    @field_validator("max_top_ngram_chars", "max_duplicate_ngram_chars")
    @classmethod
    def _shares(cls, value: dict[int, float]) -> dict[int, float]:
        if wrong := [n for n, share in value.items() if not 1 <= n <= 100 or not 0.0 <= share <= 1.0]:
            raise ValueError(f"words (1 to 100): share (0 to 1) | look at {wrong[0]}")
        return value


class GopherQualityConfig(Section):
    """Shape of a document (Rae et al. 2021, A1.1). A word is a run of letters, digits and underscores, so numbers of words leave
    punctuation out. For languages that put spaces between words."""

    min_words: int = Field(50, ge=0)  # in the document
    max_words: int | None = Field(100_000, ge=1)  # in the document; null: no limit
    min_mean_word_length: float = Field(3.0, ge=0.0)  # characters
    max_mean_word_length: float = Field(10.0, ge=0.0)  # characters
    max_hashes_per_word: float = Field(0.1, ge=0.0)  # of #
    max_ellipses_per_word: float = Field(0.1, ge=0.0)  # of ... and …
    max_bullet_lines: float = Field(0.9, ge=0.0, le=1.0)  # share of the lines that begin with a bullet or a dash
    max_ellipsis_lines: float = Field(0.3, ge=0.0, le=1.0)  # share of the lines that end with ... or …
    min_words_with_letter: float = Field(0.8, ge=0.0, le=1.0)  # share of the words
    min_stop_words: int = Field(2, ge=0)  # different ones, in any case, that must stand in the text
    stop_words: list[str] = ["the", "be", "to", "of", "and", "that", "have", "with"]  # of your language


class C4Config(Section):
    """Lines and documents as C4 dropped them (Raffel et al. 2020, 2.2). Lines that go are cut out of the document."""

    terminal_punctuation: bool = False  # true, as in C4: lines that don't end with . ! ? or a quotation mark go. FineWeb left this out
    max_word_chars: int | None = Field(1000, ge=1)  # lines with a longer run without white space go; null: none do
    min_words_per_line: int = Field(3, ge=0)  # lines with fewer, counted between white space, go
    min_sentences: int = Field(5, ge=0)  # documents with fewer in the lines that stay go
    drop_javascript_lines: bool = True  # lines with `javascript`
    drop_policy_lines: bool = True  # lines with `terms of use`, `privacy policy`, `cookie policy`, `uses cookies` and the like
    drop_lorem_ipsum: bool = True  # documents with `lorem ipsum`
    drop_curly_bracket: bool = True  # documents with {
    strip_citations: bool = True  # [12], [edit], [citation needed]


class FineWebConfig(Section):
    """Lines of a document that is a list, a menu or a template (Penedo et al. 2024, 3.6)."""

    min_punctuated_lines: float = Field(0.12, ge=0.0, le=1.0)  # share of the lines that end a sentence
    max_short_lines: float = Field(0.67, ge=0.0, le=1.0)  # share of the lines
    short_line_chars: int = Field(30, ge=0)  # up to this, a line is short
    max_duplicate_line_chars: float = Field(0.01, ge=0.0, le=1.0)  # share of the characters
    max_newlines_per_word: float = Field(0.3, ge=0.0)  # line ends, blank lines' too


class RatiosConfig(Section):
    """Shares of a document's characters, with the thresholds of NeMo Curator's heuristics; 1 allows everything."""

    max_symbols: float = Field(0.25, ge=0.0, le=1.0)  # neither letters, digits nor white space
    max_digits: float = Field(0.15, ge=0.0, le=1.0)  # decimal digits of any script
    max_urls: float = Field(0.2, ge=0.0, le=1.0)  # characters of http://, https:// and www. addresses
    max_white_space: float = Field(0.25, ge=0.0, le=1.0)  # spaces, tabs, line ends


class PiiConfig(Section):
    """Write a fixed text in place of what points to a person. The same text always becomes the same; null leaves a kind alone."""

    email: str | None = "email@example.com"  # addresses
    ip: str | None = "192.0.2.1"  # public IPv4 and IPv6 addresses; those of private and reserved networks stay
    phone: str | None = "+1 202-555-0100"  # international numbers with +, and North American ones


class FiltersConfig(Section):
    """Cleaning, in FineWeb's order. Only what is named runs: `gopher_quality: {}` runs with the published thresholds."""

    url: UrlConfig | None = None
    language: LanguageConfig | None = None
    gopher_repetition: GopherRepetitionConfig | None = None
    gopher_quality: GopherQualityConfig | None = None
    c4: C4Config | None = None
    fineweb: FineWebConfig | None = None
    ratios: RatiosConfig | None = None
    pii: PiiConfig | None = None
    write_dropped: bool = False  # true: dropped/ in the dataset folder has every dropped document with its reason, as jsonl.zst
