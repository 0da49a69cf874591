"""A dataset in a notebook: open the folder, index documents and training rows, iterate.

from data_pipeline.notebook import open_dataset
data = open_dataset("data/mine")
data.documents[0].text, data.rows(256)[0].text
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import overload

import numpy as np

from data_pipeline.dataset import Dataset, TokenSource
from data_pipeline.errors import DataError
from data_pipeline.fim import Fim, document_text, fim_of_dataset
from data_pipeline.loader import RowSource
from data_pipeline.packing import Method
from data_pipeline.pair_loader import PairRowSource
from data_pipeline.rows import Row
from data_pipeline.tokenizer.encode import Encoder
from data_pipeline.trace import find_document


def open_dataset(path: str | Path) -> OpenDataset:
    """Open a dataset folder. Raises DataError if it is none, or was changed after it was built."""
    return OpenDataset(Dataset.open(path))


@dataclass(frozen=True, eq=False)
class StoredDocument:
    """A document as the shards have it. `tokens` end in the end-of-document id, and may be rearranged by fill in the middle, which
    `text` is not; `file`, `record`: where its text stood."""

    id: str
    source: str
    file: str
    record: int
    tokens: np.ndarray
    encoder: Encoder
    fim: Fim | None

    @cached_property
    def text(self) -> str:
        return document_text(self.tokens, self.encoder, self.fim)

    def __repr__(self) -> str:
        return f"StoredDocument({self.source} {self.file}:{self.record}, {self.tokens.size:,} tokens, {_shortened(self.text)})"


@dataclass(frozen=True, eq=False)
class Piece:
    """What a row has of one document: the tokens from `start` on; `text` is theirs."""

    document: StoredDocument
    start: int
    tokens: np.ndarray

    @cached_property
    def text(self) -> str:
        return self.document.encoder.decode(self.tokens.tolist())

    def __repr__(self) -> str:
        return f"Piece({self.document.id[:12]} from token {self.start}, {self.tokens.size:,} tokens, {_shortened(self.text)})"


@dataclass(frozen=True, eq=False)
class TrainingRow:
    """A row as training sees it: `arrays` has inputs, targets and segment starts; `epoch` counts from 0."""

    sample: int
    epoch: int
    source: str
    arrays: Row
    pieces: list[Piece]

    @cached_property
    def text(self) -> str:
        """All targets as text, ends of documents spelled out, padding left out."""
        return "".join(piece.text for piece in self.pieces)

    def __repr__(self) -> str:
        return f"TrainingRow({self.sample}, {self.source}, {self.arrays.num_targets:,} targets, {len(self.pieces)} pieces, {_shortened(self.text)})"


class Documents(Sequence[StoredDocument]):
    """The documents of some sources, by number, slice, or id (or an id's beginning)."""

    def __init__(self, sources: Sequence[TokenSource], dataset: Dataset, encoder: Encoder, fim: Fim | None) -> None:
        self._sources, self._dataset, self._encoder, self._fim = list(sources), dataset, encoder, fim
        self._ends = np.cumsum([0, *(source.num_documents for source in sources)])

    def __len__(self) -> int:
        return int(self._ends[-1])

    @overload
    def __getitem__(self, which: int | str) -> StoredDocument: ...
    @overload
    def __getitem__(self, which: slice) -> list[StoredDocument]: ...
    def __getitem__(self, which: int | str | slice) -> StoredDocument | list[StoredDocument]:
        if isinstance(which, slice):
            return [self[number] for number in range(*which.indices(len(self)))]
        if isinstance(which, str):
            split, name, number = find_document(self._dataset, which)
            source = next((source for source in self._sources if (source.split, source.name) == (split, name)), None)
            if source is None:
                raise DataError(f"document {which} is in {name} ({split}), which is not among these")
            return stored_document(source, number, self._encoder, self._fim)
        if not -len(self) <= which < len(self):
            raise IndexError(f"document {which} of {len(self)}")
        number = which % len(self)
        place = int(np.searchsorted(self._ends, number, side="right")) - 1
        return stored_document(self._sources[place], number - int(self._ends[place]), self._encoder, self._fim)

    def of(self, source: str) -> Documents:
        """Those of one source. Raises DataError where there is none of that name."""
        chosen = [each for each in self._sources if each.name == source]
        if not chosen:
            raise DataError(f"no source {source!r}; there are {', '.join(each.name for each in self._sources) or 'none'}")
        return Documents(chosen, self._dataset, self._encoder, self._fim)

    def __repr__(self) -> str:
        return f"Documents({', '.join(f'{source.name} {source.num_documents:,}' for source in self._sources)})"


class Rows(Sequence[TrainingRow]):
    """One epoch's rows in the order of a run with this seed; `rows[n]` goes on into later epochs."""

    def __init__(self, rows: RowSource, encoder: Encoder, fim: Fim | None) -> None:
        self.source, self._encoder, self._fim = rows, encoder, fim

    def __len__(self) -> int:
        return len(self.source)

    @overload
    def __getitem__(self, which: int) -> TrainingRow: ...
    @overload
    def __getitem__(self, which: slice) -> list[TrainingRow]: ...
    def __getitem__(self, which: int | slice) -> TrainingRow | list[TrainingRow]:
        if isinstance(which, slice):
            return [self[sample] for sample in range(*which.indices(len(self)))]
        sample = which + len(self) if which < 0 else which
        place, arrays = self.source.place(sample), self.source[sample]
        pieces, first = [], 0
        for document, start, length in place.plan.pieces(place.row).tolist():
            tokens = arrays.targets[first : first + length]
            pieces.append(Piece(stored_document(place.source, document, self._encoder, self._fim), start, tokens))
            first += length
        return TrainingRow(sample, place.epoch, place.source.name, arrays, pieces)

    def __iter__(self) -> Iterator[TrainingRow]:
        return (self[sample] for sample in range(len(self)))


class OpenDataset:
    """A dataset folder: `documents` and `heldout`, `rows(sequence_length)`, `encode` and `decode`; `dataset` is the whole of it."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self._encoder, self._fim = Encoder.open(dataset.tokenizer_path), fim_of_dataset(dataset)
        self.documents = Documents(dataset.sources, dataset, self._encoder, self._fim)
        self.heldout = Documents(dataset.validation, dataset, self._encoder, self._fim)

    def rows(self, sequence_length: int, *, packing: Method = "best_fit", seed: int = 1234, heldout: bool = False) -> Rows:
        """The rows that training would see, in its order; the packing plan is made if it is missing."""
        split = "validation" if heldout else "train"
        rows = RowSource.open([(self.dataset, 1.0, None)], sequence_length=sequence_length, packing=packing, seed=seed, split=split)
        return Rows(rows, self._encoder, self._fim)

    def pair_rows(self, source_length: int, target_length: int, *, seed: int = 1234, heldout: bool = False) -> PairRowSource:
        """Likewise of aligned pairs: arrays of both sides, by sample."""
        split = "validation" if heldout else "train"
        mixture = [(self.dataset, 1.0, None)]
        return PairRowSource.open(mixture, source_length=source_length, target_length=target_length, seed=seed, split=split)

    def encode(self, text: str) -> list[int]:
        """Ids of the text; special tokens in it are characters like others, and no end is added."""
        return self._encoder.encode(text).tolist()

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._encoder.decode([int(id) for id in ids])

    def __repr__(self) -> str:
        return f"OpenDataset({str(self.dataset.path)!r}, {self.documents}, held out {len(self.heldout):,}, {self.dataset.vocab_size:,} ids)"


def stored_document(source: TokenSource, number: int, encoder: Encoder, fim: Fim | None) -> StoredDocument:
    """A document by its number within the source."""
    shard, inside = source.find(number)
    file, record = shard.origin(inside)
    return StoredDocument(shard.document_id(inside), source.name, file, record, shard.document(inside), encoder, fim)


def _shortened(text: str, characters: int = 60) -> str:
    return repr(text if len(text) <= characters else text[:characters] + "...")
