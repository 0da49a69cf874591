"""The number of a sample to its row of aligned pairs, for an encoder-decoder: a stateless function of the data, the mixture and the seed.

Like loader.py, of which it is the other kind: nothing to save, nothing to restore, the same rows on any layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from data_pipeline.dataset import Dataset, TokenSource
from data_pipeline.mixture import Mixture, Phase
from data_pipeline.pair_packing import TOO_LONG, too_long
from data_pipeline.pair_plans import PAIR_PLAN_VERSION, PairPlan
from data_pipeline.pair_rows import PairRow, assemble_pairs
from data_pipeline.prefetch import Prefetcher
from data_pipeline.rows import NO_TARGET, batch_id
from data_pipeline.samples import MixtureEntry, Place, Samples, Stream, open_streams

__all__ = ["NO_TARGET", "Dataset", "PairRow", "PairRowSource", "Phase", "Place", "Prefetcher", "batch_id"]


class PairRowSource(Samples[PairPlan]):
    """rows[sample] for any sample >= 0 of the train split, or 0 <= sample < len(rows) of the validation split."""

    def __init__(
        self,
        streams: Sequence[Stream[PairPlan]],
        mixture: Mixture | None,
        *,
        source_length: int,
        target_length: int,
        seed: int,
        phases: Sequence[Phase],
    ) -> None:
        super().__init__(streams, mixture, seed=seed, phases=phases)
        self.source_length, self.target_length = source_length, target_length

    @classmethod
    def open(
        cls,
        mixture: Sequence[MixtureEntry],
        *,
        source_length: int,
        target_length: int,
        seed: int,
        split: str = "train",
        phases: Sequence[Phase] | None = None,
    ) -> PairRowSource:
        """Open the rows of (dataset, weight, names of its sources or None for all). A missing packing plan is made, so
        one process must have opened it before others do. `phases` (from a run's state) replaces the weights.

        Raises DataError for a source that isn't there, is empty, is not of pairs, or has another tokenizer, and where no pair fits a row;
        ConfigError for bad weights.
        """
        assert source_length >= 2 and target_length >= 2
        streams, drawn, phases = open_streams(
            mixture, lambda source: source.pair_plan(source_length, target_length), pairs=True, seed=seed, split=split, phases=phases
        )
        return cls(streams, drawn, source_length=source_length, target_length=target_length, seed=seed, phases=phases)

    def __getitem__(self, sample: int) -> PairRow:
        place = self.place(sample)
        return assemble_pairs(
            *place.source.gather_pairs(place.plan.pairs(place.row).tolist()),
            source_length=self.source_length,
            target_length=self.target_length,
            begin_id=self.vocabulary.begin_id,
            token_bytes=self._streams[place.entry].token_bytes,
        )

    def __iter__(self) -> Iterator[PairRow]:
        """One pass over len(self) samples."""
        return (self[sample] for sample in range(len(self)))

    def with_phases(self, phases: Sequence[Phase]) -> PairRowSource:
        """The same rows, drawn by other phases."""
        assert self._mixture is not None, "held-out rows are not drawn by weight"
        return PairRowSource(
            self._streams,
            Mixture(phases),
            source_length=self.source_length,
            target_length=self.target_length,
            seed=self.seed,
            phases=phases,
        )

    @property
    def left_out(self) -> list[dict[str, int]]:
        """Of each entry, the pairs that are in no row, by reason."""
        return [{reason: sum(plan.left_out[reason] for plan in stream.plans) for reason in TOO_LONG} for stream in self._streams]

    def why_left_out(self, source: TokenSource, pair: int) -> str | None:
        """The reason why a pair of this source is in no row; None where it is in one."""
        shard, inside = source.find(pair)
        one, other = (np.array([side.size]) for side in shard.sides(inside))
        over = int(too_long(one, other, source_length=self.source_length, target_length=self.target_length)[0])
        return TOO_LONG[over - 1] if over else None

    @property
    def identity(self) -> dict[str, Any]:
        """What the order of rows is a function of, as plain values: a run keeps it and compares."""
        return {
            "sources": [[{"name": source.name, "hash": source.hash} for source in stream.sources] for stream in self._streams],
            "phases": [phase.to_dict() for phase in self.phases],
            "source_length": self.source_length,
            "target_length": self.target_length,
            "packing": "pairs",
            "packing_version": PAIR_PLAN_VERSION,
            "seed": self.seed,
            "tokenizer_hash": self.vocabulary.tokenizer_hash,
        }
