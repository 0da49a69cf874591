"""Documents between the stages: parts on disk, each a checksummed file of texts, found again by id or by number.

text      uint8: the UTF-8 of all texts, end to end          offsets   int64[documents + 1]
keys      uint8[16 x documents]: the content key of each     ids, files, records, file_names   as in document_index.py
fields    uint8[16 x documents], only where dedup looks at a field: a key of its value, zeros for none
splits    int64[documents], only of pairs: bytes of the source side and the line end after it, where the target side begins
"""

from __future__ import annotations

import json
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import numpy as np

from data_pipeline.blockfile import BlockFile, BlockWriter, write_blockfile
from data_pipeline.document import Document, content_key, utf8_bytes
from data_pipeline.document_index import Index, IndexWriter

_RELEASE_BYTES = 16 << 20  # of a part that is being read may stay in memory


class PartWriter:
    """Appends documents to a part."""

    def __init__(self, out: BlockWriter, *, field: str | None = None, pairs: bool = False) -> None:
        self._out = out
        self._field = field
        self._pairs = pairs
        self._splits = array("q")
        self._fields, self._keys = bytearray(), bytearray()
        self._lengths = array("q", [0])
        self._index = IndexWriter()
        self.text_bytes = 0
        out.begin("text", "<u1")

    def add(self, document: Document) -> None:
        raw = np.frombuffer(document.text.encode(), dtype=np.uint8)
        self._out.append(raw)
        self._lengths.append(raw.size)
        self.text_bytes += raw.size
        self._keys += content_key(document.text, document.meta["target_at"] if self._pairs else None)
        if self._field is not None:
            self._fields += _field_key(document.meta.get("fields", {}).get(self._field))
        if self._pairs:
            self._splits.append(utf8_bytes(document.text[: document.meta["target_at"]]))
        self._index.add(document.id, document.meta["file"], document.meta["record"])

    def finish(self) -> None:
        self._out.add("offsets", np.cumsum(np.frombuffer(self._lengths, dtype=np.int64)))
        self._out.add("keys", np.frombuffer(self._keys, dtype=np.uint8))
        if self._field is not None:
            self._out.add("fields", np.frombuffer(self._fields, dtype=np.uint8))
        if self._pairs:
            self._out.add("splits", np.array(self._splits, dtype=np.int64))
        self._index.finish(self._out)
        self._out.meta.update(documents=len(self._lengths) - 1, text_bytes=self.text_bytes)


def _field_key(value: object) -> bytes:
    """16 bytes, zeros where there is no value; text without white space around it, anything else as JSON spells it."""
    text = value.strip() if isinstance(value, str) else "" if value is None else json.dumps(value, sort_keys=True, default=str)
    return content_key(text) if text else bytes(16)


@contextmanager
def write_part(path: Path, *, field: str | None = None, pairs: bool = False) -> Iterator[PartWriter]:
    """`field`: of the documents' meta, whose values dedup will compare. `pairs`: the documents are pairs, as pairs.py makes them."""
    with write_blockfile(path, kind="documents") as out:
        writer = PartWriter(out, field=field, pairs=pairs)
        yield writer
        writer.finish()


