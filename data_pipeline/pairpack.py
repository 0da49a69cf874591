"""Best fit in two dimensions: the compiled inner loop of packing pairs."""

from __future__ import annotations

import numba
import numpy as np

MAX_OPEN_ROWS = 512  # rows that pairs may still go into; the fullest is closed for another


@numba.njit(cache=True)
def best_fit_pairs(source: np.ndarray, target: np.ndarray, source_room: int, target_room: int) -> tuple[np.ndarray, int]:
    """The row of each pair, in the given order, and the number of rows. Each pair fits an empty row.

    A pair goes into the row that is fullest afterwards (room on both sides counted in shares of a whole row), the oldest among equals, of
    the open rows that have room for both sides; else into a new one.
    """
    rows = np.empty(source.size, dtype=np.int64)
    number = np.empty(MAX_OPEN_ROWS, dtype=np.int64)
    left_source = np.empty(MAX_OPEN_ROWS, dtype=np.int64)
    left_target = np.empty(MAX_OPEN_ROWS, dtype=np.int64)
    num_open = num_rows = 0
    for i in range(source.size):
        chosen, least = -1, np.int64(0)
        for k in range(num_open):
            if left_source[k] >= source[i] and left_target[k] >= target[i]:
                left = left_source[k] * target_room + left_target[k] * source_room
                if chosen < 0 or left < least:
                    chosen, least = k, left
        if chosen < 0:
            if num_open == MAX_OPEN_ROWS:
                fullest = 0
                for k in range(1, num_open):
                    if (
                        left_source[k] * target_room + left_target[k] * source_room
                        < left_source[fullest] * target_room + left_target[fullest] * source_room
                    ):
                        fullest = k
                chosen = fullest
            else:
                chosen = num_open
                num_open += 1
            number[chosen], left_source[chosen], left_target[chosen] = num_rows, source_room, target_room
            num_rows += 1
        rows[i] = number[chosen]
        left_source[chosen] -= source[i]
        left_target[chosen] -= target[i]
        if left_source[chosen] < 2 or left_target[chosen] < 2:  # a side has a token and its end
            num_open -= 1
            number[chosen], left_source[chosen], left_target[chosen] = number[num_open], left_source[num_open], left_target[num_open]
    return rows, num_rows
