"""The number of a sample to its row: a stateless function of the data, the mixture and the seed.

There is nothing to save and nothing to restore: a run that has consumed n samples goes on with rows[n], on any layout.
This module is what training imports; it needs numpy and nothing heavier.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from data_pipeline.dataset import Dataset, TokenSource
from data_pipeline.errors import ConfigError, DataError, Fault
from data_pipeline.mixture import Mixture, Phase
from data_pipeline.packing import Method
from data_pipeline.permutation import Permutation
from data_pipeline.plans import Plan
from data_pipeline.prefetch import Prefetcher
from data_pipeline.rows import NO_TARGET, Row, assemble, batch_id, row_digest

__all__ = ["NO_TARGET", "Dataset", "Phase", "Place", "Prefetcher", "Row", "RowSource", "batch_id", "row_digest"]

MixtureEntry = tuple[Dataset, float, Sequence[str] | None]


@dataclass(frozen=True)
class Place:
    """Where a sample lies: the entry of the mixture, the epoch of that entry, the source, and the row of its plan."""

    entry: int
    epoch: int
    source: TokenSource
    plan: Plan
    row: int


class _Stream:
    """One entry of the mixture: the rows of its sources, end to end, in another keyed order each epoch."""

    def __init__(self, dataset: Dataset, sources: Sequence[TokenSource], *, sequence_length: int, packing: Method, seed: int) -> None:
        self.dataset, self.sources, self.token_bytes = dataset, list(sources), dataset.token_bytes
        self.plans = [source.plan(sequence_length, packing) for source in sources]
        if dataset.remote is not None:
            for source in sources:
                source.shards  # noqa: B018 (opened now: a missing one is found before training starts, and threads don't all open them)
        self._ends = np.cumsum([plan.num_rows for plan in self.plans]).tolist()
        self.num_rows: int = self._ends[-1] if self._ends else 0
        self.hash = hashlib.sha256("".join(source.hash for source in sources).encode()).hexdigest()
        self._order = lru_cache(maxsize=4)(lambda epoch: Permutation(self.num_rows, key=f"rows {seed} {self.hash} {epoch}"))

    def find(self, row: int) -> tuple[TokenSource, Plan, int]:
        """The row'th row in stored order."""
        part = bisect_right(self._ends, row)
        return self.sources[part], self.plans[part], row - (self._ends[part - 1] if part else 0)

    def shuffled(self, rank: int) -> tuple[int, int]:
        """(epoch, row in stored order) of the rank'th row that this entry serves."""
        epoch, index = divmod(rank, self.num_rows)
        return epoch, self._order(epoch)(index)


