"""The work folder beside a dataset's place: who may write to it, what in it is worth keeping, and whether the place is free."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from data_pipeline.dataset import Dataset
from data_pipeline.errors import ConfigError, DataError, Fault, RunInUseError

STAGES = ("documents", "signatures", "edited", "joined", "tokenizer", "shards")


def finished_at(folder: Path, key: str, *, replace: bool) -> Dataset | None:
    """The finished dataset of this key, None where the place is free (or to be freed). Raises ConfigError otherwise."""
    dataset = _lies_at(folder, replace=replace)
    if dataset is None:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
        return None
    if dataset.manifest.config.get("build_key") == key:
        return dataset
    if not replace:
        raise _another(folder)
    return None


def check_place(folder: Path, content: Mapping[str, Any], *, replace: bool) -> None:
    """What can be said before the input is hashed: raises ConfigError where no dataset of ours lies there, or one of another config."""
    dataset = _lies_at(folder, replace=replace)
    if dataset is None or replace:
        return
    made_by = {name: value for name, value in dataset.manifest.config.items() if name not in ("build_key", "inputs")}
    # a pretrained tokenizer may have moved: it goes by its bytes
    moved = {"tokenizer"} if "pretrained" in (made_by.get("tokenizer", {}).get("type"), content["tokenizer"]["type"]) else set()
    if any(made_by.get(name) != content.get(name) for name in {*made_by, *content} - moved):
        raise _another(folder)


def _lies_at(folder: Path, *, replace: bool) -> Dataset | None:
    """The dataset there; None where there is nothing, or with `replace` a damaged one. Raises ConfigError where it is something else."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    try:
        return Dataset.open(folder)
    except DataError:
        if (folder / "manifest.json").exists() and replace:
            return None
        raise ConfigError(
            [
                Fault(
                    "output",
                    str(folder),
                    "a folder that doesn't exist yet, or a dataset of ours",
                    "choose another output, or move the folder away",
                )
            ]
        ) from None


def _another(folder: Path) -> ConfigError:
    fix = "another config, or other input files, made the dataset there: choose another output, or add --replace"
    return ConfigError([Fault("output", str(folder), "a place for this dataset", fix)])


@contextmanager
def held(work: Path, *, shared: bool = False) -> Iterator[None]:
    """Hold the work folder; a dead build's hold is gone with it. `shared`: beside others that do portions of the same build. Who holds
    it alone removes what killed writers left there."""
    work.mkdir(parents=True, exist_ok=True)
    with open(work / "lock", "a+") as file:  # NFS gives a shared lock to readers alone
        is_locked = _flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX, work)
        if is_locked and not shared:
            for path in [*work.glob(".*.tmp-*"), *work.glob("*/.*.tmp-*")]:
                path.unlink(missing_ok=True)
        yield


def _flock(file: IO[str], kind: int, work: Path) -> bool:
    """Whether there is a lock: a file system without flock can't say who else is there. Raises RunInUseError where another has it."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RunInUseError(f"another build is writing {work}: wait for it, or choose another output") from None
    except OSError:
        return False
    return True


def prune(work: Path, used: Iterable[Path]) -> None:
    """Delete work of other configs, so that the work folder stays as large as one build needs."""
    kept = set(used)
    for stage in STAGES:
        for path in (work / stage).glob("*"):
            if path not in kept:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
