"""What dedup has to know of each document besides its text: little, and the larger part of it on disk."""

from __future__ import annotations

import shutil
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import numpy as np

from data_pipeline.blockfile import BlockFile
from data_pipeline.dedup.config import MinHashConfig
from data_pipeline.dedup.external import write_runs
from data_pipeline.dedup.keepers import keeper_order
from data_pipeline.dedup.minhash import band_keys, signatures, sketches
from data_pipeline.document import content_key, utf8_bytes
from data_pipeline.errors import DataError

BATCH_BYTES = 4 << 20
_BAND_PRIME = np.uint64(0xBF58476D1CE4E5B9)


@dataclass(frozen=True, slots=True)
class DocRecord:
    """A document as dedup sees it. Of two equals the one with the lower `source_priority` stays. `key`: its content key; None: that of
    the text."""

    id: str
    text: str
    source_priority: int = 0
    key: bytes | None = None


@dataclass(slots=True)
class Columns:
    """Some records without their texts, one row each: ids S, priorities and lengths int64, keys uint64[n, 2],
    bands uint64[n, bands], sketches uint8[n, bands * rows], has_signature bool."""

    ids: np.ndarray
    priorities: np.ndarray
    lengths: np.ndarray
    keys: np.ndarray
    bands: np.ndarray
    sketches: np.ndarray
    has_signature: np.ndarray


def columns_of(batch: Sequence[DocRecord], config: MinHashConfig | None) -> Columns:
    texts = [record.text for record in batch]
    of_each = [content_key(record.text) if record.key is None else record.key for record in batch]
    keys = np.frombuffer(b"".join(of_each), dtype=">u8").astype(np.uint64).reshape(-1, 2)
    if config is None:
        bands, bytes_of, has_signature = (
            np.empty((len(batch), 0), np.uint64),
            np.empty((len(batch), 0), np.uint8),
            np.zeros(len(batch), np.bool_),
        )
    else:
        signature, has_signature = signatures(texts, config)
        bands, bytes_of = band_keys(signature, config), sketches(signature)
    return Columns(
        ids=np.array([record.id.encode("utf-8", "surrogatepass") for record in batch], dtype=np.bytes_),
        priorities=np.array([record.source_priority for record in batch], dtype=np.int64),
        lengths=np.array([utf8_bytes(text) for text in texts], dtype=np.int64),
        keys=keys,
        bands=bands,
        sketches=bytes_of,
        has_signature=has_signature,
    )


def row_of(config: MinHashConfig | None) -> np.dtype[Any]:
    """A document's columns in a file, but for its id and priority."""
    bands, rows = (0, 0) if config is None else (config.num_bands, config.num_bands * config.rows_per_band)
    return np.dtype(
        [("key", "<u8", (2,)), ("length", "<i8"), ("has_signature", "u1"), ("bands", "<u8", (bands,)), ("sketch", "u1", (rows,))]
    )


def rows_of(columns: Columns, config: MinHashConfig | None) -> bytes:
    rows = np.zeros(len(columns.ids), dtype=row_of(config))
    rows["key"], rows["length"], rows["has_signature"] = columns.keys, columns.lengths, columns.has_signature
    rows["bands"], rows["sketch"] = columns.bands, columns.sketches
    return rows.tobytes()


def columns_from(
    file: BlockFile,
    config: MinHashConfig | None,
    first: int,
    stop: int,
    *,
    ids: Sequence[bytes],
    priority: int,
    chosen: np.ndarray | slice = slice(None),
) -> Columns:
    """Rows first .. stop - 1 of the array `rows` of a file, or those of them that are chosen, whose `ids` these are."""
    row = row_of(config)
    rows = file.read("rows", first * row.itemsize, stop * row.itemsize).view(row)[chosen]
    return Columns(
        ids=np.array(ids, dtype=np.bytes_),
        priorities=np.full(len(rows), priority, dtype=np.int64),
        lengths=rows["length"].astype(np.int64),
        keys=rows["key"].astype(np.uint64),
        bands=rows["bands"].astype(np.uint64).reshape(len(rows), -1),
        sketches=np.ascontiguousarray(rows["sketch"]).reshape(len(rows), -1),
        has_signature=rows["has_signature"].astype(np.bool_),
    )


