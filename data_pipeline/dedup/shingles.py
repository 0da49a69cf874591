"""Word n-grams as 64-bit numbers, and how alike two sets of them are. Compiled when imported, in about half a second."""

from __future__ import annotations

import numpy as np
from numba import njit, types

from data_pipeline.words import code_points, word_table

_POINTS = types.Array(types.uint32, 1, "C", readonly=True)
_TABLE = types.Array(types.boolean, 1, "C", readonly=True)
_NUMBERS = types.Array(types.uint64, 1, "C", readonly=True)
_WORD_PRIME = np.uint64(0x9E3779B97F4A7C15)
_GRAM_PRIME = np.uint64(0xBF58476D1CE4E5B9)
_LAST_PRIME = np.uint64(0x94D049BB133111EB)


def shingles(text: str, ngram: int) -> np.ndarray:
    """uint64[max(0, words - ngram + 1)]: a hash of each word n-gram, in the text's order, repeats included.

    Different n-grams get different numbers, but for chance (2^-64 a pair), so sets of these stand for sets of n-grams.
    """
    hashes: np.ndarray = _hash_ngrams(code_points(text), word_table(), ngram)
    return hashes


def shingle_set(text: str, ngram: int) -> np.ndarray:
    """The distinct shingles, ascending."""
    return np.unique(shingles(text, ngram))


def jaccard(a: np.ndarray, b: np.ndarray) -> float:
    """|a ∩ b| / |a ∪ b| of two ascending arrays of distinct numbers; 0 where both are empty."""
    common = int(_count_common(a, b))
    union = len(a) + len(b) - common
    return common / union if union else 0.0


@njit(types.uint64[::1](_POINTS, _TABLE, types.int64), nogil=True)
def _hash_ngrams(points, in_word, ngram):  # type: ignore[no-untyped-def]
    hashes = np.empty(len(points) // 2 + 1, np.uint64)
    num_words = 0
    state = np.uint64(0)
    inside = False
    for point in points:
        if in_word[point]:
            state = (state ^ np.uint64(point)) * _WORD_PRIME
            state ^= state >> np.uint64(29)
            inside = True
        elif inside:
            hashes[num_words] = state
            num_words += 1
            state = np.uint64(0)
            inside = False
    if inside:
        hashes[num_words] = state
        num_words += 1
    count = max(0, num_words - ngram + 1)
    out = np.empty(count, np.uint64)
    for first in range(count):
        state = np.uint64(0)
        for word in range(first, first + ngram):
            state = (state ^ hashes[word]) * _GRAM_PRIME
            state ^= state >> np.uint64(32)
        state *= _LAST_PRIME
        out[first] = state ^ (state >> np.uint64(31))
    return out


@njit(types.int64(_NUMBERS, _NUMBERS), nogil=True)
def _count_common(a, b):  # type: ignore[no-untyped-def]
    i = j = common = 0
    while i < len(a) and j < len(b):
        if a[i] == b[j]:
            common += 1
            i += 1
            j += 1
        elif a[i] < b[j]:
            i += 1
        else:
            j += 1
    return common


@njit(types.void(_NUMBERS, _NUMBERS, _NUMBERS, types.uint64[::1]), nogil=True)
def min_of_permutations(numbers, multipliers, offsets, out):  # type: ignore[no-untyped-def]
    """out[k] = min over numbers of multipliers[k] * number + offsets[k], modulo 2^64."""
    out[:] = np.uint64(0xFFFFFFFFFFFFFFFF)
    for number in numbers:
        for k in range(len(out)):
            out[k] = min(out[k], multipliers[k] * number + offsets[k])
