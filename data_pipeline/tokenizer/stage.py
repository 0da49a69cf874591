"""The tokenizer of a build: trained on the documents that are left, taken from a file, or nothing but bytes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.config import TokenizerConfig
from data_pipeline.errors import DataError
from data_pipeline.pool import Report
from data_pipeline.progress import Progress
from data_pipeline.split import hash_fractions
from data_pipeline.storage import atomic_write
from data_pipeline.store import DocumentStore
from data_pipeline.tokenizer.byte_level import EOD_TOKEN, bytes_tokenizer_json
from data_pipeline.tokenizer.facts import TokenizerFacts, facts_of, prepared, read_pretrained
from data_pipeline.tokenizer.train import train_bpe, train_unigram

BATCH_BYTES = 4 << 20  # of text that is held at once


def tokenizer_content(config: TokenizerConfig) -> dict[str, Any]:
    """What the tokenizer is a function of beside the text: the settings, and of a pretrained one what its files hold now."""
    if config.type != "pretrained":
        return config.content()
    text, eod, bos = _pretrained(config)
    return {**config.content(), "sha256": hashlib.sha256(text.encode()).hexdigest(), "eod_token": eod, "bos_token": bos}


def _pretrained(config: TokenizerConfig) -> tuple[str, str | None, str | None]:
    """(tokenizer.json as it is used, the tokens that end and begin a document, where something names them)."""
    assert config.name_or_path is not None
    raw, named = read_pretrained(config.name_or_path)
    eod, bos = config.eod_token or named.get("eos_token"), config.bos_token or named.get("bos_token")
    return prepared(raw, where=config.name_or_path), eod, bos


def make_tokenizer(
    config: TokenizerConfig,
    store: DocumentStore,
    train: np.ndarray,
    *,
    content: dict[str, Any],
    seed: int,
    path: Path,
    workers: int,
    progress: Progress,
) -> TokenizerFacts:
    """The tokenizer, its file at `path` (work that is there already is used). `train`: bool[documents] to train on. `content`: of
    tokenizer_content, which went into the build's key. Raises DataError where a pretrained one was changed since."""
    if config.type == "bytes":
        text = bytes_tokenizer_json()
    elif config.type == "pretrained":
        assert config.name_or_path is not None
        text, eod, bos = _pretrained(config)
        if tokenizer_content(config) != content:
            raise DataError(f"{config.name_or_path} changed while the build was running. Run the same command again when it is complete.")
        _write(path, text)
        return facts_of(text, type=config.type, eod_token=eod, bos_token=bos, where=config.name_or_path)
    else:
        sample = training_sample(store, train, max_bytes=config.max_train_bytes, seed=seed)
        if path.exists():
            text = path.read_text(encoding="utf-8")
        else:
            name, trained = ("BPE", train_bpe) if config.type == "bpe" else ("unigram", train_unigram)
            with progress.stage(f"train {name}", int(store.lengths()[sample].sum())) as advance, _threads(workers):
                text = trained(_texts(store, sample, advance), config)
        about = _about(store, sample) if sample.size < int(train.sum()) else None
        _write(path, text)
        end = config.eod_token or EOD_TOKEN
        return facts_of(text, type=config.type, eod_token=end, bos_token=config.bos_token, trained_on=about)
    _write(path, text)
    return facts_of(text, type=config.type, eod_token=EOD_TOKEN)


def training_sample(store: DocumentStore, train: np.ndarray, *, max_bytes: int, seed: int) -> np.ndarray:
    """Numbers of the documents to train on: all, or those with the lowest hashes up to about `max_bytes`."""
    numbers = np.flatnonzero(train)
    lengths = store.lengths()[numbers]
    total = int(lengths.sum())
    if total <= max_bytes:
        return numbers
    return numbers[hash_fractions(store.keys()[numbers], salt=f"tokenizer {seed}") < max_bytes / total]


def _about(store: DocumentStore, sample: np.ndarray) -> dict[str, Any]:
    """The sample, so that another can be told from it: the sha256 is over the content keys of its documents, sorted."""
    keys = sorted(key.tobytes() for key in store.keys()[sample])
    digest = hashlib.sha256(b"".join(keys)).hexdigest()
    return {"documents": int(sample.size), "bytes": int(store.lengths()[sample].sum()), "sha256": digest}


def _texts(store: DocumentStore, numbers: np.ndarray, advance: Report) -> Iterator[str]:
    """Copied out of the parts a few MB at a time: a sample stands all over them, and mapped it would bring all of them into memory."""
    lengths = store.lengths()[numbers]
    batch = (np.cumsum(lengths) - 1).clip(min=0) // BATCH_BYTES
    for some in np.split(numbers, np.flatnonzero(np.diff(batch)) + 1):
        for text in store.sides_of(some.tolist()):
            yield text
            advance(len(text))


class _threads:
    """The library takes its number of threads from the environment; it changes the speed, never the result."""

    def __init__(self, count: int) -> None:
        self._wanted = {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": str(count)}
        self._before: dict[str, str | None] = {}

    def __enter__(self) -> None:
        self._before = {name: os.environ.get(name) for name in self._wanted}
        os.environ.update(self._wanted)

    def __exit__(self, *exception: object) -> None:
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _write(path: Path, text: str) -> None:
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        with atomic_write(path) as file:
            file.write(text.encode())
