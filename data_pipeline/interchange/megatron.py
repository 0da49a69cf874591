"""Megatron-LM's indexed dataset, read and written: tokens in PREFIX.bin, where they lie in PREFIX.idx.

magic          9 bytes "MMIDIDX\\0\\0", then uint64 version 1, all little-endian
dtype          uint8: a code of DTYPES
sequences      uint64 S; documents: uint64 D + 1, the length of the last table
lengths        int32[S], tokens a sequence; pointers: int64[S], where it begins in the .bin, in bytes
document table int64[D + 1]: document d is the sequences table[d] .. table[d + 1] - 1
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<9sQBQQ")
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_REMEDY = "Copy both files again from where they were made, or write them anew there."


def megatron_dtype(vocab_size: int) -> np.dtype[Any]:
    """What Megatron-LM itself would write for a vocabulary: uint16 below 65,500 ids, else int32."""
    return np.dtype("<u2" if vocab_size < 65_500 else "<i4")


class MegatronFile:
    """A pair of .bin and .idx, opened and checked: the tables agree with each other and with the size of the .bin.

    Raises DataError naming the file and what disagrees.
    """

    def __init__(self, path: str | Path) -> None:
        bin_path, self.idx_path = Path(path).with_suffix(".bin"), Path(path).with_suffix(".idx")
        for part in (self.idx_path, bin_path):
            if not part.is_file():
                raise DataError(f"{part} does not exist: Megatron's format is a pair of .bin and .idx, side by side under one name")
        raw = self.idx_path.read_bytes()
        if len(raw) < _HEAD.size or raw[:9] != MAGIC:
            raise DataError(f"{self.idx_path}: not an index of Megatron-LM: it should begin with {MAGIC!r}. {_REMEDY}")
        _, version, code, num_sequences, table_length = _HEAD.unpack_from(raw)
        if version != 1 or code not in DTYPES:
            raise DataError(f"{self.idx_path}: version {version} and dtype code {code}; known are version 1 and codes 1 to 8")
        self.dtype = np.dtype(DTYPES[code])
        if self.dtype.kind == "f":
            raise DataError(f"{self.idx_path}: holds {self.dtype.name}, not token ids. Give the files of a tokenised text.")
        wanted = _HEAD.size + 12 * num_sequences + 8 * table_length
        if len(raw) not in (wanted, wanted + num_sequences):  # a byte a sequence more: the modes of a multimodal dataset
            raise DataError(
                f"{self.idx_path}: {len(raw)} bytes long, its header says {wanted}: it was cut off, or counts that it doesn't have. {_REMEDY}"
            )
        self.lengths = np.frombuffer(raw, "<i4", num_sequences, _HEAD.size).astype(np.int64)
        self.pointers = np.frombuffer(raw, "<i8", num_sequences, _HEAD.size + 4 * num_sequences)
        self.table = np.frombuffer(raw, "<i8", table_length, _HEAD.size + 12 * num_sequences)
        size = bin_path.stat().st_size
        self._check(size)
        self.tokens = np.memmap(bin_path, dtype=self.dtype, mode="r").view(np.ndarray) if size else np.zeros(0, self.dtype)

    def _check(self, size: int) -> None:
        ends = self.pointers + self.lengths * self.dtype.itemsize
        if (self.lengths < 0).any() or (self.pointers < 0).any() or (self.pointers % self.dtype.itemsize).any() or (ends > size).any():
            wrong = int(
                np.flatnonzero((self.lengths < 0) | (self.pointers < 0) | (self.pointers % self.dtype.itemsize != 0) | (ends > size))[0]
            )
            raise DataError(
                f"{self.idx_path}: sequence {wrong} lies at byte {self.pointers[wrong]} with {self.lengths[wrong]} tokens, "
                f"but the .bin has {size} bytes (a pointer that ran over 2^31 looks like this too). {_REMEDY}"
            )
        held = int(self.lengths.sum()) * self.dtype.itemsize
        if held != size:
            raise DataError(
                f"{self.idx_path}: its sequences hold {held} bytes, the .bin has {size}: the two don't belong together, or lengths "
                f"were taken before the end of a document was added. {_REMEDY}"
            )
        table = self.table
        if table.size == 0 or table[0] != 0 or table[-1] != self.lengths.size or (np.diff(table) < 0).any():
            raise DataError(
                f"{self.idx_path}: its document table (first {table[:1].tolist()}, last {table[-1:].tolist()}) does not go from 0 to its "
                f"{self.lengths.size} sequences in order; a merge of datasets is known to leave this. Merge again with a current merge_datasets.py."
            )

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    def documents(self) -> Iterator[np.ndarray]:
        """The tokens of each document in order, as stored; perhaps none."""
        starts = self.pointers // self.dtype.itemsize
        for first, last in zip(self.table[:-1].tolist(), self.table[1:].tolist()):
            parts = [self.tokens[int(starts[n]) : int(starts[n]) + int(self.lengths[n])] for n in range(first, last)]
            yield parts[0] if len(parts) == 1 else np.concatenate([self.tokens[:0], *parts])


def index_bytes(lengths: np.ndarray, dtype: np.dtype[Any]) -> bytes:
    """The .idx of documents that are one sequence each and follow one another in the .bin. `lengths`: int64 tokens."""
    if lengths.size and int(lengths.max()) >= 1 << 31:
        raise DataError(f"a document of {int(lengths.max())} tokens does not fit Megatron's index, which counts to 2^31 - 1")
    code = next(code for code, spelled in DTYPES.items() if np.dtype(spelled) == dtype)
    ends = np.cumsum(lengths * dtype.itemsize, dtype=np.int64)
    pointers = ends - lengths * dtype.itemsize
    head = _HEAD.pack(MAGIC, 1, code, lengths.size, lengths.size + 1)
    return head + lengths.astype("<i4").tobytes() + pointers.astype("<i8").tobytes() + np.arange(lengths.size + 1, dtype="<i8").tobytes()
