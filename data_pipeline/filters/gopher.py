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
    if _num_present(_hashes(tuple(config.stop_words)), text.words.hashes, enough=config.min_stop_words) < config.min_stop_words:
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
    chars_before = np.zeros(text.num_words + 1, dtype=np.int64)  # of the words before each
    np.cumsum(text.words.ends - text.words.begins, out=chars_before[1:])
    return _top_ngrams(text, chars_before, config) or _duplicate_ngrams(text, chars_before, config)


def _top_ngrams(text: Segments, chars_before: np.ndarray, config: GopherRepetitionConfig) -> str | None:
    """The characters of all occurrences of the most common n-gram, the spaces between its words included; of several equally
    common ones the longest counts. One that occurs once has none."""
    for n, most in sorted(config.max_top_ngram_chars.items()):
        limit = most * len(text.text)
        numbers = grams(text.words.hashes, n)
        if len(numbers) < 2:
            break
        counts = _run_lengths(np.sort(numbers))
        highest = int(counts.max())
        chars = chars_before[n:] - chars_before[:-n] + (n - 1)
        if highest < 2:  # then no longer one stands twice either
            break
        if highest * int(chars.max()) <= limit:  # no need to know which it is
            continue
        order = np.argsort(numbers, kind="stable")
        begins = np.cumsum(counts) - counts
        if highest * int(chars[order[begins[counts == highest]]].max()) > limit:
            return f"top_{n}_gram"
    return None


def _run_lengths(ordered: np.ndarray) -> np.ndarray:
    """Of each run of equal numbers, in order."""
    edges = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    return np.diff(edges, prepend=0, append=len(ordered))


def _duplicate_ngrams(text: Segments, chars_before: np.ndarray, config: GopherRepetitionConfig) -> str | None:
    """The characters in n-grams that stood before; none counts twice. A place where an n-gram repeats has been one for each shorter
    n, so only those are looked at again."""
    places: np.ndarray | None = None  # None: all
    for n, most in sorted(config.max_duplicate_ngram_chars.items()):
        numbers = grams(text.words.hashes, n)
        if places is None:
            ordered = np.sort(numbers)
            if not np.any(ordered[1:] == ordered[:-1]):
                return None
            places = np.arange(len(numbers))
        places = places[places < len(numbers)]
        order = places[np.argsort(numbers[places], kind="stable")]
        ordered = numbers[order]
        same = np.zeros(len(order) + 1, dtype=np.bool_)  # as the one before
        same[1:-1] = ordered[1:] == ordered[:-1]
        repeats = np.sort(order[same[:-1]])  # all occurrences but the first
        if _covered(repeats, chars_before, n) > most * len(text.text):
            return f"duplicate_{n}_grams"
        places = np.sort(order[same[:-1] | same[1:]])
        if not len(places):
            return None
    return None


def _covered(repeats: np.ndarray, chars_before: np.ndarray, n: int) -> int:
    """Characters of the words in the n-grams at these places, taken from left to right without overlap. Places that follow
    each other without a gap make one stretch, a multiple of n words long."""
    if not len(repeats):
        return 0
    gaps = np.flatnonzero(np.diff(repeats) > 1)
    total, free = 0, 0
    for first, last in zip(repeats[np.append(0, gaps + 1)].tolist(), repeats[np.append(gaps, len(repeats) - 1)].tolist()):
        start = max(first, free)
        if start <= last:
            free = start + n * -(-(last + 1 - start) // n)
            total += int(chars_before[free] - chars_before[start])
    return total


def _num_present(wanted: tuple[np.uint64, ...], hashes: np.ndarray, *, enough: int) -> int:
    """How many of the words occur, counted up to `enough`."""
    found = 0
    for number in wanted:
        if found >= enough:
            break
        found += bool(np.any(hashes == number))
    return found


@functools.lru_cache(maxsize=8)
def _hashes(words: tuple[str, ...]) -> tuple[np.uint64, ...]:
    """Each word once, the first to be looked for first."""
    return tuple(np.uint64(word_hash(word)) for word in dict.fromkeys(word.lower() for word in words))
