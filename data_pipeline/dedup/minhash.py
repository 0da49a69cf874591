"""MinHash signatures and their bands (Broder 1997; Leskovec, Rajaraman and Ullman, chapter 3)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from data_pipeline.dedup.config import MinHashConfig
from data_pipeline.dedup.shingles import min_of_permutations, shingles

_MASK = (1 << 64) - 1
MISS_PROBABILITY = 1e-6  # of a pair exactly at the threshold; bands lose far more


def catch_probability(jaccard: float, *, num_bands: int, rows_per_band: int) -> float:
    """The chance that a pair of this similarity agrees in at least one band: 1 - (1 - J^rows)^bands."""
    return 1.0 - (1.0 - jaccard**rows_per_band) ** num_bands


def signatures(texts: Sequence[str], config: MinHashConfig) -> tuple[np.ndarray, np.ndarray]:
    """(uint64[n, bands * rows], bool[n]): the signature, and whether the text has one (it does with `ngram` words or more).

    Row k is the minimum over the text's shingles x of a_k x + b_k modulo 2^64, a_k odd: multiply-shift in place of the
    textbook's arithmetic modulo a prime, frozen by golden values in the tests.
    """
    sets = [shingles(text, config.ngram) for text in texts]
    has_signature = np.array([len(numbers) > 0 for numbers in sets], dtype=np.bool_)
    out = min_of_permutations(sets, *_coefficients(config))
    return out, has_signature


def band_keys(signature: np.ndarray, config: MinHashConfig) -> np.ndarray:
    """uint64[n, bands]: one number for the rows of each band, equal when they all are. Signatures: uint64[n, bands * rows]."""
    rows = signature.reshape(len(signature), config.num_bands, config.rows_per_band)
    keys = np.zeros(rows.shape[:2], dtype=np.uint64)
    for row in range(config.rows_per_band):
        keys = (keys ^ rows[:, :, row]) * np.uint64(0x9E3779B97F4A7C15)
        keys ^= keys >> np.uint64(32)
    return keys


def sketches(signature: np.ndarray) -> np.ndarray:
    """uint8[n, bands * rows]: a byte of each row. Two agree in a row with probability J + (1 - J) / 256."""
    return ((signature >> np.uint64(40)) & np.uint64(0xFF)).astype(np.uint8)


def least_agreement(config: MinHashConfig) -> int:
    """The number of rows in which the sketches of a true pair (similarity >= threshold) agree, or more, but for chance
    MISS_PROBABILITY: the lower tail of the binomial distribution."""
    rows = config.num_bands * config.rows_per_band
    below = 0.0
    for agreeing in range(rows + 1):
        below += math.comb(rows, agreeing) * config.threshold**agreeing * (1.0 - config.threshold) ** (rows - agreeing)
        if below > MISS_PROBABILITY:
            return agreeing
    return rows


def _coefficients(config: MinHashConfig) -> tuple[np.ndarray, np.ndarray]:
    """(multipliers, odd; offsets), uint64[bands * rows] each, by splitmix64 from the seed: the same under every numpy."""
    rows = config.num_bands * config.rows_per_band
    numbers = np.array([_splitmix64(config.seed * 0x9E3779B97F4A7C15 + index) for index in range(2 * rows)], dtype=np.uint64)
    return numbers[:rows] | np.uint64(1), numbers[rows:]


def _splitmix64(index: int) -> int:
    z = (index * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
