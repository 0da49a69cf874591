"""A finished dataset folder to object storage: every file read back and compared, the manifest last, so that none is seen half written."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from data_pipeline.errors import ConfigError, Fault, MegatronLiteError
from data_pipeline.manifest import MANIFEST_FILES
from data_pipeline.progress import Progress
from data_pipeline.storage import sha256_file

NUM_THREADS = 4
_READ_BYTES = 8 << 20


def publish(folder: Path, url: str, *, replace: bool, progress: Progress) -> int:
    """Make what lies under `url` equal to the dataset in `folder`; the number of files that were sent. Killed and called again, it sends
    what is not there yet. `replace`: another dataset there gives way.

    Raises ConfigError where something else lies there, MegatronLiteError where the store refuses or gives back other bytes.
    """
    try:
        return _Published(folder, url).update(replace=replace, progress=progress)
    except MegatronLiteError:
        raise
    except Exception as error:  # each store has its own
        raise MegatronLiteError(f"{url} can't be written: {type(error).__name__}: {error}") from error


class _Published:
    def __init__(self, folder: Path, url: str) -> None:
        import fsspec

        self.folder, self.url = folder, url.rstrip("/")
        self._files, self._root = fsspec.core.url_to_fs(self.url)
        self._files.invalidate_cache()
        names = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
        self.names = [str(name) for name in names if str(name) not in MANIFEST_FILES and _belongs(name)]

    def update(self, *, replace: bool, progress: Progress) -> int:
        there = self._listed()
        is_same = (
            MANIFEST_FILES[-1] in there
            and self._files.cat_file(self._at(MANIFEST_FILES[-1])) == (self.folder / MANIFEST_FILES[-1]).read_bytes()
        )
        foreign = set(there) - {*self.names, *MANIFEST_FILES}
        if not is_same and not replace and (foreign or MANIFEST_FILES[-1] in there):
            what = f"another dataset, or other files such as {min(foreign)}, lies there" if foreign else "another dataset lies there"
            raise ConfigError([Fault("output", self.url, "a place for this dataset", f"{what}: choose another output, or add --replace")])
        if not is_same:
            for name in reversed(MANIFEST_FILES):  # from now on it is no dataset, until it is this one
                if name in there:
                    self._files.rm_file(self._at(name))
        waiting = [name for name in self.names if not (is_same and there.get(name) == self._size(name))]
        sent = self._send(waiting, there, progress)
        if not is_same:
            for name in MANIFEST_FILES:
                sent += self._send_one(name, None)
            for name in sorted(foreign) if replace else ():
                self._files.rm_file(self._at(name))
        return sent

    def _listed(self) -> dict[str, int]:
        """Size of each file there, by name."""
        try:
            found = self._files.find(self._root, detail=True)
        except FileNotFoundError:
            return {}
        return {path.removeprefix(self._root).lstrip("/"): int(entry["size"]) for path, entry in found.items()}

    def _send(self, names: Sequence[str], there: dict[str, int], progress: Progress) -> int:
        with progress.stage("publish", sum(map(self._size, names))) as advance, ThreadPoolExecutor(NUM_THREADS) as pool:
            sent = 0
            for name, count in zip(names, pool.map(lambda name: self._send_one(name, there.get(name)), names)):
                sent += count
                advance(self._size(name))
            return sent

    def _send_one(self, name: str, size_there: int | None) -> int:
        """Send a file, unless it is there; 1 if it was sent."""
        path, target = self.folder / name, self._at(name)
        digest = sha256_file(path)
        if size_there == self._size(name) and self._digest_there(target, size_there) == digest:
            return 0
        try:
            self._files.put_file(str(path), target)
        except FileNotFoundError:  # where folders are real
            self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
            self._files.put_file(str(path), target)
        if self._digest_there(target, self._size(name)) != digest:
            raise MegatronLiteError(f"{self.url}/{name}: the store gave back other bytes than it was sent. Run the same command again.")
        return 1

    def _digest_there(self, target: str, size: int) -> str:
        digest: Any = hashlib.sha256()
        for start in range(0, size, _READ_BYTES):
            digest.update(self._files.cat_file(target, start=start, end=min(start + _READ_BYTES, size)))
        return str(digest.hexdigest())

    def _size(self, name: str) -> int:
        return (self.folder / name).stat().st_size

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"


def _belongs(name: Path) -> bool:
    """Not what a killed writer left behind, nor the indexes that other builds keep here."""
    return name.parts[0] != "dedup" and not any(part.startswith(".") for part in name.parts)