def all_columns(
    records: Iterable[DocRecord | Columns], config: MinHashConfig | None, executor: Executor, *, ahead: int
) -> Iterator[Columns]:
    """Batch by batch in the records' order, with no more than `ahead` batches, and the texts they hold, under way."""
    running: deque[Future[Columns]] = deque()
    for batch in _batches_and_columns(records):
        if isinstance(batch, Columns):
            running.append(Future())
            running[-1].set_result(batch)
        else:
            running.append(executor.submit(columns_of, batch, config))
        if len(running) >= ahead:
            yield running.popleft().result()
    while running:
        yield running.popleft().result()


def _batches_and_columns(records: Iterable[DocRecord | Columns]) -> Iterator[list[DocRecord] | Columns]:
    for kind, group in groupby(records, type):
        if kind is DocRecord:
            yield from batches(group)
        else:
            yield from cast(Iterator[Columns], group)


def batches(records: Iterable[Any]) -> Iterator[list[DocRecord]]:
    """Records in order, some MB of text at a time."""
    batch: list[DocRecord] = []
    held = 0
    for record in records:
        batch.append(record)
        held += len(record.text)
        if held >= BATCH_BYTES or len(batch) >= 4096:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


class Table:
    """All records, in the order in which they came: `ids`, `priorities`, `lengths`, `keys`, `has_signature` as in Columns. Bands lie on
    disk in `bands_path`, as runs of (band's key, row); sketches in a file of their own."""

    def __init__(self, parts: Iterable[Columns], config: MinHashConfig | None, folder: Path) -> None:
        held: dict[str, list[np.ndarray]] = {name: [] for name in ("ids", "priorities", "lengths", "keys", "has_signature")}
        self.bands_path = folder / "bands.runs"
        self._sketches_path = folder / "sketches"
        self._sketch_bytes = 0 if config is None else config.num_bands * config.rows_per_band
        salts = np.arange(1, (0 if config is None else config.num_bands) + 1, dtype=np.uint64) * _BAND_PRIME
        rows = 0
        with write_runs(self.bands_path) as runs, open(self._sketches_path, "wb") as file:
            for part in parts:
                for name, columns in held.items():
                    columns.append(getattr(part, name))
                numbers = np.arange(rows, rows + len(part.ids), dtype=np.uint64)[part.has_signature]
                for band in range(part.bands.shape[1] if len(numbers) else 0):
                    mixed = (part.bands[part.has_signature, band] ^ salts[band]) * _BAND_PRIME
                    runs.add(mixed ^ (mixed >> np.uint64(32)), numbers)
                file.write(part.sketches.tobytes())
                rows += len(part.ids)
        empty = columns_of([], config)
        self.ids, self.priorities, self.lengths, self.keys, self.has_signature = (
            np.concatenate(held.pop(name) or [getattr(empty, name)]) for name in list(held)
        )

    def __len__(self) -> int:
        return len(self.ids)

    def id_of(self, row: int) -> str:
        value: bytes = self.ids[row]
        return value.decode("utf-8", "surrogatepass")

    def sketches(self, rows: np.ndarray) -> np.ndarray:
        """uint8[rows, bands * rows_per_band], read from disk."""
        if not len(rows) or not self._sketch_bytes:
            return np.empty((len(rows), self._sketch_bytes), dtype=np.uint8)
        return np.array(np.memmap(self._sketches_path, dtype=np.uint8, mode="r").reshape(-1, self._sketch_bytes)[rows])

    def keeper_order(self) -> np.ndarray:
        """int64[n]: rows from the one most worth keeping on."""
        order = keeper_order(priorities=self.priorities, lengths=self.lengths, keys=self.keys, ids=[self.ids])
        in_order = np.sort(self.ids)
        if np.any(same := in_order[1:] == in_order[:-1]):
            raise DataError(f"two documents have the id {in_order[1:][same][0].decode()!r}: removing one would remove both")
        return order


@contextmanager
def scratch_folder(folder: Path | None) -> Iterator[Path]:
    """`folder`, made now and removed at the end, or one of the system's."""
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="dedup-") as name:
            yield Path(name)
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
