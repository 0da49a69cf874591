"""The order of the tests: what takes long first, so that two workers end together."""

from __future__ import annotations

import pytest

from tests.paths import ROOT

KINDS = ("slurm", "integration", "distributed", "gpu", "unit")  # folders of tests/


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole files stay together (`--dist loadfile`), in the order of their kinds."""

    def kind(item: pytest.Item) -> int:
        folder = item.path.relative_to(ROOT / "tests").parts[0]
        return KINDS.index(folder) if folder in KINDS else len(KINDS)

    items.sort(key=kind)
