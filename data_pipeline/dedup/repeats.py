"""Repeats between documents: lines, paragraphs or runs of words that stand elsewhere, and the cuts that take them out.

Every unit of the corpus (a line, a run of `min_words` words) becomes a pair: a hash of it, and where it stands. Sorting the pairs on disk
(external.py) brings equal ones together, as a suffix array would bring together suffixes with so many words in common, but a range at a
time. Where it stands is a number that orders all units: documents by how much they are worth keeping, units as they follow in them. Of
equal units the first stays.

Memory: one run and one range of the sort (some 30 MB each with what sorting takes, or 1 % of the corpus from some GB on), and 8 bytes for
each repeated unit. Disk: 16 bytes a unit while it works.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from data_pipeline.dedup.config import LinesConfig, SubstringConfig
from data_pipeline.dedup.external import ranges, repeated, write_runs
from data_pipeline.filters.segments import PARAGRAPH_END
from data_pipeline.pool import Report
from data_pipeline.store import Part
from data_pipeline.words import code_points, grams, places_before_lowering, segment

PLACE_BITS = 30  # units of one document; what is left of 64 bits numbers documents
CUT = np.dtype([("rank", "<i8"), ("begin", "<i8"), ("end", "<i8")])  # units [begin, end) of the document of that rank


@dataclass(frozen=True)
class ScanJob:
    """The units of a part's documents. `ranks`: of each, its place in the keepers' order; -1 for one that went before."""

    part: Path
    ranks: np.ndarray
    config: LinesConfig | SubstringConfig
    path: Path


def scan(job: ScanJob, report: Report) -> None:
    """In a worker: write the part's pairs, unless they are there."""
    part = Part(job.part)
    if job.path.exists():
        report(part.text_bytes)
        return
    with write_runs(job.path) as runs:
        for number, rank in enumerate(job.ranks.tolist()):
            if rank >= 0:
                keys, places = units(part.text(number), job.config)
                if len(keys):
                    runs.add(keys, places.astype(np.uint64) | np.uint64(rank << PLACE_BITS))
            report(int(part.offsets[number + 1] - part.offsets[number]))


def units(text: str, config: LinesConfig | SubstringConfig) -> tuple[np.ndarray, np.ndarray]:
    """(uint64 keys, int64 numbers within the text) of the units that count."""
    if isinstance(config, SubstringConfig):
        keys = grams(segment(code_points(text)).hashes, config.min_words)
        return keys, np.arange(len(keys))
    found = [
        (number, xxhash.xxh3_64_intdigest(piece.encode("utf-8", "surrogatepass")))
        for number, (begin, end) in enumerate(line_spans(text, config.unit))
        if len(piece := text[begin:end].strip()) >= config.min_chars
    ]
    return np.array([key for _, key in found], dtype=np.uint64), np.array([number for number, _ in found], dtype=np.int64)


def line_spans(text: str, unit: str) -> list[tuple[int, int]]:
    """[begin, end) of each line or paragraph, its end or the blank lines after it included: together they are the text."""
    if unit == "line":
        lengths = [len(line) + 1 for line in text.split("\n")]
        ends = np.cumsum(lengths).tolist()
    else:
        ends = [*(found.end() for found in PARAGRAPH_END.finditer(text)), len(text)]
    return list(zip([0, *ends], [min(end, len(text)) for end in ends]))


def find_cuts(paths: list[Path], config: LinesConfig | SubstringConfig) -> np.ndarray:
    """CUTs, by rank and place, from the pairs of all parts.

    Of a run of words, every word goes that stands in a later copy and not in a first one: a text that repeats itself keeps one turn.
    """
    length, keep = (config.min_words, 1) if isinstance(config, SubstringConfig) else (1, config.max_copies)
    found = [repeated(pairs, keep=keep) for pairs in ranges(paths)]
    empty = np.empty(0, dtype=np.uint64)
    later = _merged(np.concatenate([empty, *(later for later, _ in found)]), length)
    firsts = _merged(np.concatenate([empty, *(firsts for _, firsts in found)]), length) if length > 1 else np.empty((0, 2), dtype=np.int64)
    spans = _without(later, firsts)
    cuts = np.zeros(len(spans), dtype=CUT)
    cuts["rank"] = spans[:, 0] >> PLACE_BITS
    cuts["begin"] = spans[:, 0] & ((1 << PLACE_BITS) - 1)
    cuts["end"] = cuts["begin"] + spans[:, 1] - spans[:, 0]
    return cuts


def _merged(wheres: np.ndarray, length: int) -> np.ndarray:
    """int64[n, 2]: what the spans [where, where + length) cover, as disjoint spans in order. Those of two documents never touch."""
    if not len(wheres):
        return np.empty((0, 2), dtype=np.int64)
    ordered = np.sort(wheres).astype(np.int64)
    gaps = np.flatnonzero(np.diff(ordered) > length)
    return np.stack([ordered[np.append(0, gaps + 1)], ordered[np.append(gaps, len(ordered) - 1)] + length], axis=1)


def _without(spans: np.ndarray, others: np.ndarray) -> np.ndarray:
    """What of the spans the others don't cover; both disjoint and in order."""
    if not len(spans) or not len(others):
        return spans
    edges = np.unique(np.concatenate([spans.reshape(-1), others.reshape(-1)]))
    stays = _inside(edges[:-1], spans) & ~_inside(edges[:-1], others)
    change = np.flatnonzero(np.diff(np.concatenate([[False], stays, [False]]).astype(np.int8)))
    return np.stack([edges[change[::2]], edges[change[1::2]]], axis=1)


def _inside(points: np.ndarray, spans: np.ndarray) -> np.ndarray:
    place = np.searchsorted(spans[:, 0], points, side="right") - 1
    return (place >= 0) & (points < spans[np.maximum(place, 0), 1])


def cut_out(text: str, cuts: np.ndarray, config: LinesConfig | SubstringConfig) -> str:
    """The text without these units; empty where no word is left."""
    if isinstance(config, SubstringConfig):
        spans = _word_spans(text, cuts)
    else:
        lines = line_spans(text, config.unit)
        spans = [(lines[begin][0], lines[end - 1][1]) for begin, end in zip(cuts["begin"].tolist(), cuts["end"].tolist())]
    edges = [0, *(edge for span in spans for edge in span), len(text)]
    rest = "".join(text[begin:end] for begin, end in zip(edges[::2], edges[1::2]))
    return rest if any(map(str.isalnum, rest)) else ""


def _word_spans(text: str, cuts: np.ndarray) -> list[tuple[int, int]]:
    """[begin, end) in characters: from the first word of a cut to the word after its last."""
    begins, places = segment(code_points(text)).begins, places_before_lowering(text)
    edges = np.append(begins if places is None else places[begins], len(text))
    return [(int(edges[begin]), int(edges[end])) for begin, end in zip(cuts["begin"].tolist(), cuts["end"].tolist())]
