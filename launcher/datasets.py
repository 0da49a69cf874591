"""The datasets of a run, opened where they are."""

from __future__ import annotations

from data_pipeline.dataset import Dataset
from launcher.config import DataSection


def open_datasets(data: DataSection) -> list[Dataset]:
    """One for each entry of the mixture; those in object storage are read through `data.cache`. Raises DataError."""
    return [Dataset.open(source.path, cache=data.cache) for source in data.mixture]
