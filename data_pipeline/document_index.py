"""Ids and origins of the documents in a file of ours, side by side with their contents.

ids            uint8[16 x documents]
files, records uint32, int64[documents]: a line of `file_names`, and the number in that file, from 1
file_names     uint8: UTF-8, one name a line; a newline in a name is written \\n
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import cached_property

import numpy as np

from data_pipeline.blockfile import BlockFile, BlockWriter


class IndexWriter:
    """Collects ids (32 hex digits) and origins; `finish` writes them."""

    def __init__(self) -> None:
        self._ids = bytearray()
        self._files: dict[str, int] = {}
        self._file_of = array("I")
        self._records = array("q")

    def add(self, id: str, file: str, record: int) -> None:
        self._ids += bytes.fromhex(id)
        self._file_of.append(self._files.setdefault(file, len(self._files)))
        self._records.append(record)

    def finish(self, out: BlockWriter) -> None:
        ids = np.frombuffer(self._ids, dtype=np.uint8)
        assert ids.size == 16 * len(self._records), "a document's id is 32 hex digits"
        out.add("ids", ids)
        out.add("files", np.array(self._file_of, dtype=np.uint32))
        out.add("records", np.array(self._records, dtype=np.int64))
        names = "\n".join(name.replace("\n", "\\n") for name in self._files)
        out.add("file_names", np.frombuffer(names.encode("utf-8", "backslashreplace"), dtype=np.uint8))


class Index:
    """The index of an opened file."""

    def __init__(self, file: BlockFile) -> None:
        self._file = file

    @cached_property
    def _names(self) -> list[str]:
        return self._file.read("file_names").tobytes().decode().split("\n")

    def id(self, number: int) -> str:
        return self._file.read("ids", 16 * number, 16 * (number + 1)).tobytes().hex()

    def numbers_of(self, id: str) -> list[int]:
        """The documents whose id begins with these hex digits."""
        if not 1 <= len(id) <= 32 or set(id.lower()) - set("0123456789abcdef"):
            return []
        ids = self._file.read("ids").reshape(-1, 16)
        whole = np.frombuffer(bytes.fromhex(id[: len(id) // 2 * 2]), dtype=np.uint8)
        same = (ids[:, : whole.size] == whole).all(axis=1)
        if len(id) % 2:
            same &= ids[:, whole.size] >> 4 == int(id[-1], 16)
        return [int(number) for number in np.flatnonzero(same)]

    def numbers_at(self, wanted: Callable[[str], bool], record: int) -> list[int]:
        """The documents that stood at this record of a file whose name is wanted."""
        names = [number for number, name in enumerate(self._names) if wanted(name)]
        if not names:
            return []
        there = (self._file.read("records") == record) & np.isin(self._file.read("files"), names)
        return [int(number) for number in np.flatnonzero(there)]

    def origin(self, number: int) -> tuple[str, int]:
        """(file name, number in it from 1) of a document."""
        return self._names[int(self._file.read("files", number, number + 1)[0])], int(self._file.read("records", number, number + 1)[0])
