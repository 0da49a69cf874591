"""Of documents that say the same, which one stays: the best source's, then the longest, the lowest content key, the lowest id.

The content key comes before the id so that the choice doesn't depend on how the corpus is cut into files.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data_pipeline.store import DocumentStore


def keeper_order(*, priorities: np.ndarray, lengths: np.ndarray, keys: np.ndarray, ids: Sequence[np.ndarray]) -> np.ndarray:
    """int64[n]: rows from the one most worth keeping on. `keys`: uint64[n, 2]; `ids`: columns, the one that counts most first."""
    return np.lexsort((*reversed(ids), keys[:, 1], keys[:, 0], -lengths, priorities))


def keepers_of(store: DocumentStore, priorities: Sequence[str], *, among: np.ndarray | None = None) -> np.ndarray:
    """int64: numbers of all documents, or of those `among`, in the keepers' order. `priorities`: source names, best first."""
    if not store.num_documents:
        return np.zeros(0, dtype=np.int64)
    chosen = np.arange(store.num_documents) if among is None else among
    of_parts = [priorities.index(store.source(number)) for number in range(len(store.parts))]
    priority = np.repeat(of_parts, [part.num_documents for part in store.parts])[chosen]
    ids = _halves(np.concatenate([part.ids() for part in store.parts])[chosen])
    order = keeper_order(
        priorities=priority, lengths=store.lengths()[chosen], keys=_halves(store.keys()[chosen]), ids=[ids[:, 0], ids[:, 1]]
    )
    return chosen[order]


def _halves(keys: np.ndarray) -> np.ndarray:
    """uint8[n, 16] as big-endian [n, 2], in the order of the bytes."""
    return np.ascontiguousarray(keys).view(">u8")
