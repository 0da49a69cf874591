"""A file opened for reading: local or by URL, plain, gzip or zstd, with all that can be decoded before damage is met."""

from __future__ import annotations

import hashlib
import io
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from data_pipeline.errors import DataError
from data_pipeline.storage import is_url

_CHUNK_BYTES = {"gzip": 1 << 16, "zstd": 1 << 11}  # compressed; a chunk decodes to a thousand, or 32,000, times as much at most: 64 MiB
_ENOUGH_BYTES = 1 << 18  # decoded
_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGICS = (b"\x28\xb5\x2f\xfd", *(bytes([0x50 + nibble]) + b"\x2a\x4d\x18" for nibble in range(16)))  # frames, and skippable ones


class DamagedStream(DataError):
    """A compressed stream that is cut off (`kind` "truncated") or doesn't decode ("corrupt"). Bytes before it were delivered."""

    def __init__(self, message: str, *, kind: str) -> None:
        self.kind = kind
        super().__init__(message)


def open_bytes(path: str | Path) -> IO[bytes]:
    """Open for reading; gzip and zstd are recognised by their first bytes, never by the name, and may have several members.

    `read1` delivers every byte that could be decoded before DamagedStream is raised.
    """
    name = str(path)
    try:
        if is_url(name):
            import fsspec

            opened: Any = fsspec.open(name, "rb").open()
        else:
            opened = open(name, "rb")  # noqa: SIM115 (the caller closes it)
    except FileNotFoundError:
        raise DataError(f"{name} does not exist") from None
    except OSError as error:
        raise DataError(f"can't read {name}: {error.strerror or error}") from None
    source = opened if isinstance(opened, io.BufferedReader) else io.BufferedReader(opened)
    magic = source.peek(4)[:4]
    if magic.startswith(_GZIP_MAGIC) or magic in _ZSTD_MAGICS:
        return io.BufferedReader(_Decompressed(source, name, gzip=magic.startswith(_GZIP_MAGIC)), buffer_size=1 << 18)
    return source


def sha256_contents(paths: Sequence[str | Path]) -> list[str]:
    """Hex sha256 of what each file holds, uncompressed."""
    found = []
    for path in paths:
        content = hashlib.sha256()
        with open_bytes(path) as file:
            while chunk := file.read(1 << 20):
                content.update(chunk)
        found.append(content.hexdigest())
    return found


class _Decompressed(io.RawIOBase):
    """The decoded bytes of a gzip or zstd file. The standard readers either lose the bytes before a cut (gzip under a
    buffer) or don't notice it at all (zstd), so members are decoded one by one here."""

    def __init__(self, source: io.BufferedReader, name: str, *, gzip: bool) -> None:
        self._source, self._name, self._gzip = source, name, gzip
        self._decoder: Any = None  # of the member being read; None between members
        self._held = memoryview(b"")
        self._failure: DamagedStream | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._held:
            if self._failure is not None:
                raise self._failure
            decoded: list[bytes] = []
            while self._failure is None and sum(map(len, decoded)) < _ENOUGH_BYTES and (piece := self._next()) is not None:
                decoded.append(piece)
            if not decoded:
                return 0
            self._held = memoryview(b"".join(decoded))
        count = min(len(buffer), len(self._held))
        buffer[:count] = self._held[:count]
        self._held = self._held[count:]
        return count

    def _next(self) -> bytes | None:
        """Decoded bytes, perhaps none; None at the end of the file."""
        data = self._source.read1(_CHUNK_BYTES["gzip" if self._gzip else "zstd"])
        if not data:
            return None if self._decoder is None else self._fail("truncated", "the compressed data is cut off")
        decoded: list[bytes] = []
        while data:
            if self._decoder is None:
                if self._gzip and not data.strip(b"\0"):  # padding after the last member, as tapes and block devices leave it
                    break
                self._decoder = zlib.decompressobj(wbits=31) if self._gzip else _zstd_decoder()
            spare = self._decoder.copy() if self._gzip else None
            try:
                decoded.append(self._decoder.decompress(data))
            except Exception as error:  # zlib.error and zstandard.ZstdError have no common base
                decoded += [_until_damage(spare, data), self._fail("corrupt", str(error))]
                break
            data = b""
            if self._decoder.eof:
                data, self._decoder = self._decoder.unused_data, None
        return b"".join(decoded)

    def _fail(self, kind: str, why: str) -> bytes:
        """Raise at the next read, after what was decoded has been delivered."""
        self._failure = DamagedStream(f"{self._name} is {kind}: {why}; what stood before it was read", kind=kind)
        return b""

    def close(self) -> None:
        self._source.close()
        super().close()


def _until_damage(decoder: Any, data: bytes) -> bytes:
    """What gzip's decoder gives for the bytes before the first bad one; nothing for zstd, which decodes whole blocks."""
    decoded: list[bytes] = []
    for place in range(len(data) if decoder is not None else 0):
        try:
            decoded.append(decoder.decompress(data[place : place + 1]))
        except zlib.error:
            break
    return b"".join(decoded)


def _zstd_decoder() -> Any:
    import zstandard

    return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
