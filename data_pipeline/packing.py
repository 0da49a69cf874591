"""Documents to rows of S targets: which pieces of which documents stand in which row. The tokens are never copied.

concat    the documents of a source in keyed order, one after another, cut every S tokens; only the last row has padding
best_fit  documents longer than S are cut into rows of their own and a rest; rests and short documents are packed by
          best-fit decreasing within windows of 2^20 documents in keyed order, so no document is cut that needn't be, and
          what is left too empty is packed again, exactly
Either way every token of every document lies in exactly one row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from data_pipeline.permutation import Permutation

Method = Literal["concat", "best_fit"]
# Part of every plan's identity and of every run's: a change of what is written below changes it. 2: rows are filled exactly.
PLAN_VERSIONS: dict[Method, int] = {"concat": 1, "best_fit": 2}
WINDOW_DOCUMENTS = 1 << 20
PIECE = np.dtype([("document", "<u4"), ("start", "<u4"), ("length", "<u4")])


@dataclass(frozen=True)
class Rows:
    """Some rows: `pieces` of PIECE in row order, and how many each row has. `continues`: the first row goes on with the
    last row of the Rows before."""

    pieces: np.ndarray
    pieces_per_row: np.ndarray
    continues: bool = False


def plan_rows(
    lengths: np.ndarray, *, sequence_length: int, method: Method, key: str, window_documents: int = WINDOW_DOCUMENTS
) -> Iterator[Rows]:
    """The rows of a source, some at a time. `lengths` (tokens a document, its end included) is in stored order; `key`
    decides the order in which documents are chained."""
    assert lengths.size < 1 << 32 and (lengths.size == 0 or 0 < lengths.min() <= lengths.max() < 1 << 32)
    order = Permutation(lengths.size, key=f"packing {key}")
    carried = 0  # tokens of the last, unfinished row of concat
    for first in range(0, lengths.size, window_documents):
        documents = order.many(first, min(first + window_documents, lengths.size))
        if method == "best_fit":
            yield _best_fit(documents, lengths[documents], sequence_length=sequence_length)
        else:
            rows = _concat(documents, lengths[documents], sequence_length=sequence_length, carried=carried)
            carried = int((carried + lengths[documents].sum()) % sequence_length)
            yield rows


def _concat(documents: np.ndarray, lengths: np.ndarray, *, sequence_length: int, carried: int) -> Rows:
    """Cut the chain at every document's end and every S tokens, counted from the row that the window before left at `carried`."""
    ends = np.cumsum(lengths) + carried
    starts = ends - lengths
    total = int(ends[-1])
    cuts = np.unique(np.concatenate([starts, np.arange(-(-carried // sequence_length), -(-total // sequence_length)) * sequence_length]))
    piece_lengths = np.diff(cuts, append=total)
    owner = np.searchsorted(ends, cuts, side="right")
    pieces = _pieces(documents[owner], cuts - starts[owner], piece_lengths)
    num_rows = -(-total // sequence_length)
    return Rows(pieces=pieces, pieces_per_row=np.bincount(cuts // sequence_length, minlength=num_rows), continues=carried > 0)


def _best_fit(documents: np.ndarray, lengths: np.ndarray, *, sequence_length: int) -> Rows:
    from data_pipeline.binpack import best_fit_decreasing  # compiles on first use; readers of finished plans never need it
    from data_pipeline.exact_fill import fill_exactly

    num_full = lengths // sequence_length
    owner = np.repeat(np.arange(documents.size), num_full)
    nth = np.arange(owner.size) - np.repeat(np.cumsum(num_full) - num_full, num_full)
    full = _pieces(documents[owner], nth * sequence_length, np.full(owner.size, sequence_length))
    rest = lengths % sequence_length
    ragged = np.flatnonzero(rest)
    ragged = ragged[np.argsort(-rest[ragged], kind="stable")]
    short = rest[ragged].astype(np.int64)
    bins, num_bins = fill_exactly(short, *best_fit_decreasing(short, sequence_length), sequence_length)
    ragged = ragged[np.argsort(bins, kind="stable")]
    packed = _pieces(documents[ragged], num_full[ragged] * sequence_length, rest[ragged])
    per_row = np.concatenate([np.ones(full.size, dtype=np.int64), np.bincount(bins, minlength=num_bins)])
    return Rows(pieces=np.concatenate([full, packed]), pieces_per_row=per_row)


def _pieces(documents: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    out = np.empty(documents.size, dtype=PIECE)
    out["document"], out["start"], out["length"] = documents, starts, lengths
    return out
