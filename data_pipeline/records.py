"""The bytes of a file to records: chunks, lines, and what can't be taken for text.

Records are split at b"\n" only and decoded one by one, so that a bad one costs itself alone.
"""

from __future__ import annotations

import codecs
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

from data_pipeline.streams import DamagedStream, open_bytes

_CHUNK_BYTES = 1 << 20
MAX_RECORD_BYTES = 1 << 28  # of a record, decompressed: a longer one is counted without being held


@dataclass(frozen=True, slots=True)
class Rejected:
    """A record that became no document: `where` is file:record, `bytes` its raw length."""

    kind: str
    where: str
    bytes: int


Text = str | Rejected


def chunks(file: IO[bytes]) -> Iterator[bytes]:
    return iter(lambda: file.read1(_CHUNK_BYTES), b"")  # type: ignore[attr-defined]


def lines(path: str, notes: Counter[str]) -> Iterator[tuple[int, bytes | Rejected]]:
    """Lines without their b"\\n", numbered from 1, the last one with or without it. Linear in a line's length.

    In a damaged file the lines that are whole come, then one Rejected for the rest.
    """
    number, held = 1, Held()
    try:
        with open_bytes(path) as file:
            for chunk in chunks(file):
                head, *rest = chunk.split(b"\n")
                held.add(head)
                for piece in rest:
                    line = held.take(path, number)
                    yield number, without_bom(line, notes) if number == 1 and isinstance(line, bytes) else line
                    number += 1
                    held.add(piece)
    except DamagedStream as damage:
        yield number, Rejected(damage.kind, f"{path}:{number}", held.num_bytes)
        return
    if held.num_bytes:
        line = held.take(path, number)
        yield number, without_bom(line, notes) if number == 1 and isinstance(line, bytes) else line


class Held:
    """The bytes of the record that is under way, as they come; past MAX_RECORD_BYTES only their number."""

    __slots__ = ("_parts", "num_bytes")

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self.num_bytes = 0

    def add(self, data: bytes) -> None:
        self.num_bytes += len(data)
        if self.num_bytes <= MAX_RECORD_BYTES:
            self._parts.append(data)
        else:
            self._parts.clear()

    def skip(self, num_bytes: int) -> None:
        """Count bytes of a record that was too long for another to hold."""
        self.num_bytes += num_bytes
        self._parts.clear()

    def take(self, path: str, number: int) -> bytes | Rejected:
        """The record's bytes, or why it has none; the next one begins."""
        parts, num_bytes = self._parts, self.num_bytes
        self._parts, self.num_bytes = [], 0
        if num_bytes > MAX_RECORD_BYTES:
            return Rejected("too_long", f"{path}:{number}", num_bytes)
        return parts[0] if len(parts) == 1 else b"".join(parts)


def without_bom(data: bytes, notes: Counter[str]) -> bytes:
    if not data.startswith(codecs.BOM_UTF8):
        return data
    notes["bom_stripped"] += 1
    return data[len(codecs.BOM_UTF8) :]


def decode(data: bytes, where: str, *, replace: bool, notes: Counter[str]) -> Text:
    """`replace`: U+FFFD for what is no UTF-8 (Unicode Standard, 3.9: one for each maximal part of a character), and a note."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        if not replace:
            return Rejected("invalid_utf8", where, len(data))
        notes["invalid_utf8_replaced"] += 1
        return data.decode("utf-8", "replace")


def seekable(path: str) -> IO[bytes]:
    """The decompressed file, copied to a temporary one where it is compressed: parquet begins at its end."""
    file = open_bytes(path)
    if file.seekable():
        return file
    copy = tempfile.TemporaryFile()  # noqa: SIM115 (the caller closes it)
    try:
        with file:
            for chunk in chunks(file):
                copy.write(chunk)
    except BaseException:
        copy.close()
        raise
    copy.seek(0)
    return copy
