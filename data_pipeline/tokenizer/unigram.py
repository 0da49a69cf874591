"""Byte-level unigram, trained (Kudo 2018, as SentencePiece does it; the alphabet is the 256 bytes, so nothing is unknown).

Start from the most frequent pieces of words, fit their probabilities by expectation maximisation over all cuts of all
words, drop the pieces whose loss costs least, and repeat. Words are counted, sorted and walked one after another, so the
result is a function of the multiset of documents: not of their order, of hash seeds or of the number of threads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np

MAX_PIECE_BYTES = 16
MAX_WORDS = 300_000  # different words that are learned from: the most frequent ones
SEEDS_PER_TOKEN = 25
KEPT_PER_ROUND = 0.75
OVERSHOOT = 1.1  # rounds end at so many times the wanted size; the last cut is by probability
_STEPS_PER_ROUND = 2
_FLOOR = 0.5  # a piece that is expected less often is dropped


def learn_pieces(words: Counter[bytes], size: int) -> list[tuple[bytes, float]]:
    """The pieces and their log probabilities, likeliest first: the 256 bytes, and others up to `size` in all (fewer where the
    words have no more). `words`: how often each word occurs."""
    model = _Model(words, num_seeds=min(1_000_000, SEEDS_PER_TOKEN * size))
    target = int(OVERSHOOT * size)
    while True:
        for _ in range(_STEPS_PER_ROUND):
            model.fit()
        if model.logp.size <= target:
            break
        model.prune(max(target, int(KEPT_PER_ROUND * model.logp.size)))
    pieces = model.pieces()
    lowest = min((score for _, score in pieces), default=0.0)
    known = {piece for piece, _ in pieces}
    unseen = [(bytes([byte]), lowest - 1.0) for byte in range(256) if bytes([byte]) not in known]
    alphabet = [*(piece for piece in pieces if len(piece[0]) == 1), *unseen]
    longer = sorted((piece for piece in pieces if len(piece[0]) > 1), key=lambda piece: (-piece[1], piece[0]))
    return sorted([*alphabet, *longer[: max(0, size - 256)]], key=lambda piece: (-piece[1], piece[0]))


class _Model:
    """Pieces under training. `ids[p, l]`: the piece of l + 1 bytes that begins at byte p of the words, -1 where there is none."""

    def __init__(self, words: Counter[bytes], *, num_seeds: int) -> None:
        chosen = sorted(sorted(words.items(), key=lambda item: (-item[1], item[0]))[:MAX_WORDS])
        self._text = np.frombuffer(b"".join(word for word, _ in chosen), dtype=np.uint8)
        lengths = np.array([len(word) for word, _ in chosen], dtype=np.int64)
        self._starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
        self._counts = np.array([count for _, count in chosen], dtype=np.float64)
        self._find_seeds(lengths, num_seeds)

    def _find_seeds(self, lengths: np.ndarray, num_seeds: int) -> None:
        left = np.repeat(self._starts[1:], lengths) - np.arange(self._text.size)  # bytes to the end of the word
        weight = np.repeat(self._counts, lengths)
        self._ids = np.full((self._text.size, MAX_PIECE_BYTES), -1, dtype=np.int32)
        found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # of each length: place, frequency, number within the length
        keys = np.zeros(self._text.size, dtype=np.uint64)
        for length in range(1, MAX_PIECE_BYTES + 1):
            places = np.flatnonzero(left >= length)
            if not places.size:
                break
            keys[places] = _mixed(keys[places] + self._text[places + length - 1] + np.uint64(1))
            _, first, inverse = np.unique(keys[places], return_index=True, return_inverse=True)
            frequency = np.bincount(inverse, weights=weight[places])
            self._ids[places, length - 1] = inverse
            found.append((places[first], frequency, np.arange(first.size)))
        place, frequency, number = (np.concatenate(part) for part in zip(*found)) if found else (np.zeros(0, dtype=np.int64),) * 3
        lengths = np.repeat(np.arange(1, len(found) + 1), [part[0].size for part in found])
        score = np.where(lengths == 1, np.inf, np.where(frequency >= 2, frequency * lengths, 0))
        order = np.lexsort((place, lengths, -score))
        order = np.sort(order[: max(num_seeds, 256)][score[order[: max(num_seeds, 256)]] > 0])
        for at in range(1, len(found) + 1):
            table = np.full(found[at - 1][0].size, -1, dtype=np.int32)
            here = lengths[order] == at
            table[number[order[here]]] = np.flatnonzero(here)
            column = self._ids[:, at - 1]
            column[column >= 0] = table[column[column >= 0]]
        self._place, self._length = place[order].astype(np.int64), lengths[order].astype(np.int64)
        weights = frequency[order] * self._length
        self.logp = np.log(weights / weights.sum())

    def fit(self) -> None:
        """One step of expectation maximisation; pieces that are hardly expected go."""
        expected = np.zeros(self.logp.size)
        _kernels().expect(self._starts, self._counts, self._ids, self.logp, expected)
        kept = (expected >= _FLOOR) | (self._length == 1)
        self._keep(kept)
        expected = np.maximum(expected[kept], _FLOOR)
        self.logp = _digamma(expected) - _digamma(np.array([expected.sum()]))

    def prune(self, size: int) -> None:
        """Keep the bytes and the pieces without which the likelihood falls most."""
        frequency = np.zeros(self.logp.size)
        _kernels().count_best(self._starts, self._counts, self._ids, self.logp, frequency)
        loss = np.full(self.logp.size, np.inf)
        _kernels().losses(self._place, self._length, self._ids, self.logp, frequency, frequency.sum(), loss)
        order = np.lexsort((np.arange(loss.size), -loss))[:size]
        kept = np.zeros(loss.size, dtype=bool)
        kept[order] = True
        self._keep(kept & (loss > -np.inf))

    def _keep(self, kept: np.ndarray) -> None:
        number = np.where(kept, np.cumsum(kept) - 1, -1).astype(np.int32)
        self._ids = np.where(self._ids >= 0, number[self._ids], -1)
        self._place, self._length, self.logp = self._place[kept], self._length[kept], self.logp[kept]

    def pieces(self) -> list[tuple[bytes, float]]:
        spans = zip(self._place.tolist(), self._length.tolist(), self.logp.tolist())
        return [(self._text[place : place + length].tobytes(), round(score, 6)) for place, length, score in spans]


def count_words(texts: Iterable[str], pre_tokenizer: Any, byte_of: dict[str, int]) -> Counter[bytes]:
    """How often each pre-token occurs; `byte_of`: the byte that each character of its spelling stands for."""
    spelled: Counter[str] = Counter()
    for text in texts:
        spelled.update(word for word, _ in pre_tokenizer.pre_tokenize_str(text))
    return Counter({bytes(byte_of[character] for character in word): count for word, count in spelled.items()})


def _mixed(keys: np.ndarray) -> np.ndarray:
    """A bijective mix of 64 bits (splitmix64): different strings get different keys, but for about n^2 / 2^65 of n."""
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return keys ^ (keys >> np.uint64(31))  # type: ignore[no-any-return]


def _digamma(values: np.ndarray) -> np.ndarray:
    """By the recurrence up to 7 and the asymptotic series (Abramowitz and Stegun 6.3.5, 6.3.18)."""
    x, out = values.astype(np.float64), np.zeros(values.shape)
    while (low := x < 7).any():
        out = np.where(low, out - 1 / x, out)
        x = np.where(low, x + 1, x)
    square = 1 / (x * x)
    series: np.ndarray = out + np.log(x) - 0.5 / x - square * (1 / 12 - square * (1 / 120 - square / 252))
    return series


@cache
def _kernels() -> Any:
    from data_pipeline.tokenizer import unigram_kernels  # compiles on first use

    return unigram_kernels
