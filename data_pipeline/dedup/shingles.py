"""Word n-grams as 64-bit numbers, and how alike two sets of them are.

Everything is a whole-array operation of numpy: as fast as compiled loops here, and nothing has to be compiled or loaded
before the first text.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import numpy as np

from data_pipeline.words import code_points, word_table

PIECE = 1 << 20  # code points hashed at once, and the end of the word that is under way
CHUNK = 1 << 14  # numbers permuted at once: they stay in the processor's cache

_POINT_PRIME = np.uint64(0x9E3779B97F4A7C15)
_BASE = 0xD6E8FEB86659FD93  # odd, so that it has an inverse modulo 2^64
_INVERSE = pow(_BASE, -1, 1 << 64)
_GRAM_PRIME = np.uint64(0xBF58476D1CE4E5B9)
_LAST_PRIME = np.uint64(0x94D049BB133111EB)


def shingles(text: str, ngram: int) -> np.ndarray:
    """uint64[max(0, words - ngram + 1)]: a hash of each word n-gram, in the text's order, repeats included.

    Different n-grams get different numbers, but for chance (2^-64 a pair), so sets of these stand for sets of n-grams.
    """
    hashes = np.concatenate([_word_hashes(piece) for piece in _pieces(code_points(text))])
    count = max(0, len(hashes) - ngram + 1)
    state = np.zeros(count, dtype=np.uint64)
    for word in range(ngram):
        state ^= hashes[word : word + count]
        state *= _GRAM_PRIME
        state ^= state >> np.uint64(32)
    state *= _LAST_PRIME
    state ^= state >> np.uint64(31)
    return state


def shingle_set(text: str, ngram: int) -> np.ndarray:
    """The distinct shingles, ascending."""
    return np.unique(shingles(text, ngram))


def jaccard(a: np.ndarray, b: np.ndarray) -> float:
    """|a ∩ b| / |a ∪ b| of two ascending arrays of distinct numbers; 0 where both are empty."""
    merged = np.sort(np.concatenate([a, b]), kind="stable")  # two runs: merged in linear time
    common = int(np.count_nonzero(merged[1:] == merged[:-1]))
    union = len(merged) - common
    return common / union if union else 0.0


def min_of_permutations(sets: Sequence[np.ndarray], multipliers: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """uint64[n, k]: min over the numbers of each set of multipliers[k] * number + offsets[k] modulo 2^64; 2^64 - 1 where
    there are none."""
    lengths = np.array([len(numbers) for numbers in sets], dtype=np.int64)
    out = np.full((len(multipliers), len(sets)), np.uint64(0xFFFFFFFFFFFFFFFF))
    filled = np.flatnonzero(lengths)
    if len(filled):
        numbers = np.concatenate([numbers for numbers in sets if len(numbers)])
        ends = np.cumsum(lengths[filled])
        begins = ends - lengths[filled]
        permuted = np.empty(CHUNK, dtype=np.uint64)
        for start in range(0, len(numbers), CHUNK):
            chunk = numbers[start : start + CHUNK]
            first = int(np.searchsorted(ends, start, side="right"))
            last = int(np.searchsorted(begins, start + len(chunk), side="left"))
            here, cuts = filled[first:last], np.maximum(begins[first:last] - start, 0)
            values = permuted[: len(chunk)]
            for k in range(len(multipliers)):
                np.multiply(chunk, multipliers[k], out=values)
                values += offsets[k]
                out[k, here] = np.minimum(out[k, here], np.minimum.reduceat(values, cuts))
    return np.ascontiguousarray(out.T)


def _pieces(points: np.ndarray) -> Iterator[np.ndarray]:
    """The code points in order, cut between words."""
    in_word, start = word_table(), 0
    while len(points) - start > PIECE:
        stop = start + PIECE
        while stop < len(points) and in_word[points[stop]]:
            outside = np.flatnonzero(~in_word[points[stop : stop + PIECE]])
            stop += int(outside[0]) if len(outside) else min(PIECE, len(points) - stop)
        yield points[start:stop]
        start = stop
    yield points[start:]


def _word_hashes(points: np.ndarray) -> np.ndarray:
    """uint64[words]: of each run within the word table, the polynomial of its scrambled code points modulo 2^64.

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
    return hashes


@functools.lru_cache(maxsize=12)
def _powers(count: int) -> tuple[np.ndarray, np.ndarray]:
    """(BASE^i, BASE^-i) modulo 2^64 for i below `count`."""
    bases = [np.full(count, base, dtype=np.uint64) for base in (_BASE, _INVERSE)]
    for column in bases:
        column[:1] = 1
        np.cumprod(column, out=column)
    return bases[0], bases[1]