class RowSource:
    """rows[sample] for any sample >= 0 of the train split, or 0 <= sample < len(rows) of the validation split."""

    def __init__(
        self,
        streams: Sequence[_Stream],
        mixture: Mixture | None,
        *,
        sequence_length: int,
        packing: Method,
        seed: int,
        phases: Sequence[Phase],
    ) -> None:
        self._streams, self._mixture = list(streams), mixture
        self.sequence_length, self.packing, self.seed, self.phases = sequence_length, packing, seed, tuple(phases)
        self._ends = np.cumsum([stream.num_rows for stream in streams]).tolist()
        self.vocabulary = streams[0].dataset.vocabulary

    @classmethod
    def open(
        cls,
        mixture: Sequence[MixtureEntry],
        *,
        sequence_length: int,
        packing: Method,
        seed: int,
        split: str = "train",
        phases: Sequence[Phase] | None = None,
    ) -> RowSource:
        """Open the rows of (dataset, weight, names of its sources or None for all). A missing packing plan is made, so
        one process must have opened it before others do. `phases` (from a run's state) replaces the weights.

        Raises DataError for a source that isn't there, is empty, or has another tokenizer; ConfigError for bad weights.
        """
        assert split in ("train", "validation") and sequence_length >= 1
        chosen = [_chosen(dataset, names, split=split) for dataset, _, names in mixture]
        _check_tokenizers([dataset for dataset, _, _ in mixture])
        _check_once(mixture, chosen)
        streams = [
            _Stream(dataset, sources, sequence_length=sequence_length, packing=packing, seed=seed)
            for (dataset, _, _), sources in zip(mixture, chosen)
        ]
        if split == "validation":
            if not any(stream.num_rows for stream in streams):
                raise DataError(
                    f"{', '.join(dataset.location for dataset, _, _ in mixture)}: no held-out documents. "
                    "Set validation.fraction above 0 in the data config and build again, or turn evaluation off."
                )
            return cls(
                [stream for stream in streams if stream.num_rows],
                None,
                sequence_length=sequence_length,
                packing=packing,
                seed=seed,
                phases=(),
            )
        phases = list(phases) if phases else [Phase(0, tuple(weight for _, weight, _ in mixture))]
        return cls(streams, Mixture(phases), sequence_length=sequence_length, packing=packing, seed=seed, phases=phases)

    def __len__(self) -> int:
        """Rows of one epoch of every entry."""
        return int(self._ends[-1])

    def __iter__(self) -> Iterator[Row]:
        """One pass over len(self) samples."""
        return (self[sample] for sample in range(len(self)))

    def place(self, sample: int) -> Place:
        """Where the sample lies. IndexError past the end of a validation split."""
        if sample < 0 or (self._mixture is None and sample >= len(self)):
            raise IndexError(f"sample {sample} of {len(self)}")
        if self._mixture is None:
            entry = bisect_right(self._ends, sample)
            epoch, row = 0, sample - (self._ends[entry - 1] if entry else 0)
        else:
            entry, rank = self._mixture.locate(sample)
            epoch, row = self._streams[entry].shuffled(rank)
        source, plan, row = self._streams[entry].find(row)
        return Place(entry=entry, epoch=epoch, source=source, plan=plan, row=row)

    def __getitem__(self, sample: int) -> Row:
        place = self.place(sample)
        return assemble(
            (_piece(place.source, *piece, begin_id=self.vocabulary.begin_id) for piece in place.plan.pieces(place.row).tolist()),
            sequence_length=self.sequence_length,
            begin_id=self.vocabulary.begin_id,
            token_bytes=self._streams[place.entry].token_bytes,
        )

    @property
    def num_threads(self) -> int:
        """How many should read: blocks that come over a network are waited for, many at a time."""
        return max(1 if stream.dataset.remote is None else 16 for stream in self._streams)

    def dataset(self, entry: int) -> Dataset:
        """The dataset of an entry of the mixture."""
        return self._streams[entry].dataset

    @property
    def datasets(self) -> list[Dataset]:
        """The dataset of each entry of the mixture."""
        return [stream.dataset for stream in self._streams]

    def with_phases(self, phases: Sequence[Phase]) -> RowSource:
        """The same rows, drawn by other phases."""
        assert self._mixture is not None, "held-out rows are not drawn by weight"
        return RowSource(
            self._streams, Mixture(phases), sequence_length=self.sequence_length, packing=self.packing, seed=self.seed, phases=phases
        )

    @property
    def rows_per_epoch(self) -> list[int]:
        """Rows of one epoch of each entry."""
        return [stream.num_rows for stream in self._streams]

    def served(self, num_samples: int) -> list[int]:
        """How many of the first `num_samples` samples come from each entry."""
        return [num_samples] if self._mixture is None else self._mixture.served(num_samples).tolist()

    def epochs_at(self, num_samples: int) -> list[float]:
        """How often each entry has been gone through after `num_samples` samples."""
        return [count / rows for count, rows in zip(self.served(num_samples), self.rows_per_epoch)]

    @property
    def num_tokens(self) -> int:
        """Targets of one epoch of every entry."""
        return sum(source.num_tokens for stream in self._streams for source in stream.sources)

    @property
    def identity(self) -> dict[str, Any]:
        """What the order of rows is a function of, as plain values: a run keeps it and compares."""
        return {
            "sources": [[{"name": source.name, "hash": source.hash} for source in stream.sources] for stream in self._streams],
            "phases": [phase.to_dict() for phase in self.phases],
            "sequence_length": self.sequence_length,
            "packing": self.packing,
            "seed": self.seed,
            "tokenizer_hash": self.vocabulary.tokenizer_hash,
        }


def _piece(source: TokenSource, document: int, start: int, length: int, *, begin_id: int) -> tuple[np.ndarray, int]:
    shard, number = source.find(document)
    first = int(shard.offsets[number]) + start
    if start == 0:
        return shard.tokens(first, first + length), begin_id
    tokens = shard.tokens(first - 1, first + length)
    return tokens[1:], int(tokens[0])


def _chosen(dataset: Dataset, names: Sequence[str] | None, *, split: str) -> list[TokenSource]:
    sources = dataset.split(split)
    known = [source.name for source in dataset.sources]
    for name in names or ():
        if name not in known:
            raise DataError(f"{dataset.location} has no source {name!r}; it has {', '.join(known)}")
    chosen = [source for source in sources if names is None or source.name in names]
    if split == "train" and not sum(source.num_tokens for source in chosen):
        raise DataError(
            f"{dataset.location} has no training tokens in {', '.join(names or known) or 'any source'}. Build it from text that has some."
        )
    return chosen


def _check_tokenizers(datasets: Sequence[Dataset]) -> None:
    for dataset in datasets[1:]:
        if dataset.vocabulary != datasets[0].vocabulary:
            raise DataError(
                f"{dataset.location} was made with tokenizer {dataset.tokenizer_hash[:12]}, {datasets[0].location} with {datasets[0].tokenizer_hash[:12]}: "
                "their ids mean different text. Build one of them again with `tokenizer: {type: pretrained, name_or_path: OTHER/tokenizer.json}`."
            )


def _check_once(mixture: Sequence[MixtureEntry], chosen: Sequence[Sequence[TokenSource]]) -> None:
    seen: dict[str, str] = {}
    for (dataset, _, _), sources in zip(mixture, chosen):
        for source in sources:
            if source.hash in seen:
                raise ConfigError(
                    [
                        Fault(
                            "data.sources",
                            f"{dataset.location}: {source.name}",
                            "each source once",
                            f"{seen[source.hash]} has the same tokens; give it a larger weight instead",
                        )
                    ]
                )
            seen[source.hash] = f"{dataset.location}: {source.name}"
