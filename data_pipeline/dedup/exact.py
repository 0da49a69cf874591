"""Documents with the same bytes."""

from __future__ import annotations

import numpy as np


def first_of_equals(keys: np.ndarray) -> np.ndarray:
    """For each row of keys (uint64[n, 2], in the order of preference), the number of the first row that equals it: int64[n]."""
    number = np.arange(len(keys))
    by_key = np.lexsort((number, keys[:, 1], keys[:, 0]))
    ordered = keys[by_key]
    begins = np.ones(len(keys), dtype=np.bool_)
    begins[1:] = np.any(ordered[1:] != ordered[:-1], axis=1)
    first = np.empty(len(keys), dtype=np.int64)
    first[by_key] = by_key[np.flatnonzero(begins)[np.cumsum(begins) - 1]]
    return first
