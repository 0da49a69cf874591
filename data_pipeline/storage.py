"""Files: list and open them wherever they are, write them so that what exists is whole, check their bytes.

Local paths and fsspec URLs (anything with `://`) are read; only local paths are written here (publish.py sends datasets away).
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from glob import glob, has_magic
from pathlib import Path
from typing import IO

from data_pipeline.errors import DataError

BLOCK_BYTES = 1 << 20


# ------------------------------------------------------------------------------------------------- listing


def list_files(patterns: str | Sequence[str]) -> list[str]:
    """Files that the patterns name, sorted, each once: a file, a folder (all of it, recursively), a glob with `**`.

    Names that begin with a dot are left out of folders and globs. Raises DataError naming a pattern that matches nothing.
    """
    return [path for path, _ in named_files(patterns)]


def named_files(patterns: str | Sequence[str]) -> list[tuple[str, str]]:
    """(path, name) of each file of `list_files`, by name. The name is relative to the folder that the patterns have in
    common before any wildcard, so it survives a move of the whole folder and doesn't depend on which other files exist."""
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    if not patterns:
        raise DataError("no files are named: give a file, a folder or a pattern such as raw/*.jsonl")
    found: dict[str, None] = {}
    for pattern in patterns:
        matched = _match_url(pattern) if is_url(pattern) else _match_local(pattern)
        if not matched:
            raise DataError(f"no file matches {pattern!r} ({_why_nothing(pattern)})")
        found.update(dict.fromkeys(matched))
    local_roots = [root_of(pattern) for pattern in patterns if not is_url(pattern)]
    base = os.path.commonpath(local_roots) if local_roots else ""
    return sorted(((path, path if is_url(path) else os.path.relpath(path, base)) for path in found), key=lambda pair: (pair[1], pair[0]))


def is_url(path: str) -> bool:
    return "://" in path


def root_of(pattern: str) -> str:
    """The folder that a local pattern has before any wildcard, or that a file lies in."""
    path = Path(pattern).expanduser().absolute()
    if path.is_dir():
        return str(path)
    while has_magic(str(path)) and not path.exists():
        path = path.parent
    return str(path.parent if path.is_file() else path)


def _match_local(pattern: str) -> list[str]:
    path = Path(pattern).expanduser()
    if path.is_file():
        return [str(path)]
    if path.is_dir():
        return list(_walk(path))
    matched: list[str] = []
    for name in glob(str(path), recursive=True):  # noqa: PTH207 (Path.glob ends `**` at folders and needs a root)
        if Path(name).is_file():
            matched.append(name)
        elif "**" not in pattern:
            matched.extend(_walk(Path(name)))
    return matched


def _walk(folder: Path) -> Iterator[str]:
    """Files under the folder; links to folders are followed, each real folder once."""
    seen: set[str] = set()
    for parent, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(parent)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths = (Path(parent, name) for name in sorted(files) if not name.startswith("."))
        yield from (str(path) for path in paths if path.is_file())


def _match_url(pattern: str) -> list[str]:
    import fsspec

    filesystem, path = fsspec.core.url_to_fs(pattern)
    try:
        if has_magic(path):
            matched = [name for name in filesystem.glob(path) if filesystem.isfile(name)]
        elif filesystem.isdir(path):
            matched = filesystem.find(path)
        else:
            matched = [path] if filesystem.exists(path) else []
    except OSError as error:
        raise DataError(f"can't list {pattern}: {error}") from None
    return [filesystem.unstrip_protocol(name) for name in matched if not name.rpartition("/")[2].startswith(".")]


def _why_nothing(pattern: str) -> str:
    if is_url(pattern):
        return "check the address and the rights to read it"
    path = Path(pattern).expanduser().absolute() / "*"
    return f"the nearest folder that exists is {next(parent for parent in path.parents if parent.is_dir())}"


# ------------------------------------------------------------------------------------------------- writing


def fsync_folder(path: str | Path) -> None:
    """Make the names in a folder durable (a rename is not, before this)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_write(path: str | Path) -> Iterator[IO[bytes]]:
    """A binary file to write; `path` holds all of it after the block, or what it held before if the block raises."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.tmp-{os.getpid()}-{os.urandom(3).hex()}")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(target.parent)


@contextmanager
def atomic_folder(path: str | Path, *, replace: bool = False) -> Iterator[Path]:
    """An empty folder to fill; it becomes `path` after the block, whole and durable, or nothing does.

    Raises FileExistsError where `path` exists, unless `replace`, which takes the old one away just before the rename.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"{target.name}.tmp-{os.getpid()}")
    if target.exists() and not replace:
        raise FileExistsError(f"{target} exists")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        _fsync_tree(temporary)
        old = target.with_name(f"{target.name}.tmp-{os.getpid()}-old")
        if target.exists():
            target.rename(old)
        temporary.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    fsync_folder(target.parent)


def remove_leftovers(path: str | Path) -> int:
    """Delete what killed writers of `path` left beside it; returns how many. Call it only while nobody else can be writing."""
    target = Path(path)
    if not target.parent.is_dir():
        return 0
    leftovers = [entry for entry in target.parent.iterdir() if entry.name.removeprefix(".").startswith(f"{target.name}.tmp-")]
    for entry in leftovers:
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    return len(leftovers)


def _fsync_tree(folder: Path) -> None:
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            with open(Path(parent, name), "rb") as file:
                os.fsync(file.fileno())
        fsync_folder(parent)


# ------------------------------------------------------------------------------------------------ checking


def sha256_file(path: str | Path) -> str:
    """Hex sha256 of the file's bytes as stored (compressed files aren't opened up)."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(BLOCK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
