"""If this fails, stored tokens are not the documents that were encoded, or wrong ids reach the model."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.blockfile import HEADER_BYTES, write_blockfile
from data_pipeline.dataset import Dataset
from data_pipeline.errors import DataError
from data_pipeline.manifest import read_manifest, write_manifest
from data_pipeline.shards import Encoded, Shard, Vocabulary, token_dtype, write_shard
from tests.data_fixtures import tiny_dataset, tiny_texts


def vocabulary(size: int, eod: int | None = None) -> Vocabulary:
    return Vocabulary(size=size, eod_id=size - 1 if eod is None else eod, bos_id=None, tokenizer_hash="t" * 64)


def encoded(ids: list[int], number: int = 0) -> Encoded:
    return Encoded(id=f"{number:032x}", tokens=np.array(ids, dtype=np.int64), text_bytes=len(ids), file="a\nb.jsonl", record=number + 1)


def test_b022_wide_ids_are_stored_whole_and_the_width_follows_the_largest(tmp_path: Path) -> None:
    assert [token_dtype(i).str for i in (0, 65_534, 65_535, 65_536)] == ["<u2", "<u2", "<u2", "<u4"]
    with write_shard(tmp_path / "x.bin", source="s", split="train", vocabulary=vocabulary(70_002)) as shard:
        shard.add(encoded([5, 65_535, 65_536, 70_000]))
    assert Shard(tmp_path / "x.bin").document(0).tolist() == [5, 65_535, 65_536, 70_000, 70_001]
    with (
        pytest.raises(DataError, match=r"token id 65536.*ids 0 to 65535"),
        write_shard(tmp_path / "y.bin", source="s", split="train", vocabulary=vocabulary(65_536)) as shard,
    ):
        shard.add(encoded([5, 65_536]))
    assert not (tmp_path / "y.bin").exists()
    with pytest.raises(DataError, match="must lie in"):
        token_dtype(1 << 32)


def test_b023_ids_outside_the_vocabulary_are_refused_when_written_and_when_read(tmp_path: Path) -> None:
    for bad in (64, 1000, -1):
        with (
            pytest.raises(DataError, match=f"token id {bad}"),
            write_shard(tmp_path / "x.bin", source="s", split="train", vocabulary=vocabulary(64)) as shard,
        ):
            shard.add(encoded([1, bad, 2]))
    with write_blockfile(tmp_path / "x.bin", kind="shard") as out:  # a shard as another program could have written it
        out.add("tokens", np.array([1, 2, 64, 63], dtype=np.uint16))
        out.add("offsets", np.array([0, 4]))
        out.meta.update(documents=1, tokens=4, vocab_size=64, eod_id=63)
    with pytest.raises(DataError, match=r"x\.bin: token 2 is id 64, but the vocabulary has ids 0 to 63"):
        Shard(tmp_path / "x.bin").tokens(0, 4)


def test_b024_an_empty_document_costs_nothing_but_its_end(tmp_path: Path) -> None:
    with write_shard(tmp_path / "x.bin", source="s", split="train", vocabulary=vocabulary(10)) as shard:
        for number, ids in enumerate([[], [1], []]):
            shard.add(encoded(ids, number))
    opened = Shard(tmp_path / "x.bin")
    opened.verify()
    assert [opened.document(i).tolist() for i in range(3)] == [[9], [1, 9], [9]]


def test_b026_lengths_count_the_end_and_fill_the_file(tmp_path: Path) -> None:
    with write_shard(tmp_path / "x.bin", source="s", split="train", vocabulary=vocabulary(10)) as shard:
        for number, length in enumerate((3, 4, 5)):
            shard.add(encoded([1] * length, number))
    opened = Shard(tmp_path / "x.bin")
    assert np.diff(opened.offsets).tolist() == [4, 5, 6]
    assert opened.offsets[-1] == opened.num_tokens == opened.tokens(0, 15).size
    assert [opened.document_id(i) for i in range(3)] == [f"{i:032x}" for i in range(3)]
    assert [opened.origin(i) for i in range(3)] == [("a\\nb.jsonl", i + 1) for i in range(3)]
    assert [opened.text_bytes(i) for i in range(3)] == [3, 4, 5]


def test_an_end_of_document_inside_a_text_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(DataError, match="end-of-document id 9 inside"),
        write_shard(tmp_path / "x.bin", source="s", split="train", vocabulary=vocabulary(10)) as shard,
    ):
        shard.add(encoded([1, 9, 2]))


def test_b025_as_many_ends_as_documents_and_the_pieces_between_are_the_texts(tmp_path: Path) -> None:
    texts = tiny_texts(10)
    dataset = tiny_dataset(tmp_path, texts, num_validation=0, documents_per_shard=4)
    source = dataset.sources[0]
    stored = np.concatenate([shard.tokens(0, shard.num_tokens) for shard in source.shards])
    ends = np.flatnonzero(stored == dataset.eod_id)
    assert ends.size == 10 == source.num_documents
    pieces = np.split(stored, ends + 1)[:-1]
    assert [bytes(piece[:-1].astype(np.uint8)).decode() for piece in pieces] == texts
    for number, text in enumerate(texts):
        shard, inside = source.find(number)
        assert bytes(shard.document(inside)[:-1].astype(np.uint8)).decode() == text


def test_verify_counts_ends(tmp_path: Path) -> None:
    with write_blockfile(tmp_path / "x.bin", kind="shard") as out:
        out.add("tokens", np.array([1, 9, 2, 9, 3, 9], dtype=np.uint16))
        out.add("offsets", np.array([0, 4, 6]))
        out.meta.update(documents=2, tokens=6, vocab_size=10, eod_id=9)
    with pytest.raises(DataError, match="3 end-of-document ids for 2 documents"):
        Shard(tmp_path / "x.bin").verify()


def test_an_index_that_does_not_cover_the_tokens_is_refused(tmp_path: Path) -> None:
    for offsets in ([0, 3], [0, 5, 4], [1, 4], [0, 4, 4]):
        with write_blockfile(tmp_path / "x.bin", kind="shard") as out:
            out.add("tokens", np.array([1, 2, 3, 9], dtype=np.uint16))
            out.add("offsets", np.array(offsets))
            out.meta.update(documents=len(offsets) - 1, tokens=4, vocab_size=10, eod_id=9)
        with pytest.raises(DataError, match="does not cover"):
            Shard(tmp_path / "x.bin")


def test_a_changed_manifest_or_shard_is_named(tmp_path: Path) -> None:
    dataset = tiny_dataset(tmp_path / "a")
    manifest = tmp_path / "a" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"documents": 16', '"documents": 15', 1))
    with pytest.raises(DataError, match=r"manifest\.json does not match"):
        Dataset.open(tmp_path / "a")
    with pytest.raises(DataError, match="is not a dataset: it does not exist"):
        Dataset.open(tmp_path / "nothing")
    other = tiny_dataset(tmp_path / "b", tiny_texts(41, seed=1))
    first = dataset.sources[0].entry.shards[0].file
    (tmp_path / "b" / first).write_bytes((tmp_path / "a" / first).read_bytes())
    with pytest.raises(DataError, match=r"tiny-00000\.bin: holds .* the manifest says"):
        _ = other.sources[0].shards


def test_b007_shards_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    dataset = tiny_dataset(tmp_path)
    entry = dataset.sources[0].entry.shards[0]
    with write_shard(tmp_path / entry.file, source="tiny", split="train", vocabulary=Vocabulary(257, 256, None, "another")) as shard:
        lengths = np.diff(dataset.sources[0].shards[0].offsets)
        for number, length in enumerate(lengths):
            shard.add(encoded([1] * (int(length) - 1), number))
    with pytest.raises(DataError, match="made with tokenizer another"):
        _ = Dataset.open(tmp_path).sources[0].shards


def test_b045_a_sound_shard_that_is_another_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    """It has the same counts and the same tokenizer: then rows, and packing plans, would be of other text than the run's data identity says."""
    dataset, other = (
        tiny_dataset(tmp_path / "ours", ["abc", "de"], num_validation=0),
        tiny_dataset(tmp_path / "theirs", ["cba", "de"], num_validation=0),
    )
    (entry,), (theirs,) = dataset.sources[0].entry.shards, other.sources[0].entry.shards
    assert (entry.documents, entry.tokens) == (theirs.documents, theirs.tokens)
    shutil.copyfile(other.path / theirs.file, dataset.path / entry.file)
    with pytest.raises(DataError, match=r"tiny-00000\.bin: is a sound shard, but not the one that the manifest names"):
        _ = Dataset.open(dataset.path).sources[0].shards
    manifest, _ = read_manifest(dataset.path)  # one from before there were such hashes opens as it did
    before = [replace(source, shards=tuple(replace(shard, checksums=None) for shard in source.shards)) for source in manifest.sources]
    write_manifest(dataset.path, replace(manifest, sources=tuple(before)))
    assert '"checksums"' not in (dataset.path / "manifest.json").read_text()
    assert Dataset.open(dataset.path).sources[0].shards


def test_b007_a_tokenizer_file_that_is_another_is_refused(tmp_path: Path) -> None:
    """The ids would be decoded to other text, in a sample, a report or a trace."""
    dataset = tiny_dataset(tmp_path)
    path = dataset.tokenizer_path
    path.write_text(path.read_text() + "\n")
    with pytest.raises(DataError, match=r"tokenizer\.json: is not the tokenizer that the shards were made with"):
        _ = Dataset.open(tmp_path).tokenizer_path


def test_a_flipped_byte_in_a_token_is_found_before_a_row_is_made(tmp_path: Path) -> None:
    from data_pipeline.loader import RowSource

    dataset = tiny_dataset(tmp_path)
    path = tmp_path / dataset.sources[0].entry.shards[1].file
    damaged = bytearray(path.read_bytes())
    damaged[HEADER_BYTES + 100] ^= 4
    path.write_bytes(damaged)
    with pytest.raises(DataError, match=r"tiny-00001\.bin: block 0 \(bytes 4096"):
        list(RowSource.open([(Dataset.open(tmp_path), 1.0, None)], sequence_length=32, packing="concat", seed=0))
