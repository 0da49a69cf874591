"""If this fails, token files of other tools come in or go out with other ids, or a damaged one is taken for a whole one."""

from __future__ import annotations

import json
import struct
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_pipeline.dataset import Dataset
from data_pipeline.errors import ConfigError, DataError
from data_pipeline.interchange.exporting import export_tokens
from data_pipeline.interchange.importing import Source, import_tokens
from data_pipeline.interchange.megatron import MegatronFile, index_bytes, megatron_dtype
from data_pipeline.loader import RowSource
from data_pipeline.tokenizer.byte_level import bytes_tokenizer_json
from data_pipeline.verify import verify_dataset
from tests.data_fixtures import tiny_dataset

EOD = 256


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    path = tmp_path / "tokenizer.json"
    path.write_text(bytes_tokenizer_json(), encoding="utf-8")
    return str(path)


def load(folder: Path, tokenizer: str, files: str | list[str], *, name: str = "web", format: str = "auto", **more: Any) -> Dataset:
    split = {key: more.pop(key) for key in ("validation", "validation_fraction") if key in more}
    source = Source(name, files, **split)
    return import_tokens([source], folder, tokenizer=tokenizer, format=format, quiet=True, **more)


def documents(dataset: Dataset, split: str = "train") -> list[list[int]]:
    return [shard.document(n).tolist() for source in dataset.split(split) for shard in source.shards for n in range(shard.num_documents)]


def megatron_pair(prefix: Path, sequences: list[list[int]], table: list[int], *, code: int = 8, spelled: str = "<u2") -> None:
    """The two files, byte by byte as the format has them."""
    size = np.dtype(spelled).itemsize
    lengths = [len(sequence) for sequence in sequences]
    pointers = [size * sum(lengths[:n]) for n in range(len(lengths))]
    idx = (
        b"MMIDIDX\x00\x00"
        + struct.pack("<Q", 1)
        + struct.pack("<B", code)
        + struct.pack("<Q", len(lengths))
        + struct.pack("<Q", len(table))
    )
    idx += b"".join(struct.pack("<i", n) for n in lengths) + b"".join(struct.pack("<q", n) for n in [*pointers, *table])
    prefix.with_suffix(".idx").write_bytes(idx)
    prefix.with_suffix(".bin").write_bytes(b"".join(np.array(sequence, dtype=spelled).tobytes() for sequence in sequences))


@pytest.mark.parametrize(("code", "spelled"), [(8, "<u2"), (4, "<i4"), (5, "<i8")])
def test_megatron_in_and_out_byte_for_byte(tmp_path: Path, tokenizer: str, code: int, spelled: str) -> None:
    """Hand-laid files, one with ends and an empty document (B024); what goes out again is the same two files."""
    sequences = [[1, 2, 3, EOD], [EOD], [7, EOD], [9, 8, 7, 6, 5, EOD]]
    megatron_pair(tmp_path / "x", sequences, [0, 1, 2, 3, 4], code=code, spelled=spelled)
    dataset = load(tmp_path / "d", tokenizer, str(tmp_path / "x"))
    assert documents(dataset) == sequences
    verify_dataset(tmp_path / "d", quiet=True)
    export_tokens(dataset, tmp_path / "out", format="megatron")
    if code == 8:
        assert (tmp_path / "out/web.bin").read_bytes() == (tmp_path / "x.bin").read_bytes()
        assert (tmp_path / "out/web.idx").read_bytes() == (tmp_path / "x.idx").read_bytes()
    again = MegatronFile(tmp_path / "out/web.idx")
    assert [tokens.tolist() for tokens in again.documents()] == sequences and again.dtype == np.dtype("<u2")


def test_b025_ends_are_ours_to_add_and_to_leave_out_again(tmp_path: Path, tokenizer: str) -> None:
    """Megatron's default writes no end of document; some of these have one, one has none and no tokens."""
    for name, sequences in {"none": [[1, 2], [], [3]], "some": [[1, 2, EOD], [], [3], [4, EOD]]}.items():
        megatron_pair(tmp_path / name, sequences, list(range(len(sequences) + 1)))
        dataset = load(tmp_path / f"d-{name}", tokenizer, str(tmp_path / f"{name}.bin"))
        assert documents(dataset) == [[*[t for t in sequence if t != EOD], EOD] for sequence in sequences]
        added = dataset.manifest.config["imported"]["web"]["train"]["ends_added"]
        assert added == ("all" if name == "none" else [1, 2])
        assert dataset.manifest.ledger["import"]["web"]["notes"] == {"end_added": 3 if name == "none" else 2}
        export_tokens(dataset, tmp_path / f"out-{name}", format="megatron")
        assert (tmp_path / f"out-{name}/web.bin").read_bytes() == (tmp_path / f"{name}.bin").read_bytes()
        assert (tmp_path / f"out-{name}/web.idx").read_bytes() == (tmp_path / f"{name}.idx").read_bytes()
        export_tokens(dataset, tmp_path / f"keep-{name}", format="megatron", ends="keep")
        kept = [tokens.tolist() for tokens in MegatronFile(tmp_path / f"keep-{name}/web.bin").documents()]
        assert kept == documents(dataset)


