"""Packing plans of pairs as files beside the shards: `packing/SOURCE-S256-T256-pairs.plan`.

Like a plan of documents it carries the hashes of what it was made for, so one of other data is never used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_pipeline.blockfile import BlockFile, write_blockfile
from data_pipeline.errors import DataError
from data_pipeline.pair_packing import TOO_LONG, plan_pair_rows, too_long
from data_pipeline.plans import SourceKey

PAIR_PLAN_VERSION = 1  # part of every plan's identity


@dataclass(frozen=True)
class PairPlanKey(SourceKey):
    """Everything that a plan of pairs is a function of."""

    source_length: int
    target_length: int

    @property
    def rows(self) -> str:
        return f"S{self.source_length}-T{self.target_length}-pairs"

    def to_meta(self) -> dict[str, object]:
        return {**self.__dict__, "method": "pairs", "pair_plan_version": PAIR_PLAN_VERSION}


class PairPlan:
    """An opened plan. `left_out`: pairs that are in no row, by reason."""

    def __init__(self, file: BlockFile) -> None:
        self._file = file
        self.meta = file.meta
        self.num_rows: int = file.meta["num_rows"]
        self.num_pairs: int = file.meta["num_pairs"]
        self.num_source_tokens: int = file.meta["num_source_tokens"]
        self.num_targets: int = file.meta["num_targets"]
        self.left_out: dict[str, int] = {reason: file.meta[reason] for reason in TOO_LONG}

    def pairs(self, row: int) -> np.ndarray:
        """The pairs of one row, in order; uint32."""
        first, last = self._file.read("row_starts", row, row + 2)
        return self._file.read("pairs", int(first), int(last))

    @property
    def padding(self) -> tuple[float, float]:
        """Share of the rows' places that are padding: of the source side, of the target side."""
        lengths = self.meta["source_length"], self.meta["target_length"]
        used = self.num_source_tokens, self.num_targets
        one, other = (1 - tokens / max(self.num_rows * length, 1) for tokens, length in zip(used, lengths))
        return one, other


def open_pair_plan(folder: Path, key: PairPlanKey) -> PairPlan | None:
    """The plan that was made for exactly this key, None where there is none. A damaged one raises DataError."""
    path = folder / key.file_name
    if not path.exists():
        return None
    file = BlockFile(path, kind="plan")
    return PairPlan(file) if {name: file.meta.get(name) for name in key.to_meta()} == key.to_meta() else None


def make_pair_plan(folder: Path, key: PairPlanKey, source: np.ndarray, target: np.ndarray) -> PairPlan:
    """Plan the rows and write them, atomically; an old plan of the same name gives way."""
    lengths = {"source_length": key.source_length, "target_length": key.target_length}
    over = too_long(source, target, **lengths)
    counts: list[np.ndarray] = [np.zeros(1, dtype=np.int64)]
    try:
        with write_blockfile(folder / key.file_name, kind="plan") as out:
            out.begin("pairs", "<u4")
            for some in plan_pair_rows(source, target, **lengths, key=key.source_hash):
                out.append(some.pairs)
                counts.append(some.pairs_per_row)
            row_starts = np.cumsum(np.concatenate(counts))
            out.add("row_starts", row_starts)
            out.meta.update(key.to_meta(), num_rows=row_starts.size - 1, num_pairs=int(row_starts[-1]))
            out.meta.update(num_source_tokens=int(source[over == 0].sum()), num_targets=int(target[over == 0].sum()))
            out.meta.update({reason: int((over == 1 + number).sum()) for number, reason in enumerate(TOO_LONG)})
    except OSError as error:
        raise DataError(
            f"the packing plan {folder / key.file_name} can't be written ({error.strerror or error}). "
            "Make the dataset folder writable once and run `mlite data pack` on it, or copy the dataset."
        ) from None
    plan = open_pair_plan(folder, key)
    assert plan is not None and plan.num_pairs + sum(plan.left_out.values()) == source.size, "a plan must hold or count every pair once"
    return plan


def left_out_words(counts: Sequence[tuple[str, int]]) -> str:
    """For people: how many pairs are in no row, and why."""
    said = ", ".join(f"{number:,} {reason.replace('_', ' ')}" for reason, number in counts if number)
    return f"; left out: {said}" if said else ""
