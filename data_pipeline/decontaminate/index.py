"""Evaluation items as numbers: where every run of n words of them is found again, and the short ones as wholes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from data_pipeline.decontaminate.config import DecontaminateConfig
from data_pipeline.decontaminate.items import Item, without_label
from data_pipeline.words import code_points, grams, segment

_APOSTROPHES = re.compile("(?<=\\w)['\u2019\u02bc`](?=\\w)")
_INSIDE_WORDS = re.compile("(?<=\\w)['\u2019\u02bc`\\-\u2010\u2011/.](?=\\w)")
_TABLE_SLOTS_A_KEY = 16


@dataclass(frozen=True, slots=True)
class Passage:
    """Words in a row that must not be found: uint64[words], by hash; of which field, and of which items. `needs_answer`: found as a
    whole, they count only beside an answer. `has_answer`: of each item, whether its answer is among them."""

    words: np.ndarray
    field: str
    items: tuple[int, ...]
    needs_answer: bool
    has_answer: dict[int, bool]


class Keys:
    """Numbers and where each of them stands. A table of bits tells at once, for most numbers, that they aren't there."""

    def __init__(self, numbers: np.ndarray, passages: np.ndarray, places: np.ndarray) -> None:
        order = np.argsort(numbers, kind="stable")
        self.numbers, self.firsts = np.unique(numbers[order], return_index=True)
        self.firsts = np.append(self.firsts, len(order))
        self.passages, self.places = passages[order], places[order]
        bits = max(16, (_TABLE_SLOTS_A_KEY * max(1, len(self.numbers))).bit_length())
        self._shift = np.uint64(64 - bits)
        self._table = np.zeros(1 << bits, dtype=np.bool_)
        self._table[self.numbers >> self._shift] = True

    def __len__(self) -> int:
        return len(self.numbers)

    def find(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(place among `numbers`, passage, place within it), int64, for every number that is a key, once for each place it has."""
        where = np.flatnonzero(self._table[numbers >> self._shift])
        nothing = np.empty(0, dtype=np.int64)
        if not len(where) or not len(self.numbers):
            return nothing, nothing, nothing
        key = np.minimum(np.searchsorted(self.numbers, numbers[where]), len(self.numbers) - 1)
        real = self.numbers[key] == numbers[where]
        where, key = where[real], key[real]
        counts = self.firsts[key + 1] - self.firsts[key]
        begins = np.cumsum(counts) - counts
        entries = np.arange(int(counts.sum())) - np.repeat(begins - self.firsts[key], counts)
        return np.repeat(where, counts), self.passages[entries], self.places[entries]


@dataclass(slots=True)
class Index:
    """`runs`: every run of `ngram` words; `wholes`: the first `min_words` of every shorter passage. `answers`: of each item, the words
    of each answer. `too_short`: items that are looked for by nothing; `stopped`: runs that don't count, as template or by stop texts."""

    items: list[Item]
    passages: list[Passage]
    runs: Keys
    wholes: Keys
    answers: list[list[np.ndarray]]
    too_short: list[Item] = field(default_factory=list)
    stopped: int = 0


def make_index(items: Sequence[Item], config: DecontaminateConfig, *, stop_texts: Sequence[str] = ()) -> Index:
    """Index all items; a passage that several have (a text with many questions) is held once."""
    texts, owners = [], []
    for number, item in enumerate(items):
        for part in _parts(item):
            for spelling in _spellings(part.text):
                texts.append(spelling)
                owners.append((number, part))
    hashed = hash_texts(texts)
    answers = _in_groups([list(item.answers) for item in items])
    found: dict[bytes, tuple[np.ndarray, str, dict[int, bool], bool]] = {}
    indexed: set[int] = set()
    for words, (number, part) in zip(hashed, owners):
        if len(words) < (config.ngram if part.only_long else config.min_words):
            continue
        needs_answer = len(words) < config.ngram and part.is_question and any(len(answer) for answer in answers[number])
        entry = found.setdefault(words.tobytes() + bytes([needs_answer]), (words, part.field, {}, needs_answer))
        entry[2].setdefault(number, part.has_answer)
        indexed.add(number)
    passages = [Passage(words, name, tuple(owned), needs, owned) for words, name, owned, needs in found.values()]
    stops = hash_texts(list(stop_texts))
    runs, stopped = _runs(passages, items, config, stops)
    wholes, stopped_too = _wholes(passages, config, stops)
    too_short = [item for number, item in enumerate(items) if number not in indexed]
    return Index(list(items), passages, runs, wholes, answers, too_short, stopped + stopped_too)


def hash_texts(texts: Sequence[str]) -> list[np.ndarray]:
    """The word hashes of each text, as `words.segment` gives them, in one pass over all."""
    out: list[np.ndarray] = []
    batch: list[str] = []
    held = 0
    for text in texts:
        batch.append(text.replace("_", " ").lower())
        held += len(batch[-1])
        if held > 1 << 20:
            out += _hash_batch(batch)
            batch, held = [], 0
    return out + _hash_batch(batch)


def _hash_batch(lowered: Sequence[str]) -> list[np.ndarray]:
    if not lowered:
        return []
    found = segment(code_points("\n".join(lowered)))
    ends = np.cumsum([len(text) + 1 for text in lowered])
    return np.split(found.hashes, np.searchsorted(found.begins, ends[:-1]))


class _Part(NamedTuple):
    """`only_long`: says nothing by itself unless it is as long as a run; `has_answer`: a right answer is part of it."""

    field: str
    text: str
    is_question: bool = False
    only_long: bool = False
    has_answer: bool = False


def _parts(item: Item) -> Iterator[_Part]:
    """Everything that a document might hold of the item, as a prompt would put it together."""
    for name, question in item.questions:
        yield _Part(name, question, is_question=True)
        if (bare := without_label(question)) != question:
            yield _Part(name, bare, is_question=True)
        for answer in item.answers:
            yield _Part(f"{name}, answer", f"{bare} {answer}", has_answer=True)
        if item.choices:
            yield _Part(f"{name}, choices", f"{bare} {' '.join(item.choices)}")
    for answer in item.answers:
        yield _Part("answer", answer, only_long=True, has_answer=True)
    for choice in item.choices:
        yield _Part("choice", choice, only_long=True)


def _spellings(text: str) -> list[str]:
    """The text; with don't as dont; with well-known and 3.5 in one piece too: what is left of it where punctuation was taken out."""
    return list(dict.fromkeys([text, _APOSTROPHES.sub("", text), _INSIDE_WORDS.sub("", text)]))


def _in_groups(groups: Sequence[Sequence[str]]) -> list[list[np.ndarray]]:
    flat = iter(hash_texts([text for group in groups for text in group]))
    return [[next(flat) for _ in group] for group in groups]


def _runs(passages: Sequence[Passage], items: Sequence[Item], config: DecontaminateConfig, stops: Sequence[np.ndarray]) -> tuple[Keys, int]:
    """The runs of all passages, without those that don't count, and the number of these."""
    numbers = [grams(passage.words, config.ngram) for passage in passages]
    lengths = np.array([len(part) for part in numbers], dtype=np.int64)
    joined = np.concatenate(numbers) if numbers else np.empty(0, dtype=np.uint64)
    of = np.repeat(np.arange(len(passages)), lengths)
    places = np.arange(len(joined)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    out = np.isin(joined, _stop_grams(stops, config.ngram)) | np.isin(joined, _templates(joined, of, passages, items, config))
    return Keys(joined[~out], of[~out], places[~out]), len(np.unique(joined[out]))


def _templates(
    numbers: np.ndarray, of: np.ndarray, passages: Sequence[Passage], items: Sequence[Item], config: DecontaminateConfig
) -> np.ndarray:
    """The runs that stand in more than `max_items_per_ngram` items of one evaluation. A passage that many items share counts as one:
    it is their common text, no template."""
    order = np.argsort(numbers, kind="stable")
    ordered = numbers[order]
    begins = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)])
    often = np.diff(np.append(begins, len(ordered))) > config.max_items_per_ngram
    found = []
    for begin in begins[often].tolist():
        first_items: dict[str, set[int]] = {}
        end = int(np.searchsorted(ordered, ordered[begin], side="right"))
        for passage in of[order[begin:end]].tolist():
            first = passages[passage].items[0]
            first_items.setdefault(items[first].evaluation, set()).add(first)
        if max(map(len, first_items.values())) > config.max_items_per_ngram:
            found.append(ordered[begin])
    return np.array(found, dtype=np.uint64)


def _wholes(passages: Sequence[Passage], config: DecontaminateConfig, stops: Sequence[np.ndarray]) -> tuple[Keys, int]:
    """The first words of the passages that are shorter than a run."""
    short = [number for number, passage in enumerate(passages) if len(passage.words) < config.ngram]
    kept, stopped = [], 0
    stop_grams = {length: _stop_grams(stops, length) for length in {len(passages[number].words) for number in short}} if stops else {}
    for number in short:
        words = passages[number].words
        if stops and np.isin(grams(words, len(words)), stop_grams[len(words)])[0]:
            stopped += 1
        else:
            kept.append(number)
    keys = [grams(passages[number].words[: config.min_words], config.min_words) for number in kept]
    joined = np.concatenate(keys) if keys else np.empty(0, dtype=np.uint64)
    return Keys(joined, np.array(kept, dtype=np.int64), np.zeros(len(kept), dtype=np.int64)), stopped


def _stop_grams(stops: Sequence[np.ndarray], length: int) -> np.ndarray:
    found = [grams(words, length) for words in stops]
    return np.unique(np.concatenate(found)) if found else np.empty(0, dtype=np.uint64)
