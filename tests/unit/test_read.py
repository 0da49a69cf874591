"""If this fails, one bad record costs good ones, or is lost without being counted."""

import gzip
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from data_pipeline.document import Document
from data_pipeline.errors import DataError
from data_pipeline.normalise import Normalise, NormaliseConfig
from data_pipeline.read import ReadOptions, Rejected, count_read, format_of, read_file
from data_pipeline.read_huggingface import DatasetSplit, read_dataset
from data_pipeline.step import Ledger


def read(path: Path, **options: object) -> tuple[list[str], list[tuple[str, int]], Counter[str]]:
    """Texts; (kind, record) of the rejected; repairs."""
    notes: Counter[str] = Counter()
    items = list(read_file(str(path), ReadOptions(notes=notes, **options), source="s"))  # type: ignore[arg-type]
    texts = [item.text for item in items if isinstance(item, Document)]
    rejected = [(item.kind, int(item.where.rpartition(":")[2])) for item in items if isinstance(item, Rejected)]
    return texts, rejected, notes


B011 = b'{"text": "first"}\n\n   \n{"text":\n{"txt":"a"}\n{"text":null}\n{"text":123}\n{"text": "last"}'
B011_REJECTED = [
    ("blank_line", 2),
    ("blank_line", 3),
    ("invalid_json", 4),
    ("no_text_field", 5),
    ("text_not_string", 6),
    ("text_not_string", 7),
]


@pytest.mark.parametrize("compress", [bytes, gzip.compress, zstandard.compress], ids=["plain", "gz", "zst"])
def test_a_bad_line_costs_that_line_alone(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    """B011: 8 lines, 2 blank, 4 bad; the last one has no newline and is kept."""
    path = tmp_path / "b011.jsonl"
    path.write_bytes(compress(B011))
    texts, rejected, _ = read(path)
    assert texts == ["first", "last"]
    assert rejected == B011_REJECTED


def test_the_books_balance_and_strict_stops_at_the_first_error(tmp_path: Path) -> None:
    """B011: blank lines are dropped, bad ones are errors with their place; strict names file and line."""
    path = tmp_path / "b011.jsonl"
    path.write_bytes(B011)
    ledger = Ledger()
    list(count_read(read_file(str(path), source="s"), ledger, source="s"))
    ledger.balance()
    tally = ledger.total("read")
    assert {kind: count.documents for kind, count in tally.dropped.items()} == {"blank_line": 2}
    assert {kind: count.documents for kind, count in tally.errors.items()} == {"invalid_json": 1, "no_text_field": 1, "text_not_string": 2}
    assert tally.examples["text_not_string"] == [f"{path}:6", f"{path}:7"]
    assert tally.read.documents == 8
    with pytest.raises(DataError, match=r"b011\.jsonl:4: invalid json"):
        list(count_read(read_file(str(path), source="s"), Ledger(), source="s", strict=True))


def test_a_lone_surrogate_becomes_the_replacement_character_and_is_counted(tmp_path: Path) -> None:
    """B005: the lines around it are intact, and the text can be encoded as UTF-8."""
    path = tmp_path / "b005.jsonl"
    path.write_bytes(b'{"text": "ok1"}\n{"text": "x\\ud800y \\ud83d\\ude00"}\n{"text": "ok2"}\n')
    notes: Counter[str] = Counter()
    ledger = Ledger()
    texts = [
        document.text
        for document in count_read(read_file(str(path), ReadOptions(notes=notes), source="s"), ledger, source="s", notes=notes)
    ]
    assert texts == ["ok1", "x\ufffdy \U0001f600", "ok2"]
    assert ledger.total("read").notes == {"surrogates_replaced": 1}
    "".join(texts).encode()


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (b'{"text": "bad \xff byte"}', "invalid_utf8"),
        (b"[1, 2]", "not_an_object"),
        (b'"a string"', "not_an_object"),
        (b"[" * 200_000, "invalid_json"),
        (b'{"text": ' + b"9" * 10_000 + b"}", "invalid_json"),
        (b'{"text": ["a"]}', "text_not_string"),
        (b'{"text": ""}', "empty"),
        (b'{"text": " \\n\\t\\u00a0"}', "empty"),
        (b'{"text": "raw \x01 control"}', "invalid_json"),
    ],
    ids=["bad byte", "array", "string", "deep", "huge integer", "list of text", "empty", "white", "control"],
)
def test_hostile_lines_have_a_defined_outcome(tmp_path: Path, line: bytes, kind: str) -> None:
    path = tmp_path / "hostile.jsonl"
    path.write_bytes(b'{"text": "before"}\n' + line + b'\n{"text": "after"}\n')
    texts, rejected, _ = read(path)
    assert texts == ["before", "after"]
    assert rejected == [(kind, 2)]


