"""If this fails, nobody can say which document a token of a training row came from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data_pipeline.build import build
from data_pipeline.dataset import Dataset
from data_pipeline.errors import DataError
from data_pipeline.loader import NO_TARGET, RowSource
from data_pipeline.trace import find_document, samples_of, trace
from tests.corpus_fixtures import config, write_corpus


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("trace")
    return build(config(write_corpus(folder / "raw", size=15), folder / "data", validation={"fraction": 0.1}), quiet=True)


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_every_target_is_traced_to_its_bytes(dataset: Dataset, packing: str) -> None:
    """The bytes named for the targets of a row are, document by document, the text that the tokens stand for."""
    rows = RowSource.open([(dataset, 1.0, None)], sequence_length=32, packing=packing, seed=3)  # type: ignore[arg-type]
    for sample in (0, 7, len(rows) + 2):
        row = rows[sample]
        for position in range(0, row.num_targets, 5):
            origin = trace(rows, sample, position)
            assert origin.token_id == row.targets[position] and origin.epoch == sample // len(rows)
            split, source, number = find_document(dataset, origin.document)
            assert (split, source) == ("train", origin.source)
            shard, inside = next(s for s in dataset.sources if s.name == source).find(number)
            assert shard.origin(inside) == (origin.file, origin.record)
            if origin.first_byte is None:
                assert origin.token_id == dataset.eod_id
            else:
                widths = dataset.token_bytes[shard.document(inside)].astype(np.int64)
                assert origin.first_byte == widths[: origin.token_in_document].sum()
                assert origin.last_byte == origin.first_byte + widths[origin.token_in_document] - 1
            assert sample in set(samples_of(rows, split=split, source=source, document=number, num_samples=len(rows) + 3))


def test_characters_count_characters(tmp_path: Path) -> None:
    from tests.data_fixtures import tiny_dataset

    dataset = tiny_dataset(tmp_path, ["é漢🙂 abc"], num_validation=0)
    rows = RowSource.open([(dataset, 1.0, None)], sequence_length=32, packing="concat", seed=0)
    origin = trace(rows, 0, 10)
    assert (origin.token, origin.first_byte, origin.first_character, origin.file, origin.record) == ("a", 10, 4, "tiny.jsonl", 1)
    assert (origin.before, origin.after) == ("é漢🙂 ", "bc<|endoftext|>")
    last = trace(rows, 0, 13)
    assert last.token_id == 256 and last.first_byte is last.first_character is None
    with pytest.raises(DataError, match="is padding: the row has 14 targets"):
        trace(rows, 0, 14)
    with pytest.raises(DataError, match="positions 0 to 31"):
        trace(rows, 0, 32)
    assert rows[0].targets[14] == NO_TARGET


def test_documents_are_found_by_the_beginning_of_their_id(dataset: Dataset) -> None:
    source = dataset.validation[0]
    shard, inside = source.find(source.num_documents - 1)
    id = shard.document_id(inside)
    assert find_document(dataset, id) == find_document(dataset, id[:11]) == ("validation", source.name, source.num_documents - 1)
    with pytest.raises(DataError, match="no document with an id"):
        find_document(dataset, "0" * 32)
    with pytest.raises(DataError, match="no document with an id"):
        find_document(dataset, "not hex")
    with pytest.raises(DataError, match="give more digits"):
        find_document(dataset, next(d for d in "0123456789abcdef" if sum(len(s.numbers_of(d)) for s in dataset.sources[0].shards) > 1))
