"""Blocks of remote files on a local disk, within a limit: what was longest not used gives way. Shared by the processes of a machine.

blocks/KEY/NUMBER    a block as it is in the file; KEY names the file's content. Renamed into place, so what is there is whole
locks/N              held while blocks are fetched, so that ranks that want the same ones fetch them once
datasets/HASH/       manifests, tokenizers and packing plans, whole and outside the limit
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash
from pydantic import Field

from data_pipeline.errors import MegatronLiteError
from data_pipeline.schema import Section
from data_pipeline.storage import BLOCK_BYTES

_NUM_LOCKS = 64


class CacheConfig(Section):
    """Where blocks of datasets in object storage are kept on the machine's own disk. Unused where the data is local."""

    dir: str | None = None  # of a local disk; null: mlite-data in the system's folder for temporary files
    max_gb: float = Field(50.0, gt=0)  # of blocks, for all processes of a machine together; beyond it, what was longest not used goes

    @property
    def folder(self) -> Path:
        return Path(self.dir).expanduser() if self.dir else Path(tempfile.gettempdir()) / f"mlite-data-{os.getuid()}"

    def open(self) -> BlockCache:
        return BlockCache(self.folder, max_bytes=int(self.max_gb * 1e9))


class BlockCache:
    """`max_bytes` holds for up to 16 processes: each looks at the whole after a 128th of it, and then frees an eighth."""

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self._blocks, self._locks = folder / "blocks", folder / "locks"
        self._look_every_bytes = max_bytes // 128
        self._unseen_bytes = self._look_every_bytes  # an earlier job's blocks are looked at first
        self._mutex = threading.Lock()
        self.counts = {"hits": 0, "fetched": 0, "evicted": 0}
        try:
            self._blocks.mkdir(parents=True, exist_ok=True)
            self._locks.mkdir(exist_ok=True)
        except OSError as error:
            raise MegatronLiteError(f"the cache {folder} can't be made ({error.strerror}): choose another data.cache.dir") from None

    def get(self, key: str, block: int, start: int, length: int) -> bytes | None:
        """Bytes of a block, which counts as used now; None where it isn't there."""
        try:
            descriptor = os.open(self._path(key, block), os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            os.utime(descriptor)
            self.counts["hits"] += 1
            return os.pread(descriptor, length, start)
        finally:
            os.close(descriptor)

    def has(self, key: str, block: int) -> bool:
        return self._path(key, block).exists()

    def put(self, key: str, block: int, data: bytes) -> None:
        """Keep a block that was verified."""
        path = self._path(key, block)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        with self._mutex:  # so that threads don't find room for one block each in the same place
            self._make_room(len(data))
            try:
                path.parent.mkdir(exist_ok=True)
                temporary.write_bytes(data)
                temporary.replace(path)
            except OSError as error:
                temporary.unlink(missing_ok=True)
                raise MegatronLiteError(
                    f"the cache {self.folder} can't be written ({error.strerror}): lower data.cache.max_gb, or choose another data.cache.dir"
                ) from None
            self.counts["fetched"] += 1

    def drop(self, key: str, block: int) -> None:
        self._path(key, block).unlink(missing_ok=True)

    @contextmanager
    def fetching(self, key: str, group: int) -> Iterator[None]:
        """Hold a group of blocks: others who want them wait, and then find them."""
        number = xxhash.xxh3_64_intdigest(f"{key} {group}".encode()) % _NUM_LOCKS
        with open(self._locks / str(number), "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _path(self, key: str, block: int) -> Path:
        return self._blocks / key / str(block)

    def _make_room(self, num_bytes: int) -> None:
        self._unseen_bytes += num_bytes
        if self._unseen_bytes < self._look_every_bytes:
            return
        with open(self.folder / "evicting", "a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return  # another process is at it
            self._unseen_bytes = 0
            self._evict(num_bytes)

    def _evict(self, room_bytes: int) -> None:
        found = []
        for folder in self._blocks.iterdir():
            with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
                found += [(entry.stat().st_mtime_ns, entry.stat().st_size, entry.path) for entry in entries]
        total = sum(size for _, size, _ in found)
        if total + room_bytes <= self.max_bytes - self.max_bytes // 8:
            return
        for _, size, path in sorted(found):
            if total + room_bytes <= self.max_bytes - self.max_bytes // 4:
                break
            Path(path).unlink(missing_ok=True)
            self.counts["evicted"] += 1
            total -= size


def blocks_of(first: int, last: int) -> range:
    """Numbers of the blocks in which bytes first .. last - 1 lie."""
    return range(first // BLOCK_BYTES, -(-last // BLOCK_BYTES))
