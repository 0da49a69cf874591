"""What there is to read: every input file with the hash of its bytes, in tasks of a size that suits a worker."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.cache_key import cache_key
from data_pipeline.config import DataConfig, SourceConfig
from data_pipeline.decontaminate.stage import Search
from data_pipeline.errors import ConfigError, DataError, Fault
from data_pipeline.filters.stage import filters_key
from data_pipeline.pool import Report, Workers
from data_pipeline.portion import ALL, Portion
from data_pipeline.progress import Progress
from data_pipeline.storage import atomic_write, is_url, list_files, named_files, sha256_file

TASK_BYTES = 32 << 20
_TAGS = ("ETag", "etag", "md5Hash", "content_md5", "Content-MD5", "Digest", "mtime", "LastModified", "last_modified")  # of fsspec's stores


@dataclass(frozen=True)
class InputFile:
    """`name` is relative to its root and goes into document ids; `hash` is the sha256 of the bytes as stored; `stamp` tells
    whether it was touched since."""

    path: str
    name: str
    num_bytes: int
    hash: str
    stamp: tuple[Any, ...]

    def check(self) -> None:
        """Raises DataError if the file isn't the one that was hashed, so that a mixture of two states is never built."""
        if stamp_of(self.path, fresh=True) != self.stamp:
            raise DataError(f"{self.path} changed while the build was reading it. Run the same command again when it is complete.")


@dataclass(frozen=True)
class ReadTask:
    """Some consecutive files of one source (or one Hugging Face dataset), and the key of what reading them gives. `targets`: of pairs
    in two files, the other one of each."""

    source: SourceConfig
    files: tuple[InputFile, ...]
    num_bytes: int
    key: str
    targets: tuple[InputFile, ...] = ()


def find_inputs(
    config: DataConfig, workers: Workers, progress: Progress, *, search: Search | None, portion: Portion = ALL
) -> list[ReadTask]:
    """All read tasks, or a portion of them: sources in the order of the config, files in the order of their names. `search`: of
    config.decontaminate. Raises DataError for a source without files, and for two sources that have a file in common."""
    listed = {source.name: _listed(source) for source in config.sources}
    partners = _partners(config, listed)
    _check_disjoint({name: [*pairs, *partners[name].values()] for name, pairs in listed.items()})
    stamps = {path: stamp_of(path) for name, pairs in listed.items() for path, _ in (*pairs, *partners[name].values())}
    units: list[tuple[SourceConfig, list[tuple[str, str]]]] = []
    for source in config.sources:
        pairs = listed[source.name]
        whole = source.dataset is not None  # one on the Hub has no files here
        units += [(source, group) for group in ([pairs] if whole else _groups(pairs, stamps))]
    units = portion.of(units)
    stamps = {path: stamps[path] for source, group in units for path, _ in (*group, *_others(group, partners[source.name]))}
    hashes = _hashes(stamps, config.work_folder, portion, workers, progress)
    cleaning: list[Any] = [] if config.filters is None else [filters_key(config.filters)]
    cleaning += [search.key] if search is not None else []
    cleaning += [["field", config.dedup.field]] if config.dedup is not None and config.dedup.field is not None else []
    tasks: list[ReadTask] = []
    for source, group in units:
        files, targets = (
            tuple(InputFile(path, name, stamps[path][0], hashes[path], stamps[path]) for path, name in some)
            for some in (group, _others(group, partners[source.name]))
        )
        kept = source.model_dump(mode="json", exclude={"files", "target_files"})
        settings = [kept, config.normalise.model_dump(mode="json"), config.strict, *cleaning]
        sides = [[[file.name, file.hash] for file in side] for side in (files, targets)]
        content = sides if source.is_pairs else (sides[0] or "by name")  # the same files read as pairs are another thing
        num_bytes = sum(file.num_bytes for file in (*files, *targets))
        tasks.append(ReadTask(source, files, num_bytes, cache_key("read", settings, content), targets))
    return tasks


def check_inputs(config: DataConfig) -> None:
    """List them and no more; raises as find_inputs."""
    listed = {source.name: _listed(source) for source in config.sources}
    partners = _partners(config, listed)
    _check_disjoint({name: [*pairs, *partners[name].values()] for name, pairs in listed.items()})


def _listed(source: SourceConfig) -> list[tuple[str, str]]:
    if source.files is not None:
        return named_files(source.files)
    assert source.dataset is not None
    if Path(source.dataset).is_dir():  # a local dataset is hashed like any other files; one on the Hub goes by its name and revision
        if source.revision is not None:
            fix = "remove it: a folder's files are hashed, and a change of them is seen"
            raise ConfigError([Fault(f"sources.{source.name}.revision", source.revision, "nothing for a local folder", fix)])
        return [(path, os.path.relpath(path, source.dataset)) for path in list_files(source.dataset)]
    return []


def _partners(config: DataConfig, listed: Mapping[str, list[tuple[str, str]]]) -> dict[str, dict[str, tuple[str, str]]]:
    """Of each source, the path and name of the other file of a pair, by the path of the first; none where pairs aren't in two files."""
    return {
        source.name: dict(zip((path for path, _ in listed[source.name]), _targets(source, listed[source.name])))
        for source in config.sources
    }


def _others(group: Sequence[tuple[str, str]], partners: Mapping[str, tuple[str, str]]) -> list[tuple[str, str]]:
    return [partners[path] for path, _ in group] if partners else []


