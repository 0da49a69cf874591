"""If this fails, a hostile file costs more than itself: its outcome is undefined, uncounted, or takes good records with it."""

from __future__ import annotations

import gzip
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from data_pipeline import records as records_module
from data_pipeline.build import build
from data_pipeline.document import Document
from data_pipeline.errors import DataError
from data_pipeline.filters.config import FiltersConfig
from data_pipeline.filters.stage import Filters
from data_pipeline.read import ReadOptions, Rejected, count_read, read_file
from data_pipeline.schema import validate
from data_pipeline.step import Ledger
from data_pipeline.streams import open_bytes
from tests.benchmarks.bench_filters import MODES
from tests.corpus_fixtures import config
from tests.hostile_files import CASES, Case, write_case

BEFORE, AFTER = "a good document stands before it", "and another one after it"


def read(path: Path, **options: Any) -> tuple[list[str], Ledger]:
    notes: Counter[str] = Counter()
    ledger = Ledger()
    items = read_file(str(path), ReadOptions(notes=notes, **options), source="s")
    texts = [document.text for document in count_read(items, ledger, source="s", notes=notes)]
    ledger.balance()
    return texts, ledger


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_case_has_its_outcome_and_its_counter_and_the_rest_of_the_file_is_there(case: Case, tmp_path: Path) -> None:
    path = write_case(tmp_path, case)
    texts, ledger = read(path, **case.options)
    tally = ledger.tally("read", "s")
    counted = {**{kind: count.documents for kind, count in {**tally.dropped, **tally.errors}.items()}, **tally.notes}
    assert counted == case.counters
    assert [text[:200] for text in texts] == [text[:200] for text in case.kept]
    assert tally.read.documents == len(case.kept) + sum(count.documents for count in {**tally.dropped, **tally.errors}.values())


def test_the_books_of_a_plain_file_balance_to_the_byte(tmp_path: Path) -> None:
    """A file of lines: the bytes of texts and of rejected lines, with their line ends, are the file."""
    lines = [b"good", b"", b"bad \xff", b"\xc3", "gr\u00fcn \u2028 x".encode(), b" ", b"nul \0 x", b"last"]
    (tmp_path / "a.txt").write_bytes(b"\n".join(lines))
    _, ledger = read(tmp_path / "a.txt", txt_documents="line")
    assert ledger.total("read").read.bytes + len(lines) - 1 == (tmp_path / "a.txt").stat().st_size


def good(text: str) -> bytes:
    return b'{"text": "' + text.encode() + b'"}\n'


