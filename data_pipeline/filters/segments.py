"""What filters look at in a text, each computed once and only if somebody asks: lines, paragraphs, words, classes of characters."""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from data_pipeline.words import Words, code_points, segment

LETTER, DIGIT, SPACE, SYMBOL = 1, 2, 4, 8
PARAGRAPH_END = re.compile(r"\n[^\S\n]*\n\s*")
_NUM_CODE_POINTS = 0x110000
_LAST_ASSIGNED = 0x33480  # no code point from here on is a letter, a digit or white space
_CATEGORIES = {LETTER: "Lu Ll Lt Lm Lo", DIGIT: "Nd", SPACE: "Zs Zl Zp", 0: "Mn Mc Me Nl No"}


class Segments:
    """A text in parts. Lines end at \\n alone; blank lines and blank paragraphs are left out everywhere (they would count as
    duplicates of each other)."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def lowered(self) -> str:
        return self.text.lower()

    @cached_property
    def lines(self) -> list[str]:
        return [line for line in self.text.split("\n") if line and not line.isspace()]

    @cached_property
    def paragraphs(self) -> list[str]:
        """Between blank lines, without white space around them."""
        return [stripped for part in PARAGRAPH_END.split(self.text) if (stripped := part.strip())]

    @cached_property
    def points(self) -> np.ndarray:
        """uint32 code points of the lower-cased text."""
        return code_points(self.text)

    @cached_property
    def words(self) -> Words:
        return segment(self.points)

    @cached_property
    def num_words(self) -> int:
        return len(self.words.begins)

    @cached_property
    def classes(self) -> np.ndarray:
        """uint8, one a code point: LETTER, DIGIT, SPACE or SYMBOL; 0 for marks and other numerals."""
        return class_table()[self.points]

    def share(self, kind: int) -> float:
        """Of the characters, those of the class; 0 for an empty text."""
        return int(np.count_nonzero(self.classes == kind)) / max(len(self.points), 1)

    def num_words_with(self, kind: int) -> int:
        """Words with a character of the class."""
        if not self.num_words:
            return 0
        before = np.zeros(len(self.points) + 1, dtype=np.int64)
        np.cumsum(self.classes == kind, out=before[1:])
        return int(np.count_nonzero(before[self.words.ends] > before[self.words.begins]))


@functools.lru_cache(maxsize=1)
def segments_of(text: str) -> Segments:
    """The parts of a text; the steps that look at a document one after another share what was computed."""
    return Segments(text)


def duplicates(parts: Sequence[str]) -> tuple[int, int]:
    """(parts, characters) that stood before among the parts."""
    if len(seen := set(parts)) == len(parts):
        return 0, 0
    return len(parts) - len(seen), sum(map(len, parts)) - sum(map(len, seen))


def word_hash(word: str) -> int:
    """The number of a single word among `Words.hashes`."""
    hashes = segment(code_points(word)).hashes
    assert len(hashes) == 1, f"{word!r} is not one word"
    return int(hashes[0])


@functools.cache
def class_table() -> np.ndarray:
    """uint8[0x110000]: the class of each code point, by Unicode's general categories."""
    characters = list(map(chr, range(_LAST_ASSIGNED)))
    kinds = {category: kind for kind, categories in _CATEGORIES.items() for category in categories.split()}
    table = np.full(_NUM_CODE_POINTS, SYMBOL, dtype=np.uint8)
    table[:_LAST_ASSIGNED] = [kinds.get(category, SYMBOL) for category in map(unicodedata.category, characters)]
    table[[place for place, character in enumerate(characters[:0x3001]) if character.isspace()]] = SPACE
    table.flags.writeable = False
    return table