class Part:
    """A part opened for reading."""

    def __init__(self, path: str | Path) -> None:
        self._file = BlockFile(path, kind="documents")
        self._index = Index(self._file)
        self.path = self._file.path
        self.num_documents: int = self._file.meta["documents"]
        self.text_bytes: int = self._file.meta["text_bytes"]

    @cached_property
    def offsets(self) -> np.ndarray:
        return self._file.read("offsets")

    def text(self, number: int) -> str:
        begin, end = int(self.offsets[number]), int(self.offsets[number + 1])
        text = self._file.read("text", begin, end).tobytes().decode()
        if self._file.touched_bytes >= _RELEASE_BYTES or number == self.num_documents - 1:
            self._file.release()
        return text

    def texts(self, numbers: Sequence[int]) -> list[str]:
        """Texts from anywhere in the part. They are copied out of the file, not mapped: each would bring pages around it into memory."""
        places = [(int(self.offsets[number]), int(self.offsets[number + 1])) for number in numbers]
        return [raw.decode() for raw in self._file.copies("text", places)]

    def release(self) -> None:
        """Let go of the memory that what was read so far takes."""
        self._file.release()

    @cached_property
    def is_pairs(self) -> bool:
        return self._file.has("splits")

    @cached_property
    def _splits(self) -> np.ndarray:
        return self._file.read("splits")

    def sides(self, number: int, text: str) -> list[str]:
        """Of a pair the two sides of its text; else the text."""
        if not self.is_pairs:
            return [text]
        raw, split = text.encode(), int(self._splits[number])
        return [raw[: split - 1].decode(), raw[split:].decode()]

    def ids(self) -> np.ndarray:
        """uint8[documents, 16]"""
        return self._file.read("ids").reshape(-1, 16)

    def keys(self) -> np.ndarray:
        """uint8[documents, 16]"""
        return self._file.read("keys").reshape(-1, 16)

    def key(self, number: int) -> bytes:
        return self._file.read("keys", 16 * number, 16 * (number + 1)).tobytes()

    def field_keys(self) -> np.ndarray:
        """uint8[documents, 16]; zeros where a document hasn't got the field."""
        return self._file.read("fields").reshape(-1, 16)

    def id(self, number: int) -> str:
        return self._index.id(number)

    def origin(self, number: int) -> tuple[str, int]:
        return self._index.origin(number)


class DocumentStore:
    """All parts of all sources, in order: documents numbered from 0 through all of them."""

    def __init__(self, parts: Sequence[tuple[str, Part]]) -> None:
        self.parts = [part for _, part in parts]
        self._source_of = [source for source, _ in parts]
        self._firsts: list[int] = [0, *np.cumsum([part.num_documents for part in self.parts]).tolist()]
        self.num_documents = self._firsts[-1]
        self.text_bytes = sum(part.text_bytes for part in self.parts)

    def source(self, part: int) -> str:
        return self._source_of[part]

    def first(self, part: int) -> int:
        """The number of the part's first document."""
        return self._firsts[part]

    def find(self, number: int) -> tuple[int, int]:
        """(part, number inside it) of a document."""
        part = bisect_right(self._firsts, number) - 1
        return part, number - self._firsts[part]

    def lengths(self) -> np.ndarray:
        """UTF-8 bytes of each text; int64[documents]."""
        return np.concatenate([np.diff(part.offsets) for part in self.parts]) if self.parts else np.zeros(0, dtype=np.int64)

    def keys(self) -> np.ndarray:
        """Content keys; uint8[documents, 16]."""
        return np.concatenate([part.keys() for part in self.parts]) if self.parts else np.zeros((0, 16), dtype=np.uint8)

    def texts_of(self, numbers: Sequence[int]) -> list[str]:
        """Texts of documents from anywhere, in the order of their numbers here; one part is read after the other."""
        found: list[str] = [""] * len(numbers)
        order = np.argsort(np.array(numbers, dtype=np.int64), kind="stable")
        places = np.searchsorted(self._firsts, np.array(numbers, dtype=np.int64)[order], side="right") - 1
        for part in np.unique(places).tolist():
            here = order[places == part].tolist()
            texts = self.parts[part].texts([numbers[place] - self._firsts[part] for place in here])
            for place, text in zip(here, texts):
                found[place] = text
        return found

    def sides_of(self, numbers: Sequence[int]) -> list[str]:
        """Likewise; of pairs both sides of each, one after the other."""
        texts = self.texts_of(numbers)
        if not any(part.is_pairs for part in self.parts):
            return texts
        places = map(self.find, numbers)
        return [side for (part, inside), text in zip(places, texts) for side in self.parts[part].sides(inside, text)]

    def release(self) -> None:
        """Let go of the memory that what was read so far takes."""
        for part in self.parts:
            part.release()