def test_sentences_of_a_document_are_one_document_and_an_end_inside_makes_two(tmp_path: Path, tokenizer: str) -> None:
    megatron_pair(tmp_path / "x", [[1, 2], [3, EOD], [4, EOD, 5, EOD]], [0, 2, 3])
    dataset = load(tmp_path / "d", tokenizer, str(tmp_path / "x.idx"))
    assert documents(dataset) == [[1, 2, 3, EOD], [4, EOD], [5, EOD]]
    export_tokens(dataset, tmp_path / "out", format="megatron")
    assert (tmp_path / "out/web.bin").read_bytes() == (tmp_path / "x.bin").read_bytes()


def test_damaged_megatron_files_are_refused_by_name(tmp_path: Path) -> None:
    """B026's lengths taken before the end was added, a table broken by a merge, a pointer past 2^31."""

    def fresh() -> bytearray:
        megatron_pair(tmp_path / "x", [[1, 2, EOD], [3, EOD]], [0, 1, 2])
        return bytearray((tmp_path / "x.idx").read_bytes())

    def refused(idx: bytes | bytearray, why: str) -> None:
        (tmp_path / "x.idx").write_bytes(idx)
        with pytest.raises(DataError, match=why):
            MegatronFile(tmp_path / "x.bin")

    refused(fresh()[:-1], r"x\.idx: 81 bytes long, its header says 82")
    refused(b"NOTANIDX\0" + fresh()[9:], "not an index of Megatron")
    idx = fresh()
    idx[17] = 7
    refused(idx, "float32, not token ids")
    idx = fresh()
    idx[34:38] = struct.pack("<i", 2)
    refused(idx, "before the end of a document was added")
    idx = fresh()
    idx[50:58] = struct.pack("<q", -2_147_483_640)
    refused(idx, r"sequence 1 lies at byte -2147483640")
    idx = fresh()
    idx[-8:] = struct.pack("<q", 1)
    refused(idx, "document table .*does not go from 0 to its 2 sequences")
    (tmp_path / "x.idx").unlink()
    with pytest.raises(DataError, match=r"x\.idx does not exist"):
        MegatronFile(tmp_path / "x.bin")


def test_the_index_counts_beyond_31_bits_and_says_where_it_cannot() -> None:
    """Pointers are bytes and pass 2^31 at 1.07 billion tokens; a single document can't."""
    lengths = np.full(5, (1 << 31) - 1, dtype=np.int64)
    pointers = np.frombuffer(index_bytes(lengths, np.dtype("<i4")), "<i8", 5, 34 + 20)
    assert pointers.tolist() == [4 * n * ((1 << 31) - 1) for n in range(5)]
    with pytest.raises(DataError, match=r"2147483648 tokens does not fit"):
        index_bytes(np.array([1 << 31]), np.dtype("<i4"))
    assert [megatron_dtype(size).str for size in (65_499, 65_500)] == ["<u2", "<i4"]


