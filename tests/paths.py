"""Where tests find what lies outside the checkout."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def corpora(name: str) -> Path:
    """The shared corpus of this name; the test is skipped, saying so, where it is absent."""
    path = ROOT.parent / "shared" / "corpora" / name
    if not path.exists():
        pytest.skip(f"the shared corpus {name!r} is not beside this checkout")
    return path
