"""From a place in a training row to the document, file and characters that it came from; and from a document to its rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from data_pipeline.dataset import Dataset
from data_pipeline.errors import DataError
from data_pipeline.fim import fim_of_dataset, text_order
from data_pipeline.loader import RowSource
from data_pipeline.pair_loader import PairRowSource
from data_pipeline.pair_plans import PairPlan
from data_pipeline.plans import Plan
from data_pipeline.rows import NO_TARGET
from data_pipeline.samples import Samples
from data_pipeline.tokenizer.encode import Encoder

_AROUND_TOKENS = 24


@dataclass(frozen=True)
class Origin:
    """Where one target of one sample came from. `first_byte`, `last_byte`: the UTF-8 bytes of the document's text that the
    token stands for, both None for special tokens; `before`, `token`, `after`: the text around it."""

    sample: int
    position: int
    epoch: int
    source: str
    document: str
    file: str
    record: int
    token_in_document: int
    token_id: int
    first_byte: int | None
    last_byte: int | None
    first_character: int | None
    before: str
    token: str
    after: str


def trace(rows: RowSource, sample: int, position: int) -> Origin:
    """Where the target at `position` of the sample came from. Raises DataError for padding and for places outside the row."""
    place = rows.place(sample)
    row = rows[sample]
    if not 0 <= position < row.targets.size:
        raise DataError(f"position {position} is outside the row: it has positions 0 to {row.targets.size - 1}")
    if row.targets[position] == NO_TARGET:
        raise DataError(f"position {position} of sample {sample} is padding: the row has {row.num_targets} targets")
    pieces = place.plan.pieces(place.row)
    ends = np.cumsum(pieces["length"].astype(np.int64))
    piece = int(np.searchsorted(ends, position, side="right"))
    document, start, length = (int(value) for value in pieces[piece])
    inside = start + position - (int(ends[piece]) - length)
    shard, number = place.source.find(document)
    tokens = shard.document(number)
    file, record = shard.origin(number)
    dataset = rows.dataset(place.entry)
    encoder = Encoder.open(dataset.tokenizer_path)
    widths = dataset.token_bytes[tokens].astype(np.int64)
    earlier = _earlier_in_text(dataset, tokens, inside)
    first_byte = int(widths[earlier].sum())
    is_end = inside == tokens.size - 1 or widths[inside] == 0
    ahead = encoder.decode_bytes(tokens[earlier].tolist())
    return Origin(
        sample=sample,
        position=position,
        epoch=place.epoch,
        source=place.source.name,
        document=shard.document_id(number),
        file=file,
        record=record,
        token_in_document=inside,
        token_id=int(tokens[inside]),
        first_byte=None if is_end else first_byte,
        last_byte=None if is_end else first_byte + int(widths[inside]) - 1,
        first_character=None if is_end else len(ahead.decode("utf-8", "ignore")),
        before=encoder.decode(tokens[max(0, inside - _AROUND_TOKENS) : inside].tolist()),
        token=encoder.decode([int(tokens[inside])]),
        after=encoder.decode(tokens[inside + 1 : inside + 1 + _AROUND_TOKENS].tolist()),
    )


def _earlier_in_text(dataset: Dataset, tokens: np.ndarray, inside: int) -> np.ndarray:
    """The places of the tokens that stand before one in the document's text, which fill in the middle may have rearranged."""
    plain = np.arange(inside)
    fim = fim_of_dataset(dataset)
    order = text_order(tokens[:-1], fim) if fim is not None else None
    if order is None:
        return plain
    return order[: int(np.flatnonzero(order == inside)[0])] if inside in order else order[:0]


@dataclass(frozen=True)
class Stored:
    """A document of a dataset: `entry` of the mixture, and its number within the source."""

    entry: int
    split: str
    source: str
    number: int


def find_document(dataset: Dataset, id: str) -> tuple[str, str, int]:
    """(split, source, number within it) of a document id, or of an id's beginning. Reads the ids of the whole dataset.

    Raises DataError where no document, or more than one, has it.
    """
    (found,) = find_documents([dataset], id)
    return found.split, found.source, found.number


def find_documents(datasets: Sequence[Dataset], id: str) -> list[Stored]:
    """The document in each dataset of a mixture that has one with this id: more than one where their sources and files have the same names.

    Raises DataError where no document has it, or several do whose ids go on differently.
    """
    found: list[Stored] = []
    ids: list[str] = []
    for entry, dataset in enumerate(datasets):
        for source in [*dataset.sources, *dataset.validation]:
            first = 0
            for shard in source.shards:
                for number in shard.numbers_of(id):
                    found.append(Stored(entry, source.split, source.name, first + number))
                    ids.append(shard.document_id(number))
                first += shard.num_documents
    if not found or len(set(ids)) > 1 or len({each.entry for each in found}) < len(found):
        what = "no document" if not found else f"{len(found)} documents"
        hint = "; duplicates.jsonl lists those that were removed" if not found else ": give more digits"
        raise DataError(f"{', '.join(dataset.location for dataset in datasets)}: {what} with an id that begins with {id!r}{hint}")
    return found


@dataclass(frozen=True)
class PairOrigin:
    """Where a pair of a row came from, and where its sides stand there."""

    sample: int
    epoch: int
    pair: int
    source: str
    document: str
    file: str
    record: int
    source_start: int
    source_tokens: int
    target_start: int
    target_tokens: int
    source_text: str
    target_text: str


def trace_pairs(rows: PairRowSource, sample: int) -> Iterator[PairOrigin]:
    """Every pair of the sample's row, in order."""
    place, row = rows.place(sample), rows[sample]
    encoder = Encoder.open(rows.dataset(place.entry).tokenizer_path)
    for number, pair in enumerate(place.plan.pairs(place.row).tolist()):
        shard, inside = place.source.find(pair)
        file, record = shard.origin(inside)
        sides = shard.sides(inside)
        texts = [encoder.decode(side[:-1].tolist()) for side in sides]
        starts = int(row.source_starts[number]), int(row.target_starts[number])
        where = (place.source.name, shard.document_id(inside), file, record)
        yield PairOrigin(sample, place.epoch, number, *where, starts[0], sides[0].size, starts[1], sides[1].size, *texts)


def samples_of(rows: Samples[Any], *, split: str, source: str, document: int, num_samples: int, entry: int = 0) -> Iterator[int]:
    """The samples below `num_samples` that hold a piece of the document, in order. `entry`: of the mixture, whose document it is."""
    for sample in range(min(num_samples, len(rows)) if split == "validation" else num_samples):  # held-out rows are gone through once
        place = rows.place(sample)
        if (place.entry, place.source.split, place.source.name) == (entry, split, source) and document in _documents(place.plan, place.row):
            yield sample


def _documents(plan: Plan | PairPlan, row: int) -> np.ndarray:
    return plan.pieces(row)["document"] if isinstance(plan, Plan) else plan.pairs(row)
