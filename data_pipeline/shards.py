"""A shard: one file with the tokens of many documents, once, and the index that finds them.

    tokens        uint16 or uint32: document after document, each ended by the end-of-document id
    offsets       int64[documents + 1]: where each document begins in `tokens`; the last is their number
    text_bytes    int64[documents]: UTF-8 bytes of each text
    splits        int64[documents], only of pairs: tokens of the source side, its end included; the target side follows, with its own end
    ids, files, records, file_names   as in document_index.py
The header holds dtype, vocabulary, end-of-document id, tokenizer hash and the counts, so a shard can be read alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.blockfile import REMEDY, BlockFile, BlockWriter, write_blockfile
from data_pipeline.document_index import Index, IndexWriter
from data_pipeline.errors import DataError


def token_dtype(max_id: int) -> np.dtype[Any]:
    """The one place that decides how wide a stored token is: uint16 while the largest id fits, else uint32."""
    if not 0 <= max_id <= 0xFFFFFFFE:  # 0xFFFFFFFF marks "no target" in digests
        raise DataError(f"token ids must lie in 0..{0xFFFFFFFE}, the largest is {max_id}")
    return np.dtype("<u2" if max_id <= 0xFFFF else "<u4")


@dataclass(frozen=True)
class Vocabulary:
    """What a shard must agree with: ids are 0..size-1; every document ends in `eod_id`; `bos_id` only if the tokenizer has one."""

    size: int
    eod_id: int
    bos_id: int | None
    tokenizer_hash: str

    @property
    def begin_id(self) -> int:
        """The id that stands before a document's first token."""
        return self.eod_id if self.bos_id is None else self.bos_id


@dataclass(frozen=True)
class Encoded:
    """One document as tokens, its end not yet among them; `id` is 32 hex digits. `target`: the other side of a pair."""

    id: str
    tokens: np.ndarray
    text_bytes: int
    file: str = ""
    record: int = 0
    target: np.ndarray | None = None


@contextmanager
def write_shard(path: str | Path, *, source: str, split: str, vocabulary: Vocabulary, pairs: bool = False) -> Iterator[ShardWriter]:
    """Write a shard atomically; what is added last is in it when the block ends without an error. `pairs`: of pairs only."""
    with write_blockfile(path, kind="shard") as out:
        writer = ShardWriter(out, path=Path(path), source=source, split=split, vocabulary=vocabulary, pairs=pairs)
        yield writer
        writer.finish()


class ShardWriter:
    """Appends documents; refuses ids that the vocabulary doesn't have and an end of document inside a text."""

    def __init__(self, out: BlockWriter, *, path: Path, source: str, split: str, vocabulary: Vocabulary, pairs: bool) -> None:
        self._out, self._path, self._vocabulary = out, path, vocabulary
        self._splits: list[int] | None = [] if pairs else None
        self._dtype = token_dtype(vocabulary.size - 1)
        self._lengths = array("q", [0])
        self._index = IndexWriter()
        self._text_bytes = array("q")
        self._eod = np.array([vocabulary.eod_id], dtype=self._dtype)
        out.meta.update(
            source=source,
            split=split,
            vocab_size=vocabulary.size,
            eod_id=vocabulary.eod_id,
            bos_id=vocabulary.bos_id,
            tokenizer_hash=vocabulary.tokenizer_hash,
        )
        out.begin("tokens", self._dtype)

    def add(self, document: Encoded) -> None:
        """Append one document and its end. Raises DataError naming the document if an id doesn't belong."""
        assert (document.target is None) == (self._splits is None), "a shard is of documents or of pairs"
        sides = [document.tokens] if document.target is None else [document.tokens, document.target]
        for tokens in sides:
            self._check(document.id, tokens)
            self._out.append(np.concatenate([tokens.astype(self._dtype), self._eod]))
        self._lengths.append(sum(tokens.size + 1 for tokens in sides))
        if self._splits is not None:
            self._splits.append(document.tokens.size + 1)
        self._index.add(document.id, document.file, document.record)
        self._text_bytes.append(document.text_bytes)

    def _check(self, id: str, tokens: np.ndarray) -> None:
        if not tokens.size:
            return
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self._vocabulary.size:
            raise DataError(
                f"{self._path}: document {id} has token id {low if low < 0 else high}, but the vocabulary has ids 0 to {self._vocabulary.size - 1}. "
                "The tokenizer that encoded it is not the one of this dataset: build the dataset again with one tokenizer."
            )
        if (tokens == self._vocabulary.eod_id).any():
            raise DataError(
                f"{self._path}: document {id} has the end-of-document id {self._vocabulary.eod_id} inside its text. Encode text with special tokens off."
            )

    def finish(self) -> None:
        offsets = np.cumsum(np.frombuffer(self._lengths, dtype=np.int64))
        self._out.add("offsets", offsets)
        self._out.add("text_bytes", np.array(self._text_bytes, dtype=np.int64))
        if self._splits is not None:
            self._out.add("splits", np.array(self._splits, dtype=np.int64))
        self._index.finish(self._out)
        self._out.meta.update(documents=len(self._text_bytes), tokens=int(offsets[-1]), text_bytes=sum(self._text_bytes))