def test_only_line_feeds_end_a_line(tmp_path: Path) -> None:
    """U+2028, form feeds and NUL are text; CRLF around JSON is white space."""
    path = tmp_path / "separators.jsonl"
    path.write_bytes('{"text": "a\u2028b\u0085c"}\r\n{"text": "d\\u0000e\\fg"}\r\n'.encode())
    assert read(path) == (["a\u2028b\u0085c", "d\0e\fg"], [], Counter())


def test_a_byte_order_mark_is_stripped_once(tmp_path: Path) -> None:
    bom = b"\xef\xbb\xbf"
    (tmp_path / "a.jsonl").write_bytes(bom + b'{"text": "first"}\n{"text": "\\ufeffsecond"}\n')
    assert read(tmp_path / "a.jsonl") == (["first", "\ufeffsecond"], [], Counter(bom_stripped=1))
    (tmp_path / "a.txt").write_bytes(bom + bom + b"text")
    assert read(tmp_path / "a.txt") == (["\ufefftext"], [], Counter(bom_stripped=1))


def test_a_text_file_is_one_document_or_one_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\r\n\r\ntwo \xff\nthree")
    assert read(path) == ([], [("invalid_utf8", 1)], Counter())
    assert read(path, txt_documents="line") == (["one", "three"], [("empty", 2), ("invalid_utf8", 3)], Counter())
    path.write_bytes(b"")
    assert read(path) == ([], [("empty", 1)], Counter())


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress], ids=["gz", "zst"])
def test_whole_records_before_a_cut_are_kept_and_the_cut_is_counted(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    line = json.dumps({"text": os.urandom(300).hex()}).encode() + b"\n"
    path = tmp_path / "cut.jsonl"
    path.write_bytes(compress(line * 2000 + os.urandom(200_000))[:-5])
    texts, rejected, _ = read(path)
    assert len(texts) == 2000
    assert rejected[-1][0] == "truncated"
    (tmp_path / "cut.txt").write_bytes(compress(os.urandom(200_000))[:-5])
    assert read(tmp_path / "cut.txt")[:2] == ([], [("truncated", 1)])  # half a document is no document


def test_a_very_long_line_takes_linear_time(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_bytes(b'{"text": "' + b"x" * 30_000_000 + b'"}')
    texts, rejected, _ = read(path)
    assert (len(texts), len(texts[0]), rejected) == (1, 30_000_000, [])


# ---------------------------------------------------------------------------------------------- parquet


def write_parquet(path: Path, column: pyarrow.Array, **options: object) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"other": list(range(len(column))), "text": column}), path, **options)


@pytest.mark.parametrize("compress", [None, gzip.compress, zstandard.compress], ids=["plain", "gz", "zst"])
@pytest.mark.parametrize(
    "dtype", [pyarrow.string(), pyarrow.large_string(), pyarrow.binary(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())]
)
def test_parquet_rows_are_documents(tmp_path: Path, dtype: pyarrow.DataType, compress: Callable[[bytes], bytes] | None) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, pyarrow.array(["one", None, "", "zwei äöü"] * 700).cast(dtype), row_group_size=1000)
    if compress:
        path.write_bytes(compress(path.read_bytes()))
    texts, rejected, _ = read(path)
    assert texts == ["one", "zwei äöü"] * 700
    assert rejected[:3] == [("text_not_string", 2), ("empty", 3), ("text_not_string", 6)]
    assert len(rejected) == 1400


def test_a_bad_byte_in_parquet_costs_that_row(tmp_path: Path) -> None:
    values = pyarrow.array([b"one", b"bad \xff", b"three"], pyarrow.binary())
    write_parquet(tmp_path / "a.parquet", values.view(pyarrow.string()))
    assert read(tmp_path / "a.parquet") == (["one", "three"], [("invalid_utf8", 2)], Counter())


def test_parquet_without_the_column_names_those_it_has(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", pyarrow.array(["x"]))
    with pytest.raises(DataError, match="no column 'content'; set text_field to one of: other, text"):
        read(tmp_path / "a.parquet", text_field="content")
    assert read(tmp_path / "a.parquet", text_field="other")[1] == [("text_not_string", 1)]


def test_a_damaged_parquet_file_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, pyarrow.array([os.urandom(20).hex() for _ in range(5000)]), row_group_size=1000)
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    assert read(path)[:2] == ([], [("corrupt", 1)])
    path.write_bytes(gzip.compress(whole)[:-5])
    assert read(path)[:2] == ([], [("truncated", 1)])


# ---------------------------------------------------------------------------------------------- formats