def test_megatron_itself_reads_what_we_write_and_we_what_it_writes(tmp_path: Path, tokenizer: str) -> None:
    """Against the peer's own reader and writer, where its package is installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = pytest.importorskip("megatron.core.datasets.indexed_dataset", exc_type=ImportError)
        import torch

        texts = [[1, 2, EOD], [EOD], [3, 4, 5, EOD]]
        builder = theirs.IndexedDatasetBuilder(str(tmp_path / "x.bin"), dtype=np.uint16)
        for text in texts:
            builder.add_document(torch.tensor(text), [len(text)])
        builder.finalize(str(tmp_path / "x.idx"))
        dataset = load(tmp_path / "d", tokenizer, str(tmp_path / "x"))
        assert documents(dataset) == texts
        export_tokens(dataset, tmp_path / "out", format="megatron")
        for suffix in (".bin", ".idx"):
            assert (tmp_path / f"out/web{suffix}").read_bytes() == (tmp_path / f"x{suffix}").read_bytes()
        opened = theirs.IndexedDataset(str(tmp_path / "out/web"))
        assert [opened[n].tolist() for n in range(len(opened))] == texts and opened.document_indices.tolist() == [0, 1, 2, 3]


def test_the_commands(tmp_path: Path, tokenizer: str) -> None:
    from typer.testing import CliRunner

    from launcher.commands.data import app

    (tmp_path / "train.bin").write_bytes(np.array([5, EOD, 6, EOD], dtype="<u2").tobytes())
    words = ["import", str(tmp_path / "train.bin"), "-o", str(tmp_path / "d"), "--tokenizer", tokenizer, "--name", "web", "-q"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    result = CliRunner().invoke(app, ["export", str(tmp_path / "d"), str(tmp_path / "out"), "--format", "megatron"])
    assert result.exit_code == 0, result.output
    assert [json.loads(line)["name"] for line in result.stdout.splitlines()] == ["web.bin", "web.idx"]
    assert MegatronFile(tmp_path / "out/web.bin").num_tokens == 4


def test_nanogpt_in_and_out_byte_for_byte(tmp_path: Path, tokenizer: str) -> None:
    """train.bin ends in an end, val.bin in the middle of a document: both come back as they were."""
    train, val = [5, 6, EOD, EOD, 7, 8, EOD], [1, EOD, 2, 3]
    (tmp_path / "train.bin").write_bytes(np.array(train, dtype="<u2").tobytes())
    (tmp_path / "val.bin").write_bytes(np.array(val, dtype="<u2").tobytes())
    dataset = load(tmp_path / "d", tokenizer, str(tmp_path / "train.bin"), validation=str(tmp_path / "val.bin"))
    assert documents(dataset) == [[5, 6, EOD], [EOD], [7, 8, EOD]]
    assert documents(dataset, "validation") == [[1, EOD], [2, 3, EOD]]
    export_tokens(dataset, tmp_path / "out", format="nanogpt")
    for name in ("train.bin", "val.bin"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / name).read_bytes()
    about = json.loads((tmp_path / "out/export.json").read_text())
    assert (about["eod_id"], about["files"][0]["tokens"], about["files"][1]["documents"]) == (EOD, 7, 2)
    with pytest.raises(ConfigError, match="folder that doesn't exist yet"):
        export_tokens(dataset, tmp_path / "out", format="nanogpt")


def test_a_text_without_any_end_is_one_document(tmp_path: Path, tokenizer: str) -> None:
    """As nanoGPT's own character data is."""
    (tmp_path / "train.bin").write_bytes(np.arange(200, dtype="<u2").tobytes())
    dataset = load(tmp_path / "d", tokenizer, str(tmp_path / "train.bin"))
    assert documents(dataset) == [[*range(200), EOD]]
    export_tokens(dataset, tmp_path / "out", format="nanogpt")
    assert (tmp_path / "out/train.bin").read_bytes() == (tmp_path / "train.bin").read_bytes()


def test_llmc_documents_run_on_into_the_next_file(tmp_path: Path, tokenizer: str) -> None:
    ids = [EOD, 1, 2, 3, EOD, 4, 5, 6, 7, 8]  # llm.c puts the end before each document
    for number, part in enumerate((ids[:3], ids[3:6], ids[6:])):
        head = struct.pack("<256i", 20240520, 1, len(part), *[0] * 253)
        (tmp_path / f"fine_train_{number:06d}.bin").write_bytes(head + np.array(part, dtype="<u2").tobytes())
    dataset = load(tmp_path / "d", tokenizer, str(tmp_path / "fine_train_*.bin"), name="fine")
    assert documents(dataset) == [[EOD], [1, 2, 3, EOD], [4, 5, 6, 7, 8, EOD]]
    export_tokens(dataset, tmp_path / "out", format="llmc", llmc_file_tokens=3)
    out = [path.read_bytes() for path in sorted((tmp_path / "out").glob("fine_train_*.bin"))]
    assert [len(raw) for raw in out] == [1030, 1030, 1030, 1026]
    assert np.frombuffer(b"".join(raw[1024:] for raw in out), "<u2").tolist() == ids
    assert out[0][:1024] == struct.pack("<256i", 20240520, 1, 3, *[0] * 253)
    (tmp_path / "cut.bin").write_bytes(out[0][:-2])
    with pytest.raises(DataError, match="holds 2 ids, its header says 3"):
        load(tmp_path / "e", tokenizer, str(tmp_path / "cut.bin"), format="llmc")


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
def test_npy_with_and_without_numpys_header(tmp_path: Path, tokenizer: str, dtype: str) -> None:
    ids = np.array([1, 2, 3, 255, 4] if dtype == "uint8" else [1, 2, EOD, 3, 4, EOD], dtype=dtype)
    np.save(tmp_path / "a.npy", ids)
    dataset = load(tmp_path / "d", tokenizer, str(tmp_path / "a.npy"))
    export_tokens(dataset, tmp_path / "out", format="npy")
    np.testing.assert_array_equal(np.load(tmp_path / "out/web.npy", allow_pickle=False), ids)
    (tmp_path / "raw.npy").write_bytes(ids.tobytes())
    with pytest.raises(ConfigError, match="has no header that says how wide"):
        load(tmp_path / "e", tokenizer, str(tmp_path / "raw.npy"))
    assert documents(load(tmp_path / "e", tokenizer, str(tmp_path / "raw.npy"), dtype=dtype)) == documents(dataset)


