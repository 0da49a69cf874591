"""Hugging Face datasets to documents: of the Hub, of a local folder of data files, or as save_to_disk left them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from data_pipeline.document import Document
from data_pipeline.errors import DataError
from data_pipeline.read import Fielded, document_of
from data_pipeline.records import Rejected


def read_dataset(
    path: str,
    *,
    source: str,
    config_name: str | None = None,
    split: str = "train",
    text_field: str = "text",
    streaming: bool = True,
    revision: str | None = None,
    notes: Counter[str] | None = None,
    fields: Sequence[str] = (),
) -> Iterator[Document | Rejected]:
    """Documents of one split of a dataset: a name on the Hub (at a `revision`), a local folder of data files, or a folder from save_to_disk.

    Raises DataError when it can't be loaded, has no such split or no such column.
    """
    name = dataset_name(path, config_name, split)
    notes = Counter() if notes is None else notes
    for number, record in enumerate(records_of_dataset(path, config_name, split, streaming, revision), start=1):
        where = f"{name}:{number}"
        if text_field not in record:
            raise DataError(f"dataset {name} has no column {text_field!r}; set text_field to one of: {', '.join(record)}")
        text = record[text_field]
        if isinstance(text, str):
            beside = {field: record.get(field) for field in fields}
            yield document_of(Fielded(text, beside), source, name, number, where=where, notes=notes)
        else:
            yield Rejected("text_not_string", where, 0)


def dataset_name(path: str, config_name: str | None, split: str) -> str:
    """What ids and places are made of."""
    return "/".join(filter(None, [Path(path).name if Path(path).is_dir() else path, config_name, split]))


def records_of_dataset(path: str, config_name: str | None, split: str, streaming: bool, revision: str | None) -> Iterator[dict[str, Any]]:
    """Raises DataError when it can't be loaded or has no such split."""
    import datasets

    try:
        if Path(path, "state.json").is_file() or Path(path, "dataset_dict.json").is_file():
            yield from _saved_split(datasets.load_from_disk(path), config_name, split)
        else:
            yield from datasets.load_dataset(path, config_name, split=split, streaming=streaming, revision=revision)
    except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"can't read dataset {path} (config {config_name}, split {split}): {error}") from error


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