def test_the_format_follows_from_the_name_and_what_is_not_read_is_refused(tmp_path: Path) -> None:
    names = ["a.jsonl", "a.jsonl.gz", "A.JSON.ZST", "a.parquet", "a.txt", "module.py", "LICENSE", "v1.2.gz"]
    assert [format_of(name) for name in names] == ["jsonl", "jsonl", "jsonl", "parquet", "txt", "txt", "txt", "txt"]
    for name in ("table.csv", "table.csv.gz", "shard.bin", "pages.warc.gz", "a.pdf"):
        with pytest.raises(DataError, match="files are not read; convert it"):
            format_of(name)
    (tmp_path / "a.csv").write_text("kept as it is")
    assert read(tmp_path / "a.csv", format="txt")[0] == ["kept as it is"]
    with pytest.raises(DataError, match="no reader for format 'xml'; there are auto, txt, jsonl, parquet"):
        read(tmp_path / "a.csv", format="xml")


def test_ids_are_stable_and_distinct(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "same"}\n{"text": "same"}\nbad\n{"text": "same"}\n')
    ids = [item.id for item in read_file(str(path), source="s", name="a.jsonl") if isinstance(item, Document)]
    assert len(set(ids)) == 3
    path.write_bytes(gzip.compress(path.read_bytes()))
    assert ids == [item.id for item in read_file(str(path), source="s", name="a.jsonl") if isinstance(item, Document)]


# --------------------------------------------------------------------------------- Hugging Face datasets


@pytest.mark.parametrize("streaming", [True, False])
def test_a_local_dataset_folder_is_streamed(tmp_path: Path, streaming: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": text, "n": 1}) + "\n" for text in ["one", "", "drei ä"]))
    (folder / "test.jsonl").write_text(json.dumps({"text": "held out", "n": 1}) + "\n")
    items = list(read_dataset(DatasetSplit(str(folder), streaming=streaming), source="s"))
    assert [item.text if isinstance(item, Document) else item.kind for item in items] == ["one", "empty", "drei ä"]
    assert isinstance(items[2], Document)
    assert items[2].meta == {"file": "corpus/train", "record": 3}
    assert [item.text for item in read_dataset(DatasetSplit(str(folder), split="test"), source="s") if isinstance(item, Document)] == [
        "held out"
    ]
    with pytest.raises(DataError, match="no column 'body'; set text_field to one of: text, n"):
        list(read_dataset(DatasetSplit(str(folder)), ReadOptions("body"), source="s"))
    with pytest.raises(DataError, match=r"can't read dataset .*split nosuch"):
        list(read_dataset(DatasetSplit(str(folder), split="nosuch"), source="s"))


def test_a_saved_dataset_is_read(tmp_path: Path) -> None:
    import datasets

    saved = datasets.Dataset.from_dict({"text": ["one", None, "three"]})
    saved.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": saved}).save_to_disk(str(tmp_path / "dict"))
    for name in ("saved", "dict"):
        items = list(read_dataset(DatasetSplit(str(tmp_path / name)), source="s"))
        assert [item.text if isinstance(item, Document) else item.kind for item in items] == ["one", "text_not_string", "three"]
    datasets.Dataset.from_dict({"text": ["held out"]}, split="test").save_to_disk(str(tmp_path / "named"))
    assert [
        item.text for item in read_dataset(DatasetSplit(str(tmp_path / "named"), split="test"), source="s") if isinstance(item, Document)
    ] == ["held out"]
    for name, keys, why in (  # none is read as if it were what was asked for
        ("named", {}, "holds the split test alone"),
        ("saved", {"split": "test"}, "holds one split without a name"),
        ("dict", {"split": "test"}, "holds the splits train"),
        ("saved", {"config_name": "en"}, "holds no config"),
        ("dict", {"config_name": "en"}, "holds no config"),
    ):
        with pytest.raises(DataError, match=f"can't read dataset .*: it {why}"):
            list(read_dataset(DatasetSplit(str(tmp_path / name), **keys), source="s"))  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------- normalise


def normalised(text: str, **options: str) -> str:
    step = Normalise(NormaliseConfig(**options), Ledger())  # type: ignore[arg-type]
    (document,) = step.run(iter([Document("1", text, "s")]))
    step.ledger.balance()
    return document.text


def test_one_spelling_for_the_same_text() -> None:
    """Without it, dedup keeps copies that differ in line ends, and the tokenizer learns words twice."""
    assert normalised("a\r\nb\rc\n\r\r\nd") == "a\nb\nc\n\n\nd"
    assert normalised("e\u0301 \ufb01") == "\u00e9 \ufb01"
    assert normalised("e\u0301 \ufb01", unicode="nfkc") == "\u00e9 fi"
    assert normalised("e\u0301\r\n", unicode="none", newlines="keep") == "e\u0301\r\n"


def test_changed_documents_are_noted() -> None:
    step = Normalise(NormaliseConfig())
    list(step.run(iter([Document("1", "a\r\n", "s"), Document("2", "b", "s")])))
    tally = step.ledger.total("normalise")
    assert (tally.notes, tally.read.bytes, tally.written.bytes) == ({"changed": 1}, 4, 3)
