"""If this fails, a long text file is cut into other documents than its paragraphs."""

from __future__ import annotations

import gzip
from pathlib import Path

from data_pipeline.read import ReadOptions, Rejected, read_file


def read(path: Path) -> list[tuple[int, str] | Rejected]:
    records = read_file(str(path), ReadOptions(format="txt", txt_documents="paragraph"), source="s")
    return [record if isinstance(record, Rejected) else (record.meta["record"], record.text) for record in records]


def test_paragraphs_stand_between_blank_lines(tmp_path: Path) -> None:
    """Blank runs of any length, lines of white space, CRLF, a BOM, no newline at the end: the plain split of the text."""
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf\n\none\r\ntwo\r\n\r\n \t \r\nthree\n\n\n\n  four\n\nfive")
    assert read(path) == [(3, "one\ntwo"), (7, "three"), (11, "  four"), (13, "five")]
    plain = "a\nb\n\nc\n\n\nd\n"
    path.write_text(plain)
    assert [text for _, text in read(path)] == [part.strip("\n") for part in plain.split("\n\n") if part.strip("\n")]  # type: ignore[misc]


def test_a_bad_paragraph_costs_itself_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"good\n\nbad \xff\nline\n\nlast\n")
    found = read(path)
    assert [found[0], found[2]] == [(1, "good"), (6, "last")]
    assert isinstance(found[1], Rejected) and found[1].kind == "invalid_utf8" and found[1].where.endswith(":3")


def test_a_cut_file_loses_its_last_paragraph(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.gz"
    text = "\n\n".join(f"paragraph {number}\nsecond line {number * 7919}" for number in range(2000))
    path.write_bytes(gzip.compress(text.encode())[:-2000])
    *whole, last = read(path)
    assert isinstance(last, Rejected) and last.kind == "truncated"
    assert [item[1] for item in whole if not isinstance(item, Rejected)] == text.split("\n\n")[: len(whole)]
    assert len(whole) > 100