class Shard:
    """A shard opened for reading; every block is verified when first touched."""

    def __init__(self, file: str | Path | BlockFile) -> None:
        self._file = file if isinstance(file, BlockFile) else BlockFile(file, kind="shard")
        self._index = Index(self._file)
        self.path, self.digest = self._file.path, self._file.digest
        self.meta = self._file.meta
        self.num_documents: int = self.meta["documents"]
        self.num_tokens: int = self.meta["tokens"]
        self.offsets = self._file.read("offsets")
        sound = (
            self.offsets.size == self.num_documents + 1
            and self.offsets[0] == 0
            and self.offsets[-1] == self.num_tokens == self._file.length("tokens")
        )
        if not (sound and (np.diff(self.offsets) > 0).all()):
            raise DataError(f"{self.path}: the document index does not cover the {self._file.length('tokens')} tokens. {REMEDY}")

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Stored tokens start..stop-1. Raises DataError naming the place of an id outside the vocabulary."""
        tokens = self._file.read("tokens", start, stop)
        if tokens.size and int(tokens.max()) >= self.meta["vocab_size"]:
            place = int(np.flatnonzero(tokens >= self.meta["vocab_size"])[0])
            raise DataError(
                f"{self.path}: token {start + place} is id {tokens[place]}, but the vocabulary has ids 0 to {self.meta['vocab_size'] - 1}. {REMEDY}"
            )
        return tokens

    def unchecked_tokens(self, start: int, stop: int) -> np.ndarray:
        """Likewise, for one who reads many short pieces and looks at their ids together, which is faster."""
        return self._file.read("tokens", start, stop)

    def document(self, number: int) -> np.ndarray:
        """All tokens of one document, its end last."""
        return self.tokens(int(self.offsets[number]), int(self.offsets[number + 1]))

    @cached_property
    def splits(self) -> np.ndarray | None:
        """Of pairs, the tokens of each source side, its end included; int64[documents]. Raises DataError where one is outside its pair."""
        if not self._file.has("splits"):
            return None
        splits = self._file.read("splits")
        if splits.size != self.num_documents or not ((splits >= 1) & (splits < np.diff(self.offsets))).all():
            raise DataError(f"{self.path}: the table of pairs does not fit the documents. {REMEDY}")
        return splits

    def sides(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Both sides of a pair, each with its end last."""
        assert self.splits is not None, "a shard of pairs"
        both, split = self.document(number), int(self.splits[number])
        return both[:split], both[split:]

    def document_id(self, number: int) -> str:
        return self._index.id(number)

    def numbers_of(self, id: str) -> list[int]:
        """The documents whose id begins with these hex digits."""
        return self._index.numbers_of(id)

    def numbers_at(self, wanted: Callable[[str], bool], record: int) -> list[int]:
        """The documents that stood at this record of a file whose name is wanted."""
        return self._index.numbers_at(wanted, record)

    def text_bytes(self, number: int) -> int:
        return int(self._file.read("text_bytes", number, number + 1)[0])

    def origin(self, number: int) -> tuple[str, int]:
        """The file that a document came from, and its number in it, from 1."""
        return self._index.origin(number)

    def verify(self) -> None:
        """Check every byte, every id, and that each document (of a pair each side) ends in the one end id that it has."""
        self._file.verify()
        eod = self.meta["eod_id"]
        num_ends = 0
        for start in range(0, self.num_tokens, 1 << 22):
            num_ends += int((self.tokens(start, min(start + (1 << 22), self.num_tokens)) == eod).sum())
        ends = self.offsets[1:] - 1
        if self.splits is not None:
            ends = np.sort(np.concatenate([self.offsets[:-1] + self.splits - 1, ends]))
        at_ends = self._file.read("tokens")[ends] if self.num_documents else np.zeros(0)
        if num_ends != ends.size or (at_ends != eod).any():
            raise DataError(
                f"{self.path}: {num_ends} end-of-document ids for {self.num_documents} documents, {int((at_ends == eod).sum())} of them at a document's end. {REMEDY}"
            )


def check_shards(shards: Iterable[Shard], vocabulary: Vocabulary) -> None:
    """Raises DataError naming a shard that another tokenizer made."""
    for shard in shards:
        meta = shard.meta
        if (meta["tokenizer_hash"], meta["vocab_size"], meta["eod_id"]) != (vocabulary.tokenizer_hash, vocabulary.size, vocabulary.eod_id):
            raise DataError(
                f"{shard.path}: made with tokenizer {meta['tokenizer_hash'][:12]} ({meta['vocab_size']} ids), the dataset's is "
                f"{vocabulary.tokenizer_hash[:12]} ({vocabulary.size} ids). Build the dataset again; don't mix shards of two builds."
            )
