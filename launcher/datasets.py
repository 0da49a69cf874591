"""The datasets of a run, opened where they are, and the rows that it takes of them."""

from __future__ import annotations

from collections.abc import Sequence

from data_pipeline.dataset import Dataset
from data_pipeline.loader import Row, RowSource
from data_pipeline.pair_loader import PairRow, PairRowSource
from launcher.config import DataSection, RunConfig

AnyRow = Row | PairRow
AnyRows = RowSource | PairRowSource


def open_datasets(data: DataSection) -> list[Dataset]:
    """One for each entry of the mixture; those in object storage are read through `data.cache`. Raises DataError."""
    return [Dataset.open(source.path, cache=data.cache) for source in data.mixture]


def open_rows(config: RunConfig, datasets: Sequence[Dataset], *, split: str = "train") -> AnyRows:
    """Rows of documents, or of aligned pairs for an encoder-decoder. Missing packing plans are made: one process must have opened
    them before others do. Raises DataError, also for data of the other kind."""
    mixture = [(dataset, source.weight, None) for dataset, source in zip(datasets, config.data.mixture)]
    training, seed = config.training, config.run.seed
    if config.model.family == "seq2seq":
        return PairRowSource.open(
            mixture, source_length=training.encoder_length, target_length=training.sequence_length, seed=seed, split=split
        )
    length, packing = training.sequence_length, config.data.packing
    return RowSource.open(mixture, sequence_length=length, packing=packing, seed=seed, split=split)
