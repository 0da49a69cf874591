"""Word n-grams as 64-bit numbers, and how alike two sets of them are.

The three kernels are compiled when this module is first imported on a machine (under a second) and kept beside it, or
in the user's cache folder; where neither can be written they are compiled each time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


def _compiled(signature: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def compile_it(function: Callable[..., Any]) -> Callable[..., Any]:
        try:
            compiled: Callable[..., Any] = njit(signature, nogil=True, cache=True)(function)
        except RuntimeError:  # no folder that a cache could be written to
            compiled = njit(signature, nogil=True)(function)
        return compiled

    return compile_it


@_compiled(types.uint64[::1](_POINTS, _TABLE, types.int64))
def _hash_ngrams(points, in_word, ngram):  # type: ignore[no-untyped-def]
    hashes = np.empty(points.size // 2 + 1, np.uint64)
    num_words = 0
    state = np.uint64(0)
    inside = False
    for place in range(points.size):
        point = points[place]
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
    count = num_words - ngram + 1
    if count < 0:
        count = 0
    out = np.empty(count, np.uint64)
    for first in range(count):
        state = np.uint64(0)
        for word in range(ngram):
            state = (state ^ hashes[first + word]) * _GRAM_PRIME
            state ^= state >> np.uint64(32)
        state *= _LAST_PRIME
        out[first] = state ^ (state >> np.uint64(31))
    return out


@_compiled(types.int64(_NUMBERS, _NUMBERS))
def _count_common(a, b):  # type: ignore[no-untyped-def]
    i = j = common = 0
    while i < a.size and j < b.size:
        if a[i] == b[j]:
            common += 1
            i += 1
            j += 1
        elif a[i] < b[j]:
            i += 1
        else:
            j += 1
    return common


@_compiled(types.void(_NUMBERS, _NUMBERS, _NUMBERS, types.uint64[::1]))
def min_of_permutations(numbers, multipliers, offsets, out):  # type: ignore[no-untyped-def]
    """out[k] = min over numbers of multipliers[k] * number + offsets[k] modulo 2^64; 2^64 - 1 where there are none."""
    for k in range(out.size):
        out[k] = np.uint64(0xFFFFFFFFFFFFFFFF)
    for place in range(numbers.size):
        for k in range(out.size):
            value = multipliers[k] * numbers[place] + offsets[k]
            if value < out[k]:
                out[k] = value
