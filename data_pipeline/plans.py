"""Packing plans as files beside the shards: `packing/SOURCE-S2048-best_fit.plan`.

A plan carries the hashes of the manifest and of the source that it was made for, so one of other data is never used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.blockfile import BlockFile, write_blockfile
from data_pipeline.errors import DataError
from data_pipeline.packing import PIECE, PLAN_VERSIONS, Method, Rows, plan_rows


@dataclass(frozen=True)
class SourceKey(ABC):
    """What every plan of a source is a function of, whatever its rows are."""

    source: str
    split: str
    source_hash: str
    manifest_hash: str

    @property
    def file_name(self) -> str:
        split = "" if self.split == "train" else f".{self.split}"
        return f"{self.source}{split}-{self.rows}.plan"

    @property
    @abstractmethod
    def rows(self) -> str:
        """The shape of the rows, for the file's name."""


@dataclass(frozen=True)
class PlanKey(SourceKey):
    """Everything that a plan is a function of."""

    sequence_length: int
    method: Method

    @property
    def rows(self) -> str:
        return f"S{self.sequence_length}-{self.method}"

    def to_meta(self) -> dict[str, object]:
        return {**self.__dict__, "plan_version": PLAN_VERSIONS[self.method]}


class Plan:
    """An opened plan. `num_rows`, `num_tokens`, `num_padding_tokens`, `num_cuts` (places where a document was cut)."""

    def __init__(self, file: BlockFile) -> None:
        self._file = file
        self.num_rows: int = file.meta["num_rows"]
        self.num_tokens: int = file.meta["num_tokens"]
        self.num_padding_tokens: int = file.meta["num_padding_tokens"]
        self.num_cuts: int = file.meta["num_cuts"]

    def pieces(self, row: int) -> np.ndarray:
        """The PIECEs of one row, in order."""
        first, last = self._file.read("row_starts", row, row + 2)
        return self._file.read("pieces", int(first), int(last))

    def verify(self) -> None:
        self._file.verify()


def open_plan(folder: Path, key: PlanKey) -> Plan | None:
    """The plan that was made for exactly this key, None where there is none. A damaged one raises DataError."""
    path = folder / key.file_name
    if not path.exists():
        return None
    file = BlockFile(path, kind="plan")
    if {name: file.meta.get(name) for name in key.to_meta()} != key.to_meta():
        return None
    return Plan(file)


def make_plan(folder: Path, key: PlanKey, lengths: np.ndarray) -> Plan:
    """Plan the rows and write them, atomically; an old plan of the same name gives way."""
    rows = plan_rows(lengths, sequence_length=key.sequence_length, method=key.method, key=key.source_hash)
    try:
        write_plan(folder / key.file_name, key, rows, num_documents=lengths.size)
    except OSError as error:
        raise DataError(
            f"the packing plan {folder / key.file_name} can't be written ({error.strerror or error}). "
            "Make the dataset folder writable once and run `mlite data pack` on it, or copy the dataset."
        ) from None
    plan = open_plan(folder, key)
    assert plan is not None and plan.num_tokens == lengths.sum(), "a plan must hold every token once"
    return plan


def write_plan(path: Path, key: PlanKey, rows: Iterable[Rows], *, num_documents: int) -> None:
    counts: list[np.ndarray] = []
    num_tokens = num_pieces = 0
    with write_blockfile(path, kind="plan") as out:
        out.begin("pieces", PIECE)
        for some in rows:
            out.append(some.pieces)
            num_tokens += int(some.pieces["length"].sum())
            num_pieces += some.pieces.size
            per_row = some.pieces_per_row.astype(np.int64)
            if some.continues:
                counts[-1][-1] += per_row[0]
                per_row = per_row[1:]
            if per_row.size:
                counts.append(per_row)
        row_starts = np.concatenate(
            [np.zeros(1, dtype=np.int64), np.cumsum(np.concatenate(counts))] if counts else [np.zeros(1, dtype=np.int64)]
        )
        out.add("row_starts", row_starts)
        num_rows = row_starts.size - 1
        out.meta.update(
            key.to_meta(),
            num_rows=num_rows,
            num_tokens=num_tokens,
            num_padding_tokens=num_rows * key.sequence_length - num_tokens,
            num_cuts=num_pieces - num_documents,
        )


def read_plan_facts(folder: Path) -> list[dict[str, Any]]:
    """The header of every plan in the folder, by name."""
    return [BlockFile(path, kind="plan").meta for path in sorted(folder.glob("*.plan"))]
