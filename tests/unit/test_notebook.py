"""If this fails, a notebook shows other documents or rows than training sees."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data_pipeline import notebook
from data_pipeline.errors import DataError
from data_pipeline.loader import RowSource
from data_pipeline.notebook import OpenDataset, open_dataset
from tests.data_fixtures import tiny_dataset, tiny_texts

WEB, WIKI = tiny_texts(20, seed=1), ["Grüße 漢字", "", *tiny_texts(10, seed=2)]


@pytest.fixture
def data(tmp_path: Path) -> OpenDataset:
    tiny_dataset(tmp_path / "d", {"web": WEB, "wiki": WIKI}, documents_per_shard=7)
    return open_dataset(tmp_path / "d")


def test_three_lines_are_enough(data: OpenDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines of the module's docstring, as they stand there."""
    lines = [line.strip() for line in (notebook.__doc__ or "").splitlines()][2:]
    assert len(lines) == 3
    monkeypatch.chdir(data.dataset.path.parent)
    (data.dataset.path.parent / "data").mkdir()
    (data.dataset.path.parent / "data/mine").symlink_to(data.dataset.path)
    names: dict[str, object] = {}
    exec("\n".join(lines[:2]), names)
    assert eval(lines[2], names) == (WEB[0], data.rows(256)[0].text)


def test_documents_by_number_slice_id_and_source(data: OpenDataset) -> None:
    texts = [*WEB[:-4], *WIKI[:-4]]
    assert [document.text for document in data.documents] == texts and len(data.documents) == len(texts)
    assert [document.text for document in data.documents[3:20:5]] == texts[3:20:5]
    assert data.documents[-1].text == texts[-1]
    assert [document.text for document in data.heldout] == [*WEB[-4:], *WIKI[-4:]]
    assert [document.text for document in data.documents.of("wiki")] == WIKI[:-4]
    first = data.documents[0]
    assert (first.source, first.file, first.record, first.tokens[-1]) == ("web", "web.jsonl", 1, 256)
    assert data.documents[first.id[:16]].text == WEB[0]
    with pytest.raises(IndexError):
        data.documents[len(texts)]
    with pytest.raises(DataError, match="not among these"):
        data.documents[data.heldout[0].id]
    with pytest.raises(DataError, match="no source 'x'; there are web, wiki"):
        data.documents.of("x")


@pytest.mark.parametrize("heldout", [False, True])
def test_rows_are_those_of_training(data: OpenDataset, heldout: bool) -> None:
    rows = data.rows(64, seed=5, heldout=heldout)
    split = "validation" if heldout else "train"
    wanted = RowSource.open([(data.dataset, 1.0, None)], sequence_length=64, packing="best_fit", seed=5, split=split)
    for row, want in zip(rows, wanted, strict=True):
        np.testing.assert_array_equal(row.arrays.targets, want.targets)
        assert row.text == data.decode(want.targets[: want.num_targets])
        assert [int(start) for start in want.segment_starts[: len(row.pieces)]] == np.cumsum(
            [0, *(piece.tokens.size for piece in row.pieces)]
        ).tolist()[:-1]
        for piece in row.pieces:
            np.testing.assert_array_equal(piece.tokens, piece.document.tokens[piece.start : piece.start + piece.tokens.size])
    assert [row.sample for row in rows[1:4]] == [1, 2, 3] and rows[-1].sample == len(rows) - 1
    if not heldout:
        assert rows[len(rows) + 1].epoch == 1


def test_ids_and_text_both_ways_and_short_words_for_each(data: OpenDataset) -> None:
    assert data.decode(data.encode("Grüße <|endoftext|>")) == "Grüße <|endoftext|>" and 256 not in data.encode("<|endoftext|>")
    assert repr(data.documents[16]) == "StoredDocument(wiki wiki.jsonl:1, 15 tokens, 'Grüße 漢字')"
    assert "web 16, wiki 8" in repr(data) and "rows" not in repr(data.documents)
    assert repr(data.rows(64)[0]).startswith("TrainingRow(0, ") and repr(data.rows(64)[0].pieces[0]).startswith("Piece(")
