"""Rows filled exactly: packs again those rows that best fit left too empty, so that a source takes as few rows as its tokens need.

A row takes the longest piece that is left, and then, of all sums that the others can make, the largest that fits (Gupta & Ho 1999, "minimum
bin slack"). Which sums can be made is a subset sum over the lengths that are left and how many there are of each, a bit a sum. Of the ways to
make it, one takes pieces as long as can be, and keeps short ones for rows to come; another takes of each length its share of what is left, and
keeps the lengths mixed: where pieces are a tenth of a row or more, only that comes out. The rows with most padding are packed again, and more
of them until it does. Work is counted, not timed, so that the result is the same everywhere.
"""

from __future__ import annotations

import numba
import numpy as np

ROWS_BESIDE = 8  # packed again at first, beside those that must be
WORK_PER_PIECE = 1 << 9  # a unit is about a nanosecond
WORK_AT_LEAST = 1 << 22
WORDS_AT_MOST = 1 << 22  # of sums, in memory


def fill_exactly(lengths: np.ndarray, bins: np.ndarray, num_bins: int, capacity: int) -> tuple[np.ndarray, int]:
    """The bin of each piece, and the number of bins: as few as the sum of `lengths` needs, or, where that isn't found, those given.
    `lengths` falls from piece to piece, each in 1..capacity; int64."""
    total = int(lengths.sum())
    wanted = -(-total // capacity)
    if num_bins == wanted:
        return bins, num_bins
    work = WORK_AT_LEAST + WORK_PER_PIECE * lengths.size
    room = capacity - np.bincount(bins, weights=lengths, minlength=num_bins).astype(np.int64)
    emptiest = np.lexsort((-np.arange(num_bins), -room))  # the newest first among equals: it has the shortest pieces
    padding_beside = np.append(np.cumsum(room[emptiest][::-1])[::-1], 0)
    num_again = int(np.argmax(padding_beside <= wanted * capacity - total)) + ROWS_BESIDE
    possible = int((2 * lengths > capacity).sum()) <= wanted  # no two of these share a row
    while possible and work > 0:
        again = emptiest[:num_again]
        pool = np.flatnonzero(np.isin(bins, again))
        num_rows = wanted - (num_bins - again.size)
        for evenly in (False, True):
            rows, work = _pack(lengths[pool], capacity, num_rows, work, evenly)
            if rows.size:
                packed = bins.copy()
                packed[pool] = again[rows]
                return np.unique(packed, return_inverse=True)[1], wanted
        if num_again >= num_bins:
            break
        num_again *= 2
    return bins, num_bins


@numba.njit(cache=True)
def _pack(lengths: np.ndarray, capacity: int, num_rows: int, work: int, evenly: bool) -> tuple[np.ndarray, int]:
    """The row of each piece if `num_rows` rows are found to hold all, else nothing; and what is left of `work`."""
    nothing = np.empty(0, dtype=np.int64)
    spare = num_rows * capacity - lengths.sum()
    count = np.bincount(lengths)
    sizes = np.flatnonzero(count)  # rising
    words = capacity // 64 + 1
    if spare < 0 or (sizes.size + 1) * words > WORDS_AT_MOST:
        return nothing, work
    first = np.zeros(count.size, dtype=np.int64)  # the first piece of each length that has no row
    for length in range(count.size - 2, 0, -1):
        first[length] = first[length + 1] + count[length + 1]
    sums = np.zeros((sizes.size + 1, words), dtype=np.uint64)  # [k]: those that the k shortest lengths can make
    sums[0, 0] = 1
    sound = 0  # sums[: sound + 1] are up to date
    rows = np.empty(lengths.size, dtype=np.int64)
    longest = sizes.size - 1
    for row in range(num_rows):
        while longest >= 0 and count[sizes[longest]] == 0:
            longest -= 1
        if longest < 0:
            return rows, work
        size = sizes[longest]
        rows[first[size]] = row
        first[size] += 1
        count[size] -= 1
        for k in range(min(sound, longest), longest + 1):
            work -= _add_length(sums[k], sums[k + 1], sizes[k], min(count[sizes[k]], capacity // sizes[k]))
            if work <= 0:
                return nothing, work
        work -= 4 * (longest + 1)
        sound = longest + 1
        rest = capacity - size
        while not _has(sums[sound], rest):
            rest -= 1
            spare -= 1
        if spare < 0:
            return nothing, work
        rows_left = num_rows - row
        share = 0  # of the pieces from the longest to here, what this row has not taken of it; in pieces times `rows_left`
        for k in range(longest, -1, -1):
            if rest == 0:
                break
            size = sizes[k]
            share += count[size]
            taken, off = 0, -1
            for number in range(min(count[size], rest // size), -1, -1):
                now = abs(number * rows_left - share)
                if off >= 0 and now >= off:
                    break
                if _has(sums[k], rest - number * size):
                    taken, off = number, now
                    if not evenly:
                        break
            share -= taken * rows_left
            if taken:
                rows[first[size] : first[size] + taken] = row
                first[size] += taken
                count[size] -= taken
                rest -= taken * size
                sound = min(sound, k)
    return (rows if count.sum() == 0 else nothing), work


@numba.njit(cache=True)
def _has(sums: np.ndarray, number: int) -> bool:
    return bool(sums[number >> 6] >> np.uint64(number & 63) & np.uint64(1))


@numba.njit(cache=True)
def _add_length(before: np.ndarray, after: np.ndarray, length: int, count: int) -> int:
    """Set `after` to the sums of `before` with 0 to `count` pieces of `length` more. Returns the work done."""
    after[:] = before
    work = 8 + after.size
    times = 1
    while count > 0:
        times = min(times, count)
        count -= times
        words, bits = length * times >> 6, np.uint64(length * times & 63)
        for word in range(after.size - 1, words - 1, -1):  # from above: what is read has not been added to
            moved = after[word - words] << bits
            if bits and word > words:
                moved |= after[word - words - 1] >> (np.uint64(64) - bits)
            after[word] |= moved
        work += max(0, after.size - words)
        times *= 2
    return work
