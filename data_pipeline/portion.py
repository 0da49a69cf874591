"""Which units of work are whose, where several processes build one dataset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

Unit = TypeVar("Unit")


@dataclass(frozen=True)
class Portion:
    """The `index`th of `count`, from 0: every `count`th unit, so that large ones, which often stand together, are spread."""

    index: int
    count: int

    def __post_init__(self) -> None:
        assert 0 <= self.index < self.count, (self.index, self.count)

    def of(self, units: Sequence[Unit]) -> list[Unit]:
        return list(units[self.index :: self.count])


ALL = Portion(0, 1)
