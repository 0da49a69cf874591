"""A corpus with everything that real ones have, and its dataset."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_pipeline.build import build
from data_pipeline.dataset import Dataset
from tests.corpus_fixtures import config, write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def dataset(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return build(config(corpus, tmp_path_factory.mktemp("out") / "data"), quiet=True)