def test_wrong_ids_and_wrong_widths_are_named(tmp_path: Path, tokenizer: str) -> None:
    """B022, B023: ids of another tokenizer, or read two bytes wide where they are four, are never taken."""
    (tmp_path / "x.bin").write_bytes(np.array([1, EOD, 2, 300, EOD], dtype="<u2").tobytes())
    with pytest.raises(DataError, match=r"x\.bin: document 2 has id 300 at place 1, but the tokenizer has ids 0 to 256"):
        load(tmp_path / "d", tokenizer, str(tmp_path / "x.bin"))
    assert not (tmp_path / "d").exists()
    (tmp_path / "y.bin").write_bytes(b"abc")
    with pytest.raises(DataError, match="3 bytes are no whole number of uint16 ids"):
        load(tmp_path / "d", tokenizer, str(tmp_path / "y.bin"))
    (tmp_path / "y.bin").write_bytes(b"")
    with pytest.raises(DataError, match="no tokens"):
        load(tmp_path / "d", tokenizer, str(tmp_path / "y.bin"))
    np.save(tmp_path / "z.npy", np.zeros((2, 2)))
    with pytest.raises(DataError, match=r"float64 of shape \(2, 2\)"):
        load(tmp_path / "d", tokenizer, str(tmp_path / "z.npy"))
    ours = tiny_dataset(tmp_path / "ours", num_validation=0)
    with pytest.raises(DataError, match="a shard of ours"):
        load(tmp_path / "d", tokenizer, str(ours.path / "shards"))
    with pytest.raises(ConfigError, match="--format"):
        load(tmp_path / "d", tokenizer, str(tmp_path / "x.bin"), format="parquet")
    wide = tiny_dataset(tmp_path / "wide", [[1, 69_999]], vocab=70_001, num_validation=0)
    for format in ("nanogpt", "llmc"):
        with pytest.raises(ConfigError, match="ids above 65535"):
            export_tokens(wide, tmp_path / "out", format=format)
    export_tokens(wide, tmp_path / "out", format="megatron")
    assert (tmp_path / "out/tiny.bin").read_bytes() == np.array([1, 69_999, 70_000], dtype="<i4").tobytes()


def test_a_share_is_held_out_by_content_and_shards_are_cut(tmp_path: Path, tokenizer: str) -> None:
    rng = np.random.default_rng(0)
    texts = [[*rng.integers(0, 256, size=int(rng.integers(0, 40))).tolist(), EOD] for _ in range(300)]
    (tmp_path / "x.bin").write_bytes(np.array([t for text in texts for t in text], dtype="<u2").tobytes())
    dataset = load(tmp_path / "d", tokenizer, str(tmp_path / "x.bin"), validation_fraction=0.1, shard_tokens=500)
    train, heldout = documents(dataset), documents(dataset, "validation")
    assert sorted(map(tuple, [*train, *heldout])) == sorted(map(tuple, texts)) and 10 < len(heldout) < 60
    assert len(dataset.sources[0].shards) > 5
    assert not {tuple(text) for text in train} & {tuple(text) for text in heldout}
    for format in ("nanogpt", "megatron", "npy", "llmc"):
        export_tokens(dataset, tmp_path / format, format=format)
    val = np.fromfile(tmp_path / "nanogpt/val.bin", dtype="<u2").tolist()
    assert val == [t for text in heldout for t in text]
    assert [t.tolist() for t in MegatronFile(tmp_path / "megatron/web.validation.bin").documents()] == heldout
    np.testing.assert_array_equal(np.load(tmp_path / "npy/web.validation.npy"), val)
    assert np.fromfile(tmp_path / "llmc/web_val_000000.bin", dtype="<u2")[512:].tolist() == val


def test_an_imported_dataset_trains_like_any_other(tmp_path: Path, tokenizer: str) -> None:
    """Every id of the file is a target once an epoch; bytes of text are counted for bits per byte."""
    text = "héllo wörld\n"
    (tmp_path / "x.bin").write_bytes(np.array([*text.encode(), EOD, *b"ab", EOD], dtype="<u2").tobytes())
    rows = RowSource.open(
        [(load(tmp_path / "d", tokenizer, str(tmp_path / "x.bin")), 1.0, None)], sequence_length=8, packing="concat", seed=1
    )
    assert sorted(int(t) for row in rows for t in row.targets if t >= 0) == sorted([*text.encode(), EOD, *b"ab", EOD])
    assert sum(row.target_bytes for row in rows) == len(text.encode()) + 2
