"""Word n-grams as 64-bit numbers, and how alike two sets of them are.

Everything is a whole-array operation of numpy: as fast as compiled loops here, and nothing has to be compiled or loaded
before the first text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data_pipeline.words import code_points, grams, segment

CHUNK = 1 << 14  # numbers permuted at once: they stay in the processor's cache


def shingles(text: str, ngram: int) -> np.ndarray:
    """uint64[max(0, words - ngram + 1)]: a hash of each word n-gram, in the text's order, repeats included.

    Different n-grams get different numbers, but for chance (2^-64 a pair), so sets of these stand for sets of n-grams.
    """
    return grams(segment(code_points(text)).hashes, ngram)


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
