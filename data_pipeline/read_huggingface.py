"""Hugging Face datasets to documents: of the Hub, of a local folder of data files, or as save_to_disk left them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.document import Document
from data_pipeline.errors import DataError
from data_pipeline.read import Fielded, ReadOptions, document_of
from data_pipeline.records import Rejected


@dataclass(frozen=True)
class DatasetSplit:
    """One split of a dataset: a name on the Hub (at a `revision`), a local folder of data files, or a folder from save_to_disk."""

    path: str
    config_name: str | None = None
    split: str = "train"
    streaming: bool = True
    revision: str | None = None

    @property
    def name(self) -> str:
        """What ids and places are made of."""
        return "/".join(filter(None, [Path(self.path).name if Path(self.path).is_dir() else self.path, self.config_name, self.split]))

    def records(self) -> Iterator[dict[str, Any]]:
        """Raises DataError when it can't be loaded or has no such split."""
        import datasets

        try:
            if Path(self.path, "state.json").is_file() or Path(self.path, "dataset_dict.json").is_file():
                yield from _saved_split(datasets.load_from_disk(self.path), self.config_name, self.split)
            else:
                yield from datasets.load_dataset(
                    self.path, self.config_name, split=self.split, streaming=self.streaming, revision=self.revision
                )
        except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
            what = f"dataset {self.path} (config {self.config_name}, split {self.split})"
            raise DataError(f"can't read {what}: {error}") from error


def read_dataset(dataset: DatasetSplit, options: ReadOptions | None = None, *, source: str) -> Iterator[Document | Rejected]:
    """Documents of a split, in order, with the records that are none.

    Raises DataError when it can't be loaded, has no such split or no such column.
    """
    name = dataset.name
    options = ReadOptions() if options is None else options
    for number, record in enumerate(dataset.records(), start=1):
        where = f"{name}:{number}"
        if options.text_field not in record:
            raise DataError(f"dataset {name} has no column {options.text_field!r}; set text_field to one of: {', '.join(record)}")
        text = record[options.text_field]
        if isinstance(text, str):
            beside = {field: record.get(field) for field in options.fields}
            yield document_of(Fielded(text, beside), source, name, number, where=where, notes=options.notes)
        else:
            yield Rejected("text_not_string", where, 0)


def _saved_split(saved: Any, config_name: str | None, split: str) -> Any:
    """The split of what save_to_disk left: all splits, or one, with its name or (where it was made in memory) without."""
    if isinstance(saved, dict):
        if split not in saved:
            raise ValueError(f"it holds the splits {', '.join(saved)}: set split to one of them")
        saved = saved[split]
    elif split != str(saved.split or "train"):
        what = f"the split {saved.split} alone: set split to it" if saved.split else "one split without a name: remove split"
        raise ValueError(f"it holds {what}")
    if config_name not in (None, saved.config_name):
        what = f"config {saved.config_name} alone: set dataset_config to it" if saved.config_name else "no config: remove dataset_config"
        raise ValueError(f"it holds {what}")
    return saved
