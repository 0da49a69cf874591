"""Best-fit decreasing in O(N log S): the compiled inner loop of packing (Ding et al. 2024, arXiv 2404.10830)."""

from __future__ import annotations

import numba
import numpy as np


@numba.njit(cache=True)
def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """The bin of each piece, and the number of bins. `lengths` falls from piece to piece, each in 1..capacity.

    A piece goes into the fullest bin that has room, the newest among equally full ones; else into a new bin. Bins are
    kept in a linked list for each remaining capacity; a binary tree over the capacities finds the smallest that serves.
    """
    leaves = 1
    while leaves < capacity + 1:
        leaves *= 2
    occupied = np.zeros(2 * leaves, dtype=np.int64)  # bins below each node; the leaf of remaining capacity c is leaves + c
    newest = np.full(capacity + 1, -1, dtype=np.int64)
    below = np.empty(lengths.size, dtype=np.int64)
    bins = np.empty(lengths.size, dtype=np.int64)
    num_bins = 0
    for i in range(lengths.size):
        length = lengths[i]
        node = leaves + length
        while node > 1 and occupied[node] == 0:  # the next occupied leaf to the right: up to a right sibling, then down
            while node > 1 and node % 2 == 1:
                node //= 2
            if node == 1:
                break
            node += 1
        if node == 1 or occupied[node] == 0:
            chosen, room = num_bins, capacity
            num_bins += 1
        else:
            while node < leaves:
                node = 2 * node if occupied[2 * node] else 2 * node + 1
            room = node - leaves
            chosen = newest[room]
            newest[room] = below[chosen]
            while node >= 1:
                occupied[node] -= 1
                node //= 2
        bins[i] = chosen
        room -= length
        below[chosen] = newest[room]
        newest[room] = chosen
        node = leaves + room
        while node >= 1:
            occupied[node] += 1
            node //= 2
    return bins, num_bins
