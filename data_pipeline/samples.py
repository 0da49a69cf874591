"""What rows of every kind have in common: the number of a sample to a place in a plan, by mixture, epoch and keyed order."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, Protocol, TypeVar

import numpy as np

from data_pipeline.dataset import Dataset, TokenSource
from data_pipeline.errors import ConfigError, DataError, Fault
from data_pipeline.mixture import Mixture, Phase
from data_pipeline.permutation import Permutation

MixtureEntry = tuple[Dataset, float, Sequence[str] | None]


class AnyPlan(Protocol):
    @property
    def num_rows(self) -> int: ...


P = TypeVar("P", bound=AnyPlan)


@dataclass(frozen=True)
class Place(Generic[P]):
    """Where a sample lies: the entry of the mixture, the epoch of that entry, the source, and the row of its plan."""

    entry: int
    epoch: int
    source: TokenSource
    plan: P
    row: int


class Stream(Generic[P]):
    """One entry of the mixture: the rows of its sources, end to end, in another keyed order each epoch."""

    def __init__(self, dataset: Dataset, sources: Sequence[TokenSource], plans: Sequence[P], *, seed: int) -> None:
        self.dataset, self.sources, self.plans, self.token_bytes = dataset, list(sources), list(plans), dataset.token_bytes
        if dataset.remote is not None:
            for source in sources:
                source.shards  # noqa: B018 (opened now: a missing one is found before training starts, and threads don't all open them)
        self._ends = np.cumsum([plan.num_rows for plan in self.plans]).tolist()
        self.num_rows: int = self._ends[-1] if self._ends else 0
        self.hash = hashlib.sha256("".join(source.hash for source in sources).encode()).hexdigest()
        self._order = lru_cache(maxsize=4)(lambda epoch: Permutation(self.num_rows, key=f"rows {seed} {self.hash} {epoch}"))

    def find(self, row: int) -> tuple[TokenSource, P, int]:
        """The row'th row in stored order."""
        part = bisect_right(self._ends, row)
        return self.sources[part], self.plans[part], row - (self._ends[part - 1] if part else 0)

    def shuffled(self, rank: int) -> tuple[int, int]:
        """(epoch, row in stored order) of the rank'th row that this entry serves."""
        epoch, index = divmod(rank, self.num_rows)
        return epoch, self._order(epoch)(index)


class Samples(Generic[P]):
    """Any sample >= 0 of the train split, or 0 <= sample < len of the validation split, which has no mixture."""

    def __init__(self, streams: Sequence[Stream[P]], mixture: Mixture | None, *, seed: int, phases: Sequence[Phase]) -> None:
        self._streams, self._mixture = list(streams), mixture
        self.seed, self.phases = seed, tuple(phases)
        self._ends = np.cumsum([stream.num_rows for stream in streams]).tolist()
        self.vocabulary = streams[0].dataset.vocabulary

    def __len__(self) -> int:
        """Rows of one epoch of every entry."""
        return int(self._ends[-1])

    def place(self, sample: int) -> Place[P]:
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


def open_streams(
    mixture: Sequence[MixtureEntry],
    plan_of: Callable[[TokenSource], P],
    *,
    pairs: bool,
    seed: int,
    split: str,
    phases: Sequence[Phase] | None,
) -> tuple[list[Stream[P]], Mixture | None, list[Phase]]:
    """The streams of the mixture's entries, how they are drawn, and in which phases; held-out rows are not drawn, they stand in a row."""
    assert split in ("train", "validation")
    chosen = [_chosen(dataset, names, split=split, pairs=pairs) for dataset, _, names in mixture]
    _check_tokenizers([dataset for dataset, _, _ in mixture])
    _check_once(mixture, chosen)
    streams = [
        Stream(dataset, sources, [plan_of(source) for source in sources], seed=seed) for (dataset, _, _), sources in zip(mixture, chosen)
    ]
    if split == "validation":
        if not any(stream.num_rows for stream in streams):
            raise DataError(
                f"{', '.join(dataset.location for dataset, _, _ in mixture)}: no held-out documents. "
                "Set validation.fraction above 0 in the data config and build again, or turn evaluation off."
            )
        return [stream for stream in streams if stream.num_rows], None, []
    if empty := [dataset.location for (dataset, _, _), stream in zip(mixture, streams) if not stream.num_rows]:
        raise DataError(f"{', '.join(empty)}: no row has anything in it, all pairs are too long for it. Give rows more room.")
    phases = list(phases) if phases else [Phase(0, tuple(weight for _, weight, _ in mixture))]
    return streams, Mixture(phases), phases


def _chosen(dataset: Dataset, names: Sequence[str] | None, *, split: str, pairs: bool) -> list[TokenSource]:
    sources = dataset.split(split)
    known = [source.name for source in dataset.sources]
    for name in names or ():
        if name not in known:
            raise DataError(f"{dataset.location} has no source {name!r}; it has {', '.join(known)}")
    chosen = [source for source in sources if names is None or source.name in names]
    if other := [source.name for source in chosen if source.pairs != pairs]:
        what, wanted = ("documents", "pairs, for an encoder-decoder") if pairs else ("aligned pairs", "documents")
        raise DataError(
            f"{dataset.location}: {', '.join(other)} has {what}, and these rows are made of {wanted}. Use a dataset of that kind."
        )
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