def _targets(source: SourceConfig, files: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The other file of each; none where the source isn't pairs in two files."""
    if source.target_files is None:
        return []
    targets = named_files(source.target_files)
    if len(targets) != len(files):
        fix = f"files are {', '.join(name for _, name in files[:3])}; target_files {', '.join(name for _, name in targets[:3])}"
        raise ConfigError([Fault(f"sources.{source.name}.target_files", f"{len(targets)} files", f"as many as files, {len(files)}", fix)])
    return targets


def _check_disjoint(listed: dict[str, list[tuple[str, str]]]) -> None:
    owner: dict[str, str] = {}
    for name, pairs in listed.items():
        for path, _ in pairs:
            real = path if is_url(path) else os.path.realpath(path)
            if owner.setdefault(real, name) != name:
                raise ConfigError(
                    [
                        Fault(
                            "sources",
                            path,
                            "each file in one source",
                            f"it is in both {owner[real]} and {name}: narrow one of their patterns",
                        )
                    ]
                )


def _groups(pairs: Sequence[tuple[str, str]], stamps: Mapping[str, tuple[Any, ...]]) -> list[list[tuple[str, str]]]:
    """Consecutive files of up to TASK_BYTES together; the cut depends on the files alone, never on the workers."""
    groups: list[list[tuple[str, str]]] = []
    room = 0
    for path, name in pairs:
        num_bytes = stamps[path][0]
        if not groups or num_bytes > room:
            groups.append([])
            room = TASK_BYTES
        groups[-1].append((path, name))
        room -= num_bytes
    return groups


# ------------------------------------------------------------------------------------------------- hashing


def _hashes(stamps: Mapping[str, tuple[Any, ...]], folder: Path, portion: Portion, workers: Workers, progress: Progress) -> dict[str, str]:
    """sha256 of each file. A file that the system says was not touched since it was hashed isn't read again: its
    inode, length, and both times, of the contents and of any change, are what they were."""
    memos = sorted(folder.glob("inputs*.json"))
    memo: dict[str, Any] = {}
    for path in memos:
        with suppress(ValueError, FileNotFoundError):  # it only saves time; another task may just have taken it away
            memo |= json.loads(path.read_text())
    known = {
        path: memo[path]["hash"] for path, stamp in stamps.items() if _is_telling(stamp) and memo.get(path, {}).get("stamp") == list(stamp)
    }
    missing = [path for path in stamps if path not in known]
    if missing:
        batches = [missing[first : first + 256] for first in range(0, len(missing), 256)]
        with progress.stage("hash inputs", sum(stamps[path][0] for path in missing)) as advance:
            for batch, digests in zip(batches, workers.run(_hash_files, batches, advance=advance)):
                known.update(zip(batch, digests))
    own = folder / ("inputs.json" if portion == ALL else f"inputs-{portion.index}-of-{portion.count}.json")
    if missing or (portion == ALL and memos not in ([], [own])):
        with atomic_write(own) as file:
            file.write(json.dumps({path: {"stamp": stamp, "hash": known[path]} for path, stamp in stamps.items()}).encode())
        for path in memos if portion == ALL else []:
            if path != own:
                path.unlink(missing_ok=True)
    return known


def stamp_of(path: str, *, fresh: bool = False) -> tuple[Any, ...]:
    """(bytes, and whatever changes when a file is touched; of a URL nothing more, where its server doesn't say). `fresh`: a store is asked
    again; else what this process listed before may do."""
    if is_url(path):
        import fsspec

        filesystem, name = fsspec.core.url_to_fs(path)
        if fresh:
            filesystem.invalidate_cache(name)
        try:
            info = filesystem.info(name)
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: can't be read ({error})") from None
        return int(info.get("size") or 0), *[str(info[key]) for key in _TAGS if info.get(key)][:1]
    try:
        found = Path(path).stat()
    except OSError as error:
        raise DataError(f"{path}: can't be read ({error.strerror})") from None
    return found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns


def _is_telling(stamp: tuple[Any, ...]) -> bool:
    return len(stamp) > 1


def _hash_files(paths: Sequence[str], report: Report) -> list[str]:
    digests = []
    for path in paths:
        if is_url(path):
            stamp = stamp_of(path)  # with the store's own tag: hashing would download it twice
            digests.append(f"remote:{stamp[0]}:{stamp[1]}" if _is_telling(stamp) else _hash_url(path))
        else:
            digests.append(sha256_file(path))
            report(Path(path).stat().st_size)
    return digests


def _hash_url(path: str) -> str:
    import fsspec

    digest = hashlib.sha256()
    with fsspec.open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def describe_inputs(tasks: Sequence[ReadTask]) -> list[dict[str, Any]]:
    """For the manifest: each source's files and their hashes would be long, so their number, bytes and one hash over all."""
    out: dict[str, dict[str, Any]] = {}
    for task in tasks:
        entry = out.setdefault(task.source.name, {"source": task.source.name, "files": 0, "bytes": 0, "keys": []})
        entry["files"] += len(task.files)
        entry["bytes"] += task.num_bytes
        entry["keys"].append(task.key)
    return [{**entry, "keys": cache_key("read", entry["keys"])} for entry in out.values()]


def unpinned(tasks: Sequence[ReadTask]) -> list[str]:
    """The datasets on the Hub of which no revision is stated: what they hold now may be other than what was read."""
    return sorted({str(task.source.dataset) for task in tasks if not task.files and task.source.revision is None})
