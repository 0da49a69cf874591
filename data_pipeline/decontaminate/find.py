"""What a text shares with evaluation items: which item, which words of the text, and whether the answer stands beside them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from data_pipeline.decontaminate.config import DecontaminateConfig
from data_pipeline.decontaminate.index import Index
from data_pipeline.words import Words, grams


@dataclass(frozen=True, slots=True)
class Overlap:
    """Words [begin, end) of a text are words of an item. `shared`: the longest run of them that is one run in the item too; `of`: the
    words of the passage of the item that it is part of; `field`: that passage. `answer`: whether an answer stands there or within the
    window; None where the item has none."""

    item: int
    begin: int
    end: int
    shared: int
    of: int
    field: str
    answer: bool | None


@dataclass(frozen=True, slots=True)
class _Run:
    """A passage's words at [begin, end) of the text."""

    begin: int
    end: int
    passage: int


def find_overlaps(words: Words, index: Index, config: DecontaminateConfig) -> list[Overlap]:
    """By place, then item. Every run of `ngram` words that the text and a passage have in common is found, and every whole passage that
    is shorter but has `min_words`; but for chance (2^-64 a pair of runs) nothing else is."""
    runs = [*_runs(words, index, config), *_wholes(words, index, config)]
    by_item: dict[int, list[_Run]] = {}
    for run in runs:
        for item in index.passages[run.passage].items:
            by_item.setdefault(item, []).append(run)
    found = [overlap for item, its in by_item.items() for overlap in _overlaps(item, its, words, index, config)]
    return sorted(found, key=lambda overlap: (overlap.begin, overlap.end, overlap.item))


def _runs(words: Words, index: Index, config: DecontaminateConfig) -> Iterator[_Run]:
    """Runs of `ngram` words, put together where they follow each other in the text and in the passage."""
    where, passages, places = index.runs.find(grams(words.hashes, config.ngram))
    if not len(where):
        return
    order = np.lexsort((where, where - places, passages))
    where, passages, diagonals = where[order], passages[order], (where - places)[order]
    breaks = (np.diff(where) != 1) | (np.diff(passages) != 0) | (np.diff(diagonals) != 0)
    begins = np.append(0, np.flatnonzero(breaks) + 1)
    ends = np.append(begins[1:], len(where)) - 1
    for first, last in zip(begins.tolist(), ends.tolist()):
        yield _Run(int(where[first]), int(where[last]) + config.ngram, int(passages[first]))


def _wholes(words: Words, index: Index, config: DecontaminateConfig) -> Iterator[_Run]:
    if not len(index.wholes):
        return
    where, passages, _ = index.wholes.find(grams(words.hashes, config.min_words))
    for begin, number in zip(where.tolist(), passages.tolist()):
        wanted = index.passages[number].words
        if np.array_equal(words.hashes[begin : begin + len(wanted)], wanted):
            yield _Run(begin, begin + len(wanted), number)


def _overlaps(item: int, runs: list[_Run], words: Words, index: Index, config: DecontaminateConfig) -> Iterator[Overlap]:
    """The item's runs, those that overlap as one."""
    runs = sorted(runs, key=lambda run: (run.begin, run.end))
    groups: list[list[_Run]] = []
    reach = -1
    for run in runs:
        if not groups or run.begin >= reach:
            groups.append([])
        groups[-1].append(run)
        reach = max(reach, run.end)
    for group in groups:
        longest = max(group, key=lambda run: (run.end - run.begin, -len(index.passages[run.passage].words)))
        passage = index.passages[longest.passage]
        begin, end = group[0].begin, max(run.end for run in group)
        answer = _answer_near(begin, end, group, words, index, item, config)
        needed = config.require_answer or all(index.passages[run.passage].needs_answer for run in group)
        if answer is False and needed:
            continue
        yield Overlap(item, begin, end, longest.end - longest.begin, len(passage.words), passage.field, answer)


def _answer_near(
    begin: int, end: int, group: list[_Run], words: Words, index: Index, item: int, config: DecontaminateConfig
) -> bool | None:
    """Whether an answer of the item stands within the window around [begin, end), other than within the question's own words."""
    answers = index.answers[item]
    if not any(len(answer) for answer in answers):
        return None
    passages = [(index.passages[run.passage], run.end - run.begin) for run in group]
    if any(passage.has_answer[item] and length == len(passage.words) for passage, length in passages):
        return True
    low, high = max(0, begin - config.answer_window), end + config.answer_window
    window = words.hashes[low:high]
    return any(
        not any(run.begin <= low + place and low + place + len(answer) <= run.end for run in group)
        for answer in answers
        if len(answer)
        for place in _occurrences(window, answer)
    )


def _occurrences(window: np.ndarray, wanted: np.ndarray) -> list[int]:
    count = len(window) - len(wanted) + 1
    if count <= 0:
        return []
    same = np.ones(count, dtype=np.bool_)
    for place, word in enumerate(wanted):
        same &= window[place : place + count] == word
    return [int(place) for place in np.flatnonzero(same)]
