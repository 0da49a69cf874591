"""Files with everything that is wrong with real ones, each with what becomes of it: for the tests, and for the table of proofs.

Unless a case says otherwise, a good record stands before and after the hostile one: what happens to them is the question.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zstandard

BEFORE, AFTER = "a good document stands before it", "and another one after it"
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Case:
    """A file with these bytes, the texts that are kept of it, and what is counted besides."""

    name: str
    file: str
    content: bytes | Callable[[], bytes]
    kept: list[str]
    counters: dict[str, int] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


def write_case(folder: Path, case: Case) -> Path:
    path = folder / f"{case.name.replace(' ', '-')}-{case.file}"
    path.write_bytes(case.content if isinstance(case.content, bytes) else case.content())
    return path


def record(text: str) -> bytes:
    return json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n"


def between(line: bytes) -> bytes:
    return record(BEFORE) + line + b"\n" + record(AFTER)


def _line(name: str, line: bytes, kept: str | None, **counters: int) -> Case:
    return Case(name, "a.jsonl", between(line), [BEFORE, AFTER] if kept is None else [BEFORE, kept, AFTER], counters)


def _text(name: str, text: str) -> Case:
    return _line(name, record(text).rstrip(b"\n"), text)


def _many() -> bytes:
    """Enough that a decoder gives out whole records before the cut."""
    import random

    rng = random.Random(0)
    return b"".join(record(f"{number} {rng.getrandbits(2000):x}") for number in range(1000))


def _many_texts(number: int) -> list[str]:
    return [json.loads(line)["text"] for line in _many().splitlines()[:number]]


CASES = [
    Case("byte order mark", "a.jsonl", BOM + record(BEFORE) + record(AFTER), [BEFORE, AFTER], {"bom_stripped": 1}),
    Case("CRLF", "a.jsonl", (record(BEFORE) + record(AFTER)).replace(b"\n", b"\r\n"), [BEFORE, AFTER]),
    _text("NUL escaped", "a \0 b"),
    _line("NUL raw", b'{"text": "a \0 b"}', None, invalid_json=1),
    _text("U+2028 U+2029 U+0085", "a\u2028b\u2029c\u0085d"),
    _line("bad UTF-8", b'{"text": "a \xff b"}', None, invalid_utf8=1),
    _line("UTF-8 cut in a character", b'{"text": "a \xe2\x82"}', None, invalid_utf8=1),
    _line("overlong UTF-8", b'{"text": "a \xc0\xaf b"}', None, invalid_utf8=1),
    Case("UTF-16 file", "a.txt", "text".encode("utf-16"), [], {"invalid_utf8": 1}),
    _line("lone surrogate", b'{"text": "a \\ud800 b"}', "a \ufffd b", surrogates_replaced=1),
    _line("surrogate pair", b'{"text": "a \\ud83d\\ude00 b"}', "a \U0001f600 b"),
    _line("empty line", b"", None, blank_line=1),
    _line("white line", b" \t ", None, blank_line=1),
    _line("empty text", b'{"text": ""}', None, empty=1),
    _line("white text", b'{"text": " \\n\\u00a0 "}', None, empty=1),
    Case("empty file", "a.jsonl", b"", []),
    Case("empty text file", "a.txt", b"", [], {"empty": 1}),
    Case("50 MB line", "a.jsonl", lambda: between(b'{"text": "' + b"word " * 10_000_000 + b'"}'), [BEFORE, "word " * 10_000_000, AFTER]),
    _text("literal special tokens", "<|endoftext|></s><s>[MASK]<|im_start|>"),
    Case("last line cut off", "a.jsonl", record(BEFORE) + record(AFTER)[:-8], [BEFORE], {"invalid_json": 1}),
    Case("last line without line end", "a.jsonl", record(BEFORE) + record(AFTER)[:-1], [BEFORE, AFTER]),
    _line("deeply nested JSON", b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", None, invalid_json=1),
    _line("deeply nested beside the text", b'{"text": "x", "y": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001, None, invalid_json=1),
    _line("number of 10,000 digits", b'{"text": ' + b"9" * 10_000 + b"}", None, invalid_json=1),
    _line("not JSON", b"plain text", None, invalid_json=1),
    _line("two objects on a line", b'{"text": "x"} {"text": "y"}', None, invalid_json=1),
    _line("array", b'["text"]', None, not_an_object=1),
    _line("no text field", b'{"body": "x"}', None, no_text_field=1),
    _line("text is a number", b'{"text": 7}', None, text_not_string=1),
    _line("text is null", b'{"text": null}', None, text_not_string=1),
    _line("text is a list", b'{"text": ["a", "b"]}', None, text_not_string=1),
    Case("gzip cut off", "a.jsonl.gz", lambda: gzip.compress(_many())[:-100], _many_texts(999), {"truncated": 1}),
    # zstd decodes blocks of 128 KiB: what stands in whole ones is there
    Case(
        "zstd cut off",
        "a.jsonl.zst",
        lambda: zstandard.compress(_many())[:-9],
        _many_texts(_many()[: len(_many()) >> 17 << 17].count(b"\n")),
        {"truncated": 1},
    ),
    Case("gzip in several members", "a.jsonl.gz", gzip.compress(record(BEFORE)) + gzip.compress(record(AFTER)), [BEFORE, AFTER]),
    Case("gzip with a wrong checksum", "a.jsonl.gz", gzip.compress(record(BEFORE))[:-8] + b"\1" * 8 + b"tail", [BEFORE], {"corrupt": 1}),
    Case("zstd under another name", "a.jsonl", zstandard.compress(record(BEFORE) + record(AFTER)), [BEFORE, AFTER]),
    Case(
        "bad UTF-8, replaced",
        "a.jsonl",
        between(b'{"text": "a \xff b \xe2\x82 c"}'),
        [BEFORE, "a \ufffd b \ufffd c", AFTER],
        {"invalid_utf8_replaced": 1},
        {"invalid_utf8": "replace"},
    ),
    Case(
        "text file with a bad byte, replaced",
        "a.txt",
        b"one\n\xff\ntwo",
        ["one\n\ufffd\ntwo"],
        {"invalid_utf8_replaced": 1},
        {"invalid_utf8": "replace"},
    ),
    Case(
        "line file with bad bytes",
        "a.txt",
        f"{BEFORE}\n".encode() + b"bad \xff\n" + AFTER.encode(),
        [BEFORE, AFTER],
        {"invalid_utf8": 1},
        {"txt_documents": "line"},
    ),
]