@pytest.mark.parametrize("compress", ["gzip", "zstd"])
@pytest.mark.parametrize(
    ("name", "options"), [("a.jsonl", {}), ("a.txt", {"txt_documents": "line"}), ("a.txt", {"txt_documents": "paragraph"})]
)
def test_a_bomb_is_counted_and_what_follows_it_is_read(
    name: str, options: dict[str, Any], compress: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 MB of one byte from a few kB, with a limit of 1 MB: counted, never held."""
    monkeypatch.setattr(records_module, "MAX_RECORD_BYTES", 1 << 20)
    size, jsonl = 64 << 20, name.endswith("jsonl")
    before, after = (good(BEFORE), good(AFTER)) if jsonl else (BEFORE.encode() + b"\n\n", AFTER.encode() + b"\n")
    packed = gzip.compress if compress == "gzip" else zstandard.compress
    (tmp_path / name).write_bytes(packed(before + b"0" * size + b"\n\n" + after))
    assert (tmp_path / name).stat().st_size < 100_000
    texts, ledger = read(tmp_path / name, **options)
    assert texts == [BEFORE, AFTER]
    error = ledger.total("read").errors["too_long"]
    assert (error.documents, error.bytes) == (1, size)
    whole, ledger = read(tmp_path / name, format="txt")
    assert not whole and ledger.total("read").errors["too_long"].documents == 1


def test_a_bomb_is_decoded_in_small_pieces(tmp_path: Path) -> None:
    """zstd turns 4 bytes into 128 kB; one read never gives more than 64 MiB and a piece."""
    (tmp_path / "bomb.zst").write_bytes(zstandard.compress(bytes(400 << 20)))
    with open_bytes(tmp_path / "bomb.zst") as file:
        sizes = [len(piece) for piece in iter(file.raw._next, None)]  # type: ignore[attr-defined]
    assert sum(sizes) == 400 << 20 and max(sizes) <= 64 << 20


def test_a_record_at_the_limit_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records_module, "MAX_RECORD_BYTES", 100)
    (tmp_path / "a.txt").write_bytes(b"x" * 100 + b"\n" + b"y" * 101 + b"\n" + b"z")
    items = list(read_file(str(tmp_path / "a.txt"), ReadOptions(txt_documents="line"), source="s"))
    assert [item.text if isinstance(item, Document) else (item.kind, item.bytes) for item in items] == ["x" * 100, ("too_long", 101), "z"]
    assert next(item for item in read_file(str(tmp_path / "a.txt"), source="s") if isinstance(item, Rejected)).bytes == 204
    paragraphs = list(read_file(str(tmp_path / "a.txt"), ReadOptions(txt_documents="paragraph"), source="s"))
    assert [item.kind for item in paragraphs if isinstance(item, Rejected)] == ["too_long"] and len(paragraphs) == 1


def test_a_15_mb_line_goes_through_every_filter(tmp_path: Path) -> None:
    """In seconds, with its outcome counted; the documents beside it are as they would be alone."""
    rng = np.random.default_rng(0)
    stems = ["".join(rng.choice(list("abcdefghilmnoprstu"), size=4)) for _ in range(5000)]
    giant = " ".join(rng.choice([*stems, "the", "of"], size=60_000))  # 300 kB of words that don't repeat much, 50 times
    text = "\n".join(" ".join(rng.choice(stems, size=30)) + " of the." for _ in range(20))
    with open(tmp_path / "a.jsonl", "wb") as file:
        file.write(good(text.replace("\n", "\\n")))
        file.write(b'{"text": "' + b" ".join([giant.encode()] * 50) + b'"}\n')
        file.write(good(text.replace("\n", "\\n") + " Another."))
    filters = {name: {} for name in ("gopher_repetition", "gopher_quality", "c4", "fineweb", "ratios", "pii")}
    built = config(
        tmp_path,
        tmp_path / "out",
        sources=[{"name": "s", "files": str(tmp_path / "a.jsonl")}],
        filters={**filters, "gopher_quality": {"max_words": None}},
        tokenizer={"type": "bytes"},
        dedup=None,
        validation={"fraction": 0.0},
        packing=[],
    )
    ledger = Ledger.from_dict(build(built, quiet=True).manifest.ledger)
    ledger.balance(chain=["read", "normalise", "filters", "pii", "encode"])
    assert {reason: count.documents for reason, count in ledger.total("filters").dropped.items()} == {"repetition_duplicate_5_grams": 1}
    assert ledger.total("encode").written.documents == 2


@pytest.mark.parametrize(
    "run",
    [".", ".x", "\n", " ", "a ", "a\n", "\n \n", "#", "\u2028", "[1", "!?)", "…\n", "www.", "http:// ", "a a b ", "\t\n", "1.", "@a."],
)
def test_no_text_takes_the_filters_more_than_linear_time(run: str) -> None:
    """2 MB of one run, every filter with thresholds that let it through: seconds, not hours."""
    loose = {name: dict(section) for name, section in MODES["open+ratios"].items()}
    loose["c4"] |= {"max_word_chars": None, "min_words_per_line": 0, "min_sentences": 10**9}
    loose["gopher_quality"] |= {"max_mean_word_length": 1e9}
    config = validate(FiltersConfig, loose)
    document = Document("0" * 32, run * (2_000_000 // len(run)), "s")
    began = time.process_time()
    for name in MODES["open+ratios"]:
        Filters(config.model_copy(update={other: None for other in MODES["open+ratios"] if other != name})).apply(document)
    assert time.process_time() - began < 20


def test_strict_stops_at_each_error_but_not_at_blank_lines(tmp_path: Path) -> None:
    for case in CASES:
        path = write_case(tmp_path, case)
        errors = [item for item in read_file(str(path), ReadOptions(**case.options), source="s") if isinstance(item, Rejected)]
        if any(item.kind not in ("empty", "blank_line") for item in errors):
            with pytest.raises(DataError, match=r"mend it, or read without strict"):
                list(count_read(read_file(str(path), ReadOptions(**case.options), source="s"), Ledger(), source="s", strict=True))
