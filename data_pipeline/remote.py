"""Datasets in object storage, read where they are: small files as a whole, shards a block at a time through the local cache.

What arrives is checked against the checksums of the file that it belongs to before it is kept or used.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.block_cache import BlockCache, CacheConfig, blocks_of
from data_pipeline.blockfile import HEADER_BYTES, BlockFile
from data_pipeline.errors import DataError, MegatronLiteError
from data_pipeline.shards import Shard
from data_pipeline.storage import BLOCK_BYTES, atomic_write

WAITS_S = (0.2, 1.0, 4.0)  # between attempts
NUM_THREADS = 16  # requests under way at once
_GROUP_BLOCKS = 8  # fetched by one request where they are wanted together


class NotAllowedError(MegatronLiteError):
    """The store refuses: the keys don't fit, or have expired. Some stores say so of a file that isn't there too."""


class RemoteFolder:
    """A folder by fsspec URL."""

    def __init__(self, url: str) -> None:
        import fsspec

        self.url = url.rstrip("/")
        try:
            self._files, self._root = fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise DataError(f"{url} can't be opened: {error}") from None

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> bytes:
        """Bytes of a file, all of it without `start`. Raises DataError where there is no such file, or it is shorter; any other failure is
        tried again, and then a plain MegatronLiteError: the data may be sound."""
        for wait_s in (*WAITS_S, None):
            try:
                data = bytes(self._files.cat_file(f"{self._root}/{name}", start=start, end=stop))
                if start is None or stop is None or len(data) == stop - start:
                    return data
                why = f"{len(data):,} bytes came for {stop - start:,}"
                failure: MegatronLiteError = DataError(f"{self.url}/{name} is cut off, or its server gives no parts of files: {why}")
            except FileNotFoundError:
                raise DataError(f"{self.url}/{name} does not exist. Put it back, or build the dataset again.") from None
            except PermissionError as error:  # of a session that has expired, as often as not
                failure = NotAllowedError(f"{self.url}/{name} may not be read: {error}")
            except Exception as error:  # each store has its own
                failure = MegatronLiteError(f"{self.url}/{name} can't be read: {type(error).__name__}: {error}")
            if wait_s is None:
                raise failure
            time.sleep(wait_s)
        raise AssertionError("the last attempt returns or raises")


class RemoteBlockFile(BlockFile):
    """A block file in object storage: arrays are copies of what its blocks hold, fetched when they are read."""

    def __init__(self, folder: RemoteFolder, name: str, cache: BlockCache, *, kind: str) -> None:
        self._folder, self._name, self._cache = folder, name, cache
        self.path = f"{folder.url}/{name}"  # type: ignore[assignment]
        table = self._understand(None, kind=kind)
        self._key = hashlib.sha256(self._bytes(0, HEADER_BYTES).tobytes() + table).hexdigest()[:32]

    def _bytes(self, low: int, high: int) -> np.ndarray:
        return np.frombuffer(self._folder.read(self._name, low, high), dtype=np.uint8)

    def _data(self, first: int, last: int) -> np.ndarray:
        out = np.empty(last - first, dtype=np.uint8)
        for block in blocks_of(first, last):
            begin = block * BLOCK_BYTES
            low, high = max(first, begin), min(last, begin + BLOCK_BYTES)
            data = self._cached(block, low - begin, high - low)
            if data is None:
                data = self._fetched(block, blocks_of(first, last))[low - begin : high - begin]
            out[low - first : high - first] = np.frombuffer(data, dtype=np.uint8)
        return out

    def _cached(self, block: int, start: int, length: int) -> bytes | None:
        """From the cache; the first time, all of the block is checked, since disks forget too."""
        if self._verified[block]:
            return self._cache.get(self._key, block, start, length)
        data = self._cache.get(self._key, block, 0, BLOCK_BYTES)
        if data is None:
            return None
        if not self._is_sound(block, data):
            self._cache.drop(self._key, block)
            return None
        self._verified[block] = True
        return data[start : start + length]

    def _fetched(self, block: int, wanted: range) -> bytes:
        """The block, fetched together with those after it that are wanted too."""
        group = block // _GROUP_BLOCKS
        with self._cache.fetching(self._key, group):
            data = self._cached(block, 0, BLOCK_BYTES)  # another process has fetched it meanwhile
            if data is not None:
                return data
            last = block + 1
            while last < min(wanted.stop, (group + 1) * _GROUP_BLOCKS) and not self._cache.has(self._key, last):
                last += 1
            blocks = self._fetch(range(block, last))
            for number, content in zip(range(block, last), blocks):
                self._cache.put(self._key, number, content)
                self._verified[number] = True
            return blocks[0]

    def _fetch(self, blocks: range) -> list[bytes]:
        """Raises DataError naming a block that came damaged twice."""
        low, high = HEADER_BYTES + blocks.start * BLOCK_BYTES, HEADER_BYTES + min(blocks.stop * BLOCK_BYTES, self.data_bytes)
        bad: list[int] = []
        for _ in range(2):
            data = self._folder.read(self._name, low, high)
            found = [data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)]
            bad = [number for number, content in zip(blocks, found) if not self._is_sound(number, content)]
            if not bad:
                return found
        self._complain(bad[0])
        raise AssertionError("it complained")

    def verify(self) -> None:
        """Fetch and check every block."""
        for first in range(0, self.data_bytes, BLOCK_BYTES):
            self._data(first, min(first + BLOCK_BYTES, self.data_bytes))

    def copies(self, name: str, places: Sequence[tuple[int, int]]) -> Iterator[bytes]:
        return (self.read(name, start, stop).tobytes() for start, stop in places)

    def release(self) -> None:
        """Nothing is held."""


class RemoteDataset:
    """What a Dataset needs of object storage: `folder`, where its small files are copied to, and its shards."""

    def __init__(self, url: str, config: CacheConfig | None) -> None:
        self.remote, self._cache = RemoteFolder(url), (config or CacheConfig()).open()
        line = self.remote.read("manifest.sha256")
        digest = line.decode("ascii", "replace").partition(" ")[0]
        if re.fullmatch("[0-9a-f]{64}", digest) is None:
            raise DataError(f"{self.remote.url}/manifest.sha256 is damaged. Publish the dataset again.")
        self.folder = self._cache.folder / "datasets" / digest[:32]
        tokenizer = json.loads(self._copied("manifest.json", lambda data: _sha256(data) == digest))["tokenizer"]
        self._copied("tokenizer.json", lambda data: _sha256(data) == tokenizer["hash"])
        self._copied("token_bytes.npy", lambda data: _sha256_of_array(data) == tokenizer["token_bytes_hash"])
        with contextlib.suppress(DataError, NotAllowedError):  # others' programs want it, not ours
            self._copied("tokenizer_config.json", lambda data: True)
        self._keep("manifest.sha256", line)  # last: what it names is there

    def _copied(self, name: str, is_sound: Callable[[bytes], bool]) -> bytes:
        """The file, copied unless it is there. Raises DataError where it is not what the manifest says."""
        path = self.folder / name
        if path.exists() and is_sound(data := path.read_bytes()):
            return data
        for _ in range(2):
            data = self.remote.read(name)
            if is_sound(data):
                self._keep(name, data)
                return data
        raise DataError(
            f"{self.remote.url}/{name} is not what the manifest says: it was changed or damaged, or is being replaced just now."
        )

    def fetch_plan(self, name: str) -> None:
        """Copy a packing plan, where there is a sound one; else none lies here afterwards, and it is made anew. Whether it is of this data is
        seen when it is opened."""
        path = self.folder / "packing" / name
        if path.exists() and _is_sound_plan(path):
            return
        with contextlib.suppress(DataError, NotAllowedError):
            for _ in range(2):
                data = self.remote.read(f"packing/{name}")
                with contextlib.suppress(DataError), atomic_write(path) as file:
                    file.write(data)
                    file.flush()
                    BlockFile(file.name, kind="plan").verify()  # before it gets its name: other ranks look for that
                    return
        if path.exists() and not _is_sound_plan(path):
            path.unlink(missing_ok=True)

    def open_shards(self, names: Sequence[str]) -> list[Shard]:
        """Side by side: each takes three requests."""

        def opened(name: str) -> Shard:
            return Shard(RemoteBlockFile(self.remote, name, self._cache, kind="shard"))

        with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="open") as pool:
            return list(pool.map(opened, names))

    def _keep(self, name: str, data: bytes) -> None:
        with atomic_write(self.folder / name) as file:
            file.write(data)

    @property
    def counts(self) -> dict[str, Any]:
        """Of blocks, by this process: found in the cache, fetched, evicted."""
        return self._cache.counts


def _is_sound_plan(path: Path) -> bool:
    try:
        BlockFile(path, kind="plan").verify()
    except DataError:
        return False
    return True


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _sha256_of_array(data: bytes) -> str:
    try:
        return _sha256(np.load(io.BytesIO(data), allow_pickle=False).tobytes())
    except ValueError:
        return ""
