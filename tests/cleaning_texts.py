"""Texts for what cleans: one that passes every filter, words without sense, and a question of an examination."""

from __future__ import annotations

import random

SENTENCES = [
    "The quick brown fox jumps over the lazy dog while its owner looks on with some amusement.",
    "It was to be expected that nobody would have an answer to a question of that kind.",
    "Rivers carry sand and stones to the sea, and the sea gives them back to other shores.",
    "We went out early in the morning, before the first trains left, and walked along the canal.",
    "Her letters from that year are kept in a wooden box with a lock that has long been broken.",
    "A good map shows less than there is, so that a reader finds what matters on it at once.",
]
GOOD = "\n".join(SENTENCES)

FILLER = [
    first + second
    for first in ["ba", "ce", "di", "fo", "gu", "ha", "ke", "li", "mo", "nu"]
    for second in ["ber", "dan", "fel", "gor", "hin", "kas", "lum", "mit"]
]
QUESTION = "Which of the three brothers didn't return to the well-known village before the snow of that long winter had melted away?"


def filler(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(FILLER) for _ in range(count))
