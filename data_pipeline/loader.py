"""The number of a sample to its row: a stateless function of the data, the mixture and the seed.

There is nothing to save and nothing to restore: a run that has consumed n samples goes on with rows[n], on any layout.
This module is what training imports; it needs numpy and nothing heavier.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from data_pipeline.dataset import Dataset
from data_pipeline.mixture import Mixture, Phase
from data_pipeline.packing import PLAN_VERSIONS, Method
from data_pipeline.plans import Plan
from data_pipeline.prefetch import Prefetcher
from data_pipeline.rows import NO_TARGET, Row, assemble, batch_id
from data_pipeline.samples import MixtureEntry, Place, Samples, Stream, open_streams

__all__ = ["NO_TARGET", "Dataset", "Phase", "Place", "Prefetcher", "Row", "RowSource", "batch_id"]


class RowSource(Samples[Plan]):
    """rows[sample] for any sample >= 0 of the train split, or 0 <= sample < len(rows) of the validation split."""

    def __init__(
        self,
        streams: Sequence[Stream[Plan]],
        mixture: Mixture | None,
        *,
        sequence_length: int,
        packing: Method,
        seed: int,
        phases: Sequence[Phase],
    ) -> None:
        super().__init__(streams, mixture, seed=seed, phases=phases)
        self.sequence_length, self.packing = sequence_length, packing

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

        Raises DataError for a source that isn't there, is empty, is of pairs, or has another tokenizer; ConfigError for bad weights.
        """
        assert sequence_length >= 1
        streams, drawn, phases = open_streams(
            mixture, lambda source: source.plan(sequence_length, packing), pairs=False, seed=seed, split=split, phases=phases
        )
        return cls(streams, drawn, sequence_length=sequence_length, packing=packing, seed=seed, phases=phases)

    def __iter__(self) -> Iterator[Row]:
        """One pass over len(self) samples."""
        return (self[sample] for sample in range(len(self)))

    def __getitem__(self, sample: int) -> Row:
        place = self.place(sample)
        pieces: list[tuple[int, int, int]] = place.plan.pieces(place.row).tolist()
        begin_id = self.vocabulary.begin_id
        return assemble(
            place.source.gather(pieces),
            [length for _, _, length in pieces],
            [int(place.source.gather([(document, start - 1, 1)])[0]) if start else begin_id for document, start, _ in pieces],
            sequence_length=self.sequence_length,
            begin_id=begin_id,
            token_bytes=self._streams[place.entry].token_bytes,
        )

    def with_phases(self, phases: Sequence[Phase]) -> RowSource:
        """The same rows, drawn by other phases."""
        assert self._mixture is not None, "held-out rows are not drawn by weight"
        return RowSource(
            self._streams, Mixture(phases), sequence_length=self.sequence_length, packing=self.packing, seed=self.seed, phases=phases
        )

    @property
    def identity(self) -> dict[str, Any]:
        """What the order of rows is a function of, as plain values: a run keeps it and compares."""
        return {
            "sources": [[{"name": source.name, "hash": source.hash} for source in stream.sources] for stream in self._streams],
            "phases": [phase.to_dict() for phase in self.phases],
            "sequence_length": self.sequence_length,
            "packing": self.packing,
            "packing_version": PLAN_VERSIONS[self.packing],
            "seed": self.seed,
            "tokenizer_hash": self.vocabulary.tokenizer_hash,
        }
