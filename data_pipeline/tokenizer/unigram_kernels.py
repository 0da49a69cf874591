"""The inner loops of unigram training, compiled: all cuts of a word, its best cut, and what a piece is worth.

`ids[p, l]` is the piece of l + 1 bytes at byte p, or -1; `logp` its log probability. Every single byte of a word is a piece,
so each word has a cut.
"""

from __future__ import annotations

from math import exp, inf, log, log1p

import numba
import numpy as np


@numba.njit(cache=True)
def _log_add(a: float, b: float) -> float:
    if a < b:
        a, b = b, a
    return a if b == -inf else a + log1p(exp(b - a))


@numba.njit(cache=True)
def expect(starts: np.ndarray, counts: np.ndarray, ids: np.ndarray, logp: np.ndarray, expected: np.ndarray) -> None:
    """Add to `expected` how often each piece is expected, over all cuts of all words (forward and backward sums)."""
    widest = ids.shape[1]
    for word in range(counts.size):
        first, size = starts[word], starts[word + 1] - starts[word]
        ahead, behind = np.full(size + 1, -inf), np.full(size + 1, -inf)
        ahead[0] = behind[size] = 0.0
        for i in range(size):
            for width in range(1, min(widest, size - i) + 1):
                piece = ids[first + i, width - 1]
                if piece >= 0:
                    ahead[i + width] = _log_add(ahead[i + width], ahead[i] + logp[piece])
        for i in range(size - 1, -1, -1):
            for width in range(1, min(widest, size - i) + 1):
                piece = ids[first + i, width - 1]
                if piece >= 0:
                    behind[i] = _log_add(behind[i], behind[i + width] + logp[piece])
        for i in range(size):
            for width in range(1, min(widest, size - i) + 1):
                piece = ids[first + i, width - 1]
                if piece >= 0:
                    expected[piece] += counts[word] * exp(ahead[i] + logp[piece] + behind[i + width] - ahead[size])


@numba.njit(cache=True)
def _best_cut(first: int, size: int, ids: np.ndarray, logp: np.ndarray, whole: bool, best: np.ndarray, widths: np.ndarray) -> None:
    """Fill `best` (log probability of the likeliest cut up to each place) and `widths` (of its last piece); without `whole`
    the piece that is all of it is left out."""
    best[0] = 0.0
    for i in range(1, size + 1):
        best[i] = -inf
    for i in range(size):
        for width in range(1, min(ids.shape[1], size - i) + 1):
            piece = ids[first + i, width - 1]
            if piece >= 0 and (whole or width < size) and best[i] + logp[piece] > best[i + width]:
                best[i + width] = best[i] + logp[piece]
                widths[i + width] = width


@numba.njit(cache=True)
def count_best(starts: np.ndarray, counts: np.ndarray, ids: np.ndarray, logp: np.ndarray, frequency: np.ndarray) -> None:
    """Add to `frequency` how often each piece stands in the likeliest cuts of the words."""
    for word in range(counts.size):
        first, size = starts[word], starts[word + 1] - starts[word]
        best, widths = np.empty(size + 1), np.zeros(size + 1, dtype=np.int64)
        _best_cut(first, size, ids, logp, True, best, widths)
        end = size
        while end > 0:
            frequency[ids[first + end - widths[end], widths[end] - 1]] += counts[word]
            end -= widths[end]


@numba.njit(cache=True)
def losses(
    place: np.ndarray, length: np.ndarray, ids: np.ndarray, logp: np.ndarray, frequency: np.ndarray, total: float, loss: np.ndarray
) -> None:
    """How much log likelihood is lost where a piece gives way to its next best cut; infinite for bytes, minus infinite for
    pieces that no likeliest cut uses."""
    widest = ids.shape[1]
    best, widths = np.empty(widest + 1), np.zeros(widest + 1, dtype=np.int64)
    for piece in range(length.size):
        first, size = place[piece], length[piece]
        if size == 1:
            continue
        _best_cut(first, size, ids, logp, False, best, widths)
        if frequency[piece] == 0 or best[size] >= logp[piece]:
            loss[piece] = -inf
            continue
        parts, end = 0, size
        while end > 0:
            parts += 1
            end -= widths[end]
        without = 0.0
        end = size
        while end > 0:
            part = ids[first + end - widths[end], widths[end] - 1]
            without += log(frequency[part] + frequency[piece]) - log(total + frequency[piece] * (parts - 1))
            end -= widths[end]
        loss[piece] = frequency[piece] * (log(frequency[piece]) - log(total) - without)
