"""What a word is, in one place: a run of letters, digits and underscores (`\\w`) of the lower-cased text."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

PIECE = 1 << 20  # code points hashed at once, and the end of the word that is under way

_WORD = re.compile(r"\w+")
_LAST_ASSIGNED = 0x40000  # no code point above is a word character
_POINT_PRIME = np.uint64(0x9E3779B97F4A7C15)
_BASE = 0xD6E8FEB86659FD93  # odd, so that it has an inverse modulo 2^64
_INVERSE = pow(_BASE, -1, 1 << 64)
_GRAM_PRIME = np.uint64(0xBF58476D1CE4E5B9)
_LAST_PRIME = np.uint64(0x94D049BB133111EB)


class Words(NamedTuple):
    """Every word of a text in order: [begin, end) among its code points, int64[words], and a hash of it, uint64[words],
    which differs for different words but for chance (2^-64 a pair)."""

    begins: np.ndarray
    ends: np.ndarray
    hashes: np.ndarray


def words(text: str) -> list[str]:
    """The words in order."""
    return _WORD.findall(text.lower())


def code_points(text: str) -> np.ndarray:
    """uint32 code points of the lower-cased text, read-only: `words(text)` are their runs within `word_table()`."""
    lowered = text.lower()
    if lowered.isascii():
        return np.frombuffer(lowered.encode("ascii"), dtype=np.uint8).astype(np.uint32)
    return np.frombuffer(lowered.encode("utf-32-le", "surrogatepass"), dtype=np.dtype("<u4"))


def places_before_lowering(text: str) -> np.ndarray | None:
    """int64: of each code point of the lower-cased text, the place of the character that it comes from; None where that is its own,
    as it is in nearly every text (the lower case of \u0130 has two)."""
    if len(text.lower()) == len(text):
        return None
    return np.array([place for place, character in enumerate(text) for _ in character.lower()], dtype=np.int64)


@functools.cache
def word_table() -> np.ndarray:
    """bool[0x110000]: whether the code point is part of a word."""
    table = np.zeros(0x110000, dtype=np.bool_)
    for match in _WORD.finditer("".join(map(chr, range(_LAST_ASSIGNED)))):
        table[match.start() : match.end()] = True
    table.flags.writeable = False
    return table


def segment(points: np.ndarray) -> Words:
    """The words of a text given as `code_points`. One segmentation serves everyone who counts, compares or hashes words."""
    starts, found = [], []
    for start, piece in _pieces(points):
        starts.append(start)
        found.append(_words_of(piece))
    if len(found) == 1:
        return found[0]
    return Words(
        np.concatenate([words.begins + start for start, words in zip(starts, found)]),
        np.concatenate([words.ends + start for start, words in zip(starts, found)]),
        np.concatenate([words.hashes for words in found]),
    )


def grams(hashes: np.ndarray, ngram: int) -> np.ndarray:
    """uint64[max(0, words - ngram + 1)]: a hash of each run of `ngram` words, given the words' own hashes in order."""
    count = max(0, len(hashes) - ngram + 1)
    state = np.zeros(count, dtype=np.uint64)
    for word in range(ngram):
        state ^= hashes[word : word + count]
        state *= _GRAM_PRIME
        state ^= state >> np.uint64(32)
    state *= _LAST_PRIME
    state ^= state >> np.uint64(31)
    return state


def _pieces(points: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """(where it begins, code points) in order, cut between words."""
    in_word, start = word_table(), 0
    while len(points) - start > PIECE:
        stop = start + PIECE
        while stop < len(points) and in_word[points[stop]]:
            outside = np.flatnonzero(~in_word[points[stop : stop + PIECE]])
            stop += int(outside[0]) if len(outside) else min(PIECE, len(points) - stop)
        yield start, points[start:stop]
        start = stop
    yield start, points[start:]


def _words_of(points: np.ndarray) -> Words:
    """The hash of each run within the word table is the polynomial of its scrambled code points modulo 2^64.

    With C the prefix sums of scrambled(point_i) * BASE^i, a word at [i, j) has the hash (C_j - C_i) / BASE^i.
    """
    inside = np.zeros(len(points) + 2, dtype=np.int8)
    inside[1:-1] = word_table()[points]
    edges = np.flatnonzero(inside[1:] != inside[:-1])
    begins, ends = edges[::2], edges[1::2]
    powers, inverses = _powers(1 << max(12, (len(points) - 1).bit_length()))
    terms = points.astype(np.uint64)
    terms += np.uint64(1)
    terms *= _POINT_PRIME
    terms ^= terms >> np.uint64(29)
    terms *= _GRAM_PRIME
    terms *= powers[: len(points)]
    sums = np.zeros(len(points) + 1, dtype=np.uint64)
    np.cumsum(terms, out=sums[1:])
    hashes = (sums[ends] - sums[begins]) * inverses[begins]
    hashes ^= hashes >> np.uint64(32)
    return Words(begins, ends, hashes)


@functools.lru_cache(maxsize=12)
def _powers(count: int) -> tuple[np.ndarray, np.ndarray]:
    """(BASE^i, BASE^-i) modulo 2^64 for i below `count`."""
    bases = [np.full(count, base, dtype=np.uint64) for base in (_BASE, _INVERSE)]
    for column in bases:
        column[:1] = 1
        np.cumprod(column, out=column)
    return bases[0], bases[1]
