"""The rules of Gopher's MassiveText: the shape of a document, and repetition within it (Rae et al. 2021, A1.1)."""

from __future__ import annotations

import functools

import numpy as np

from data_pipeline.filters.config import GopherQualityConfig, GopherRepetitionConfig
from data_pipeline.filters.segments import LETTER, Segments, duplicates, word_hash
from data_pipeline.words import grams

_ELLIPSES = ("...", "…")
_BULLETS = ("•", "‣", "▪", "●", "-", "–", "*")


def quality(text: Segments, config: GopherQualityConfig) -> str | None:
    """Why the document goes, or None."""
    num_words = text.num_words
    if num_words < config.min_words:
        return "few_words"
    if config.max_words is not None and num_words > config.max_words:
        return "many_words"
    if not num_words:
        return None
    mean_length = int((text.words.ends - text.words.begins).sum()) / num_words
    if mean_length < config.min_mean_word_length:
        return "short_words"
    if mean_length > config.max_mean_word_length:
        return "long_words"
    if text.text.count("#") > config.max_hashes_per_word * num_words:
        return "hashes"
    if sum(map(text.text.count, _ELLIPSES)) > config.max_ellipses_per_word * num_words:
        return "ellipses"
    lines = text.lines
    if sum(line.lstrip().startswith(_BULLETS) for line in lines) > config.max_bullet_lines * len(lines):
        return "bullet_lines"
    if sum(line.rstrip().endswith(_ELLIPSES) for line in lines) > config.max_ellipsis_lines * len(lines):
        return "ellipsis_lines"
    if text.num_words_with(LETTER) < config.min_words_with_letter * num_words:
        return "words_without_letter"
    if len(_hashes(tuple(config.stop_words)) & text.distinct_words) < config.min_stop_words:
        return "stop_words"
    return None


def repetition(text: Segments, config: GopherRepetitionConfig) -> str | None:
    """Why the document goes, or None. Of word n-grams, the characters of the words count, as shares of the whole text; those of
    the most common one also its spaces, and only if it stands twice."""
    num_chars = len(text.text)
    paragraphs, lines = text.paragraphs, text.lines
    for parts, most, most_chars, reason in (
        (paragraphs, config.max_duplicate_paragraphs, config.max_duplicate_paragraph_chars, "duplicate_paragraph"),
        (lines, config.max_duplicate_lines, config.max_duplicate_line_chars, "duplicate_line"),
    ):
        number, chars = duplicates(parts)
        if number > most * len(parts):
            return f"{reason}s"
        if chars > most_chars * num_chars:
            return f"{reason}_chars"
    hashes, num_words = text.words.hashes, text.num_words
    chars_before = np.zeros(num_words + 1, dtype=np.int64)  # of the words before each
    np.cumsum(text.words.ends - text.words.begins, out=chars_before[1:])
    for n, most in sorted(config.max_top_ngram_chars.items()):
        if _exceeds_top(hashes, chars_before, n, most * num_chars):
            return f"top_{n}_gram"
    for n, most in sorted(config.max_duplicate_ngram_chars.items()):
        chars = _duplicate_chars(hashes, chars_before, n)
        if chars > most * num_chars:
            return f"duplicate_{n}_grams"
        if not chars:  # then no longer n-gram stands twice either
            break
    return None


def _exceeds_top(hashes: np.ndarray, chars_before: np.ndarray, n: int, limit: float) -> bool:
    """Whether the occurrences of the most common n-gram have more characters than `limit`, the spaces between its words included;
    of several equally common ones the longest counts. One that occurs once has none."""
    numbers = grams(hashes, n)
    if len(numbers) < 2:
        return False
    counts = _run_lengths(np.sort(numbers))
    most = int(counts.max())
    chars = chars_before[n:] - chars_before[:-n] + (n - 1)
    if most < 2 or most * int(chars.max()) <= limit:  # no need to know which it is
        return False
    order = np.argsort(numbers, kind="stable")
    begins = np.cumsum(counts) - counts
    return most * int(chars[order[begins[counts == most]]].max()) > limit


def _run_lengths(ordered: np.ndarray) -> np.ndarray:
    """Of each run of equal numbers, in order."""
    edges = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    return np.diff(edges, prepend=0, append=len(ordered))


def _duplicate_chars(hashes: np.ndarray, chars_before: np.ndarray, n: int) -> int:
    """Characters in n-grams that stood before; none counts twice."""
    numbers = grams(hashes, n)
    ordered = np.sort(numbers)
    if not np.any(ordered[1:] == ordered[:-1]):
        return 0
    order = np.argsort(numbers, kind="stable")
    ordered = numbers[order]
    repeats = np.sort(order[1:][ordered[1:] == ordered[:-1]])  # places of all occurrences but the first
    total, free = 0, 0
    for place in repeats.tolist():
        if place >= free:
            free = place + n
            total += int(chars_before[free] - chars_before[place])
    return total


@functools.lru_cache(maxsize=8)
def _hashes(words: tuple[str, ...]) -> frozenset[int]:
    return frozenset(map(word_hash, words))
