"""How well near-dedup did: all pairs of a sample of documents compared word by word, beside what MinHash looked at and what stayed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from data_pipeline.dedup.config import MinHashConfig
from data_pipeline.dedup.minhash import band_keys, catch_probability, signatures
from data_pipeline.dedup.shingles import shingle_set
from data_pipeline.dedup.stage import REASONS, Duplicates, named
from data_pipeline.split import hash_fractions
from data_pipeline.store import DocumentStore

MAX_COMPARISONS = 1 << 30  # documents x shingles of the sample: some seconds
MAX_SAMPLE_BYTES = 32 << 20
_NUM_EXAMPLES = 5


@dataclass
class Audit:
    """Counts of pairs within the sample. `similar`: true Jaccard >= threshold. `found`: those of them that share a band; `missed`:
    the others. `looked_at`: all that share a band. `removed`: documents of the sample that went as near duplicates, and of them
    `removed_wrongly` with a true Jaccard below the threshold to the one that stayed. `left`: similar pairs of which both stayed."""

    documents: int
    of_documents: int
    pairs: int
    threshold: float
    similar: int
    found: int
    missed: int
    looked_at: int
    left: int
    removed: int
    removed_wrongly: int
    expected_recall: float | None
    missed_examples: list[dict[str, Any]] = field(default_factory=list)

    @property
    def recall(self) -> float | None:
        return self.found / self.similar if self.similar else None

    @property
    def precision_of_bands(self) -> float | None:
        return self.found / self.looked_at if self.looked_at else None

    @property
    def precision(self) -> float | None:
        return 1 - self.removed_wrongly / self.removed if self.removed else None

    def to_dict(self) -> dict[str, Any]:
        shares = {name: getattr(self, name) for name in ("recall", "precision_of_bands", "precision")}
        return {**asdict(self), **{name: None if share is None else round(share, 6) for name, share in shares.items()}}


def audit(store: DocumentStore, duplicates: Duplicates, config: MinHashConfig) -> Audit | None:
    """Compare all pairs of at most `config.audit_documents` documents, those with the lowest hashes of their text; None where it is
    off. Documents that went as exact copies or by a field are left out, since nothing had to be found of them, and so are those of
    fewer than `ngram` words."""
    if not config.audit_documents or not store.num_documents:
        return None
    near = duplicates.removals[duplicates.removals["reason"] == REASONS.index("near")]
    among = np.ones(store.num_documents, dtype=bool)
    among[duplicates.removals["removed"]] = False
    among[near["removed"]] = True
    chosen, sets = _sample(store, np.flatnonzero(among), config)
    gone = np.isin(chosen, near["removed"])
    keys = band_keys(signatures(store.texts_of(chosen.tolist()), config)[0], config)
    total = Audit(chosen.size, int(among.sum()), chosen.size * (chosen.size - 1) // 2, config.threshold, 0, 0, 0, 0, 0, 0, 0, None)
    chances: list[float] = []
    for first, similarity in enumerate(_similarities(sets)):
        shares = (keys[first + 1 :] == keys[first]).any(axis=1)
        similar = similarity >= config.threshold
        total.similar += int(similar.sum())
        total.found += int((similar & shares).sum())
        total.looked_at += int(shares.sum())
        total.left += int((similar & ~gone[first + 1 :]).sum()) if not gone[first] else 0
        chances += [
            catch_probability(float(j), num_bands=config.num_bands, rows_per_band=config.rows_per_band) for j in similarity[similar]
        ]
        for other in np.flatnonzero(similar & ~shares)[: _NUM_EXAMPLES - len(total.missed_examples)].tolist():
            pair = [named(store, int(chosen[first])), named(store, int(chosen[first + 1 + other]))]
            total.missed_examples.append({"documents": pair, "jaccard": round(float(similarity[other]), 6)})
    total.missed = total.similar - total.found
    total.expected_recall = round(float(np.mean(chances)), 6) if chances else None
    removals = near[np.isin(near["removed"], chosen) & (near["kept"] >= 0)]
    total.removed = len(removals)
    total.removed_wrongly = sum(_jaccard(store, config, *pair) < config.threshold for pair in zip(removals["removed"], removals["kept"]))
    return total


def _sample(store: DocumentStore, numbers: np.ndarray, config: MinHashConfig) -> tuple[np.ndarray, list[np.ndarray]]:
    """(ascending numbers, shingle set of each): lowest hashes first, within the bounds on text and comparisons."""
    order = np.argsort(hash_fractions(store.keys()[numbers], salt="dedup audit"), kind="stable")
    lengths = store.lengths()
    chosen: dict[int, np.ndarray] = {}
    num_bytes = num_shingles = 0
    for number in numbers[order].tolist():
        num_bytes += int(lengths[number])
        if len(chosen) >= config.audit_documents or num_bytes > MAX_SAMPLE_BYTES:
            break
        shingles = shingle_set(store.texts_of([number])[0], config.ngram)
        num_shingles += shingles.size
        if (len(chosen) + 1) * num_shingles > MAX_COMPARISONS:
            break
        if shingles.size:
            chosen[number] = shingles
    ascending = np.array(sorted(chosen), dtype=np.int64)
    return ascending, [chosen[number] for number in ascending.tolist()]


def _similarities(sets: list[np.ndarray]) -> Any:
    """For each set, its Jaccard similarity to every later one; float64. Exact: |a and b| is counted, shingle by shingle."""
    if not sets:
        return
    sizes = np.array([shingles.size for shingles in sets])
    _, places = np.unique(np.concatenate(sets), return_inverse=True)
    begins = np.cumsum(sizes) - sizes
    marked = np.zeros(int(places.max()) + 1, dtype=np.uint8)
    for number, (begin, size) in enumerate(zip(begins.tolist(), sizes.tolist())):
        mine = places[begin : begin + size]
        if number == len(sets) - 1:
            yield np.zeros(0)
            return
        marked[mine] = 1
        common = np.add.reduceat(marked[places[begin + size :]], begins[number + 1 :] - (begin + size), dtype=np.int64)
        marked[mine] = 0
        yield common / (size + sizes[number + 1 :] - common)


def _jaccard(store: DocumentStore, config: MinHashConfig, one: int, other: int) -> float:
    a, b = (set(shingle_set(store.texts_of([int(number)])[0], config.ngram).tolist()) for number in (one, other))
    return len(a & b) / len(a | b)
