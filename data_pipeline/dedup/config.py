"""What deduplication may be asked to do. Imports nothing heavy: the run's config reads it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from data_pipeline.schema import Section

LATER_KEYS = {"field", "lines", "substring", "earlier"}


class MinHashConfig(Section):
    """Near-duplicates: documents whose sets of word n-grams have a Jaccard similarity of at least `threshold`.

    A pair is looked at when the rows of at least one band agree: with probability `minhash.catch_probability`.
    """

    ngram: int = 5  # words a shingle
    num_bands: int = 14  # more find more pairs
    rows_per_band: int = 8  # more look at fewer pairs
    threshold: float = 0.8  # Jaccard similarity from which a document goes
    seed: int = Field(default=1, ge=0)  # of the hash functions
    audit_documents: int = Field(default=1000, ge=0)  # so many are compared pair by pair, for the recall in the report; 0: none

    @field_validator("ngram", "num_bands", "rows_per_band")
    @classmethod
    def _positive(cls, value: int) -> int:
        if not 1 <= value <= 1000:
            raise ValueError("a number from 1 to 1000 | the defaults are ngram 5, num_bands 14, rows_per_band 8")
        return value

    @field_validator("threshold")
    @classmethod
    def _similarity(cls, value: float) -> float:
        if not 0.0 < value <= 1.0:
            raise ValueError("a Jaccard similarity above 0 and up to 1 | 0.8 is usual")
        return value

    @model_serializer(mode="wrap")
    def _as_before(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without a key that came later, unless it is set: a dataset that was built before there was one keeps its own key."""
        return {key: value for key, value in handler(self).items() if key != "audit_documents" or value != 1000}


class LinesConfig(Section):
    """Cut lines that stand elsewhere too, exactly as they are but for white space around them; the first ones stay."""

    unit: Literal["line", "paragraph"] = "line"  # paragraphs stand between blank lines
    min_chars: int = Field(40, ge=1)  # shorter ones stay, however often they stand there
    max_copies: int = Field(1, ge=1)  # how many of them stay


class SubstringConfig(Section):
    """Cut every run of words that stands elsewhere too, in the same document or another, whatever its case and punctuation; the first
    one stays (Lee et al. 2021, ExactSubstr, with words as tokens)."""

    min_words: int = Field(50, ge=10)  # words in a row from which a repeat counts


class DedupConfig(Section):
    """`field`, if given, removes documents with the same value there; `exact` those with the same bytes; `minhash`, unless null,
    then those that are nearly the same. Of what is left, `lines` and then `substring`, unless null, cut repeats out of documents."""

    field: str | None = Field(None, min_length=1)  # of a record, such as url; documents without it are not compared by it
    exact: bool = True  # documents with the same bytes
    minhash: MinHashConfig | None = Field(default_factory=MinHashConfig)
    earlier: list[str] | None = None  # dataset folders whose documents stay, and for which copies here go; nothing in them is changed
    lines: LinesConfig | None = None
    substring: SubstringConfig | None = None

    @model_validator(mode="after")
    def _compares(self) -> DedupConfig:
        if self.earlier and not self.exact and self.minhash is None:
            raise ValueError("exact or minhash with earlier | they say what a copy is")
        return self

    @model_serializer(mode="wrap")
    def _as_before(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without a key that came later, unless it is given: a dataset that was built before there was one keeps its own key."""
        return {key: value for key, value in handler(self).items() if key not in LATER_KEYS or value is not None}
