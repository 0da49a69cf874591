"""One self-describing, checksummed container for everything that training reads: shards of tokens and packing plans.

    header    4096 bytes: magic, version, length of the JSON, the JSON (kind, meta, where each array lies), zeros
    data      the arrays one after another, each starting at a multiple of 64 bytes
    checksums uint64 of the header, then of every 1 MiB block of the data (xxh3, little-endian)
    end       uint64 of the checksums, then the end magic

A block is verified when something in it is first read, so a flipped byte anywhere is found before it is used.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import xxhash

from data_pipeline.errors import DataError
from data_pipeline.storage import BLOCK_BYTES, atomic_write

MAGIC = b"MLITEBLK"
END_MAGIC = b"MLITEEND"
FORMAT_VERSION = 1
HEADER_BYTES = 4096
ALIGN_BYTES = 64
REMEDY = "Restore the file from a copy, or delete the folder and build it again."


class BlockWriter:
    """Appends arrays to an open file; `meta` may be filled until the file is closed."""

    def __init__(self, file: IO[bytes], *, kind: str) -> None:
        self.meta: dict[str, Any] = {}
        self._file, self._kind = file, kind
        self._arrays: dict[str, dict[str, Any]] = {}
        self._open: str | None = None
        self._bytes = 0
        self._hash = xxhash.xxh3_64()
        self._checksums: list[int] = []
        file.write(b"\0" * HEADER_BYTES)

    def begin(self, name: str, dtype: np.dtype[Any] | str) -> None:
        """Start a one-dimensional array that `append` makes longer."""
        assert name not in self._arrays, name
        self._write(b"\0" * (-self._bytes % ALIGN_BYTES))
        self._arrays[name] = {"dtype": _spelled(np.dtype(dtype)), "length": 0, "offset": self._bytes}
        self._open = name

    def append(self, values: np.ndarray) -> None:
        assert self._open is not None
        entry = self._arrays[self._open]
        values = np.ascontiguousarray(values)
        assert _spelled(values.dtype) == entry["dtype"], (values.dtype, entry["dtype"])
        entry["length"] += values.size
        self._write(values.tobytes())

    def add(self, name: str, values: np.ndarray) -> None:
        """A whole array at once."""
        self.begin(name, values.dtype)
        self.append(values)

    def _write(self, chunk: bytes) -> None:
        self._file.write(chunk)
        view = memoryview(chunk)
        while len(view):
            room = BLOCK_BYTES - self._bytes % BLOCK_BYTES
            part = view[:room]
            self._hash.update(part)
            self._bytes += len(part)
            view = view[room:]
            if self._bytes % BLOCK_BYTES == 0:
                self._end_block()

    def _end_block(self) -> None:
        self._checksums.append(self._hash.intdigest())
        self._hash = xxhash.xxh3_64()

    def finish(self) -> None:
        if self._bytes % BLOCK_BYTES:
            self._end_block()
        described = {"kind": self._kind, "meta": self.meta, "arrays": self._arrays, "data_bytes": self._bytes, "block_bytes": BLOCK_BYTES}
        text = json.dumps(described, sort_keys=True, separators=(",", ":")).encode()
        assert len(text) <= HEADER_BYTES - 16, "the header holds numbers and names only; lists belong in arrays"
        header = MAGIC + FORMAT_VERSION.to_bytes(4, "little") + len(text).to_bytes(4, "little") + text
        header += b"\0" * (HEADER_BYTES - len(header))
        table = np.array([xxhash.xxh3_64_intdigest(header), *self._checksums], dtype="<u8").tobytes()
        self._file.write(table + xxhash.xxh3_64_intdigest(table).to_bytes(8, "little") + END_MAGIC)
        self._file.seek(0)
        self._file.write(header)


@contextmanager
def write_blockfile(path: str | Path, *, kind: str) -> Iterator[BlockWriter]:
    """Write a container atomically: it appears at `path` complete and synced, or not at all."""
    with atomic_write(str(path)) as file:
        writer = BlockWriter(file, kind=kind)
        yield writer
        writer.finish()


class BlockFile:
    """A container opened for reading: arrays are read-only views of the mapped file, verified block by block."""

    def __init__(self, path: str | Path, *, kind: str) -> None:
        self.path = Path(path)
        try:
            size = self.path.stat().st_size
            self._map = np.memmap(self.path, dtype=np.uint8, mode="r").view(np.ndarray) if size else np.zeros(0, dtype=np.uint8)
        except OSError as error:
            raise DataError(f"{self.path}: can't be opened ({error.strerror or error}). {REMEDY}") from None
        self._understand(size, kind=kind)
        for name, (dtype, offset, length) in self._layout.items():
            first = HEADER_BYTES + offset
            self._mapped[name] = self._map[first : first + length * dtype.itemsize].view(dtype)

    def _understand(self, size: int | None, *, kind: str) -> bytes:
        """Read and check header and checksums, which are returned. `size`: of the file, where it is known."""
        header = self._bytes(0, HEADER_BYTES).tobytes()
        if (size is not None and size < HEADER_BYTES + 24) or header[:8] != MAGIC:
            raise DataError(
                f"{self.path}: not a file of ours, or cut off at {len(header) if size is None else size} bytes: the first 8 bytes should be {MAGIC!r}. {REMEDY}"
            )
        version = int.from_bytes(header[8:12], "little")
        if version != FORMAT_VERSION:
            raise DataError(
                f"{self.path}: format version {version}, this program reads version {FORMAT_VERSION}. Build the data again, or use the program that wrote it."
            )
        described = self._described(header)
        self.meta: dict[str, Any] = described["meta"]
        self.data_bytes: int = described["data_bytes"]
        num_blocks = -(-self.data_bytes // BLOCK_BYTES)
        end = HEADER_BYTES + self.data_bytes
        wanted = end + 8 * (num_blocks + 1) + 16
        if size is not None and size != wanted:
            raise DataError(f"{self.path}: {size} bytes long, its header says {wanted}: the file was cut off or written to. {REMEDY}")
        tail = self._bytes(end, wanted).tobytes()
        table = tail[:-16]
        if tail[-16:-8] != xxhash.xxh3_64_intdigest(table).to_bytes(8, "little"):
            raise DataError(f"{self.path}: the checksum table (bytes {end} to {wanted - 16}) is damaged. {REMEDY}")
        if tail[-8:] != END_MAGIC:
            raise DataError(f"{self.path}: the last 8 bytes (from byte {wanted - 8}) are damaged. {REMEDY}")
        self.digest = f"{xxhash.xxh3_64_intdigest(table):016x}"  # of the checksums, so of every byte
        self._checksums = np.frombuffer(table, dtype="<u8")[1:]
        if xxhash.xxh3_64_intdigest(header) != int(np.frombuffer(table, dtype="<u8")[0]):
            raise DataError(f"{self.path}: the header (bytes 0 to {HEADER_BYTES}) is damaged. {REMEDY}")
        self._layout = {
            name: (_parsed(entry["dtype"]), int(entry["offset"]), int(entry["length"])) for name, entry in described["arrays"].items()
        }
        self._mapped: dict[str, np.ndarray] = {}  # whole arrays, whose bytes are not known to be sound
        self._verified = np.zeros(num_blocks, dtype=bool)
        self.touched_bytes = 0  # of the mapped file, since they were let go of: about what it takes of memory
        if described["kind"] != kind:
            raise DataError(f"{self.path}: holds a {described['kind']}, wanted a {kind}. Check the path.")
        return table

    def _described(self, header: bytes) -> dict[str, Any]:
        length = int.from_bytes(header[12:16], "little")
        try:
            described = json.loads(header[16 : 16 + min(length, HEADER_BYTES - 16)])
            for key, kind in (("meta", dict), ("arrays", dict), ("data_bytes", int), ("kind", str)):
                if not isinstance(described[key], kind):
                    raise ValueError(key)
        except (ValueError, KeyError, TypeError):
            raise DataError(f"{self.path}: the header (bytes 0 to {HEADER_BYTES}) is damaged. {REMEDY}") from None
        return described  # type: ignore[no-any-return]

    def has(self, name: str) -> bool:
        return name in self._layout

    def length(self, name: str) -> int:
        return self._layout[name][2]

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Elements start to stop of an array, every block that they lie in verified. Raises DataError naming file and bytes."""
        dtype, offset, length = self._layout[name]
        stop = length if stop is None else stop
        assert 0 <= start <= stop <= length, (self.path, name, start, stop, length)
        first, last = offset + start * dtype.itemsize, offset + stop * dtype.itemsize
        block = first // BLOCK_BYTES
        if name in self._mapped and first < last <= (block + 1) * BLOCK_BYTES and self._verified[block]:  # nearly always, and much faster
            self.touched_bytes += last - first
            return self._mapped[name][start:stop]
        return self._data(first, last).view(dtype)

    def _bytes(self, low: int, high: int) -> np.ndarray:
        """Bytes of the file as they stand there."""
        return self._map[low:high]

    def _data(self, first: int, last: int) -> np.ndarray:
        """Bytes of the arrays, verified."""
        self._verify(first, last)
        self.touched_bytes += last - first
        return self._map[HEADER_BYTES + first : HEADER_BYTES + last]

    def copies(self, name: str, places: Sequence[tuple[int, int]]) -> Iterator[bytes]:
        """Bytes of elements start to stop of an array, for each of `places`, verified like those of `read` but read from the file: nothing
        of them stays mapped."""
        dtype, offset, length = self._layout[name]
        width = dtype.itemsize
        with open(self.path, "rb", buffering=0) as file:
            for start, stop in places:
                assert 0 <= start <= stop <= length, (self.path, name, start, stop, length)
                first, last = offset + start * width, offset + stop * width
                low, high = first, last
                blocks = range(first // BLOCK_BYTES, -(-last // BLOCK_BYTES))
                if not self._verified[blocks.start : blocks.stop].all():
                    low, high = blocks.start * BLOCK_BYTES, min(blocks.stop * BLOCK_BYTES, self.data_bytes)
                file.seek(HEADER_BYTES + low)
                data = file.read(high - low)
                if (low, high) != (first, last):
                    for block in blocks:
                        begin = block * BLOCK_BYTES - low
                        self._check(block, memoryview(data)[begin : begin + BLOCK_BYTES])
                yield data[first - low : last - low]

    def _check(self, block: int, data: memoryview) -> None:
        if not self._is_sound(block, data):
            self._complain(block)
        self._verified[block] = True

    def _is_sound(self, block: int, data: memoryview | bytes) -> bool:
        return xxhash.xxh3_64_intdigest(data) == int(self._checksums[block])

    def _verify(self, first: int, last: int) -> None:
        for block in range(first // BLOCK_BYTES, -(-last // BLOCK_BYTES)):
            if self._verified[block]:
                continue
            low = HEADER_BYTES + block * BLOCK_BYTES
            self.touched_bytes += BLOCK_BYTES
            self._check(block, self._map[low : HEADER_BYTES + min((block + 1) * BLOCK_BYTES, self.data_bytes)].data)

    def _complain(self, block: int) -> None:
        low, high = HEADER_BYTES + block * BLOCK_BYTES, HEADER_BYTES + min((block + 1) * BLOCK_BYTES, self.data_bytes)
        raise DataError(f"{self.path}: block {block} (bytes {low} to {high}) does not match its checksum. {REMEDY}")

    def release(self) -> None:
        """Let go of the memory that what was read so far takes: who reads a file through once would otherwise hold all of it. Arrays stay
        good; what is used again comes from the file."""
        mapped = self._map.base
        if isinstance(mapped, np.memmap) and hasattr(mmap, "MADV_DONTNEED"):
            mapped._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]
        self.touched_bytes = 0

    def verify(self) -> None:
        """Check every block now."""
        self._verify(0, self.data_bytes)


def _spelled(dtype: np.dtype[Any]) -> Any:
    return [[name, dtype[name].str] for name in dtype.names] if dtype.names else dtype.newbyteorder("<").str


def _parsed(spelled: Any) -> np.dtype[Any]:
    return np.dtype([(name, part) for name, part in spelled]) if isinstance(spelled, list) else np.dtype(spelled)
