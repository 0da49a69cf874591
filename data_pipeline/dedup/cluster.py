"""Star clusters: a document goes only if it is near a document that stays."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from data_pipeline.dedup.candidates import Candidates
from data_pipeline.dedup.config import MinHashConfig
from data_pipeline.dedup.minhash import least_agreement
from data_pipeline.dedup.verify import Verifier

LOOK_AHEAD_BYTES = 4 << 20
NEAR = np.dtype([("removed", "<i8"), ("kept", "<i8"), ("jaccard", "<f8")])


@dataclass(slots=True)
class Work:
    """What the search did: pairs that shared a band with a kept document, pairs that their sketches told apart, pairs
    compared word by word, and those of them that were similar enough."""

    candidate_pairs: int = 0
    told_apart_by_sketch: int = 0
    compared_pairs: int = 0
    similar_pairs: int = 0


def star_clusters(
    candidates: Candidates, sketches: np.ndarray, lengths: np.ndarray, verifier: Verifier, config: MinHashConfig, *, num_fixed: int = 0
) -> tuple[np.ndarray, Work]:
    """A NEAR for each document that goes, in order, by places in the keepers' order.

    Each document is compared, in that order, with the kept ones before it, and goes with the first that is similar
    enough. Chains therefore never merge: connected components would join a to c over b however different they are.
    sketches: uint8[candidates.ranks, bands * rows]; lengths: bytes, int64[n]. The first `num_fixed` documents stay whatever they are like.
    """
    least = least_agreement(config)
    removed, kept_of, similarities = array("q"), array("q"), array("d")
    work = Work()
    first = int(np.searchsorted(candidates.ranks, num_fixed))
    for rank in candidates.ranks[:first].tolist():
        candidates.keep(rank)
    for ahead in _look_ahead(candidates.ranks[first:], lengths):
        verifier.load(ahead)
        for rank in ahead:
            others = candidates.kept_before(rank)
            work.candidate_pairs += len(others)
            if len(others):
                agreeing = np.count_nonzero(sketches[candidates.places(others)] == sketches[candidates.places(rank)], axis=1)
                others = others[agreeing >= least]
                work.told_apart_by_sketch += len(agreeing) - len(others)
            kept, similarity, compared = verifier.first_match(rank, others.tolist(), config.threshold) if len(others) else (None, 0.0, 0)
            work.compared_pairs += compared
            if kept is None:
                candidates.keep(rank)
            else:
                work.similar_pairs += 1
                removed.append(rank)
                kept_of.append(kept)
                similarities.append(similarity)
    near = np.empty(len(removed), dtype=NEAR)
    near["removed"], near["kept"], near["jaccard"] = removed, kept_of, similarities
    return near, work


def _look_ahead(ranks: np.ndarray, lengths: np.ndarray) -> Iterator[list[int]]:
    """Successive ranks whose texts are read at once: at most LOOK_AHEAD_BYTES of them, and at least one."""
    chunk: list[int] = []
    held_bytes = 0
    for rank in ranks.tolist():
        if chunk and held_bytes + lengths[rank] > LOOK_AHEAD_BYTES:
            yield chunk
            chunk, held_bytes = [], 0
        chunk.append(rank)
        held_bytes += int(lengths[rank])
    if chunk:
        yield chunk
