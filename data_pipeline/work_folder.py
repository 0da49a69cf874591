"""The work folder beside a dataset's place: who may write to it, what in it is worth keeping, and whether the place is free."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from data_pipeline.dataset import Dataset
from data_pipeline.errors import ConfigError, DataError, Fault, RunInUseError

STAGES = ("documents", "signatures", "edited", "joined", "tokenizer", "shards")


def finished_at(folder: Path, key: str, *, replace: bool) -> Dataset | None:
    """The finished dataset of this key, None where the place is free (or to be freed). Raises ConfigError otherwise."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        if folder.exists():
            folder.rmdir()
        return None
    try:
        dataset = Dataset.open(folder)
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
    if dataset.manifest.config.get("build_key") == key:
        return dataset
    if replace:
        return None
    raise ConfigError(
        [
            Fault(
                "output",
                str(folder),
                "a place for this dataset",
                "another config, or other input files, made the dataset there: choose another output, or add --replace",
            )
        ]
    )


@contextmanager
def held(work: Path, *, shared: bool = False) -> Iterator[None]:
    """Hold the work folder; a dead build's hold is gone with it. `shared`: beside others that do portions of the same build. Who holds
    it alone removes what killed writers left there."""
    work.mkdir(parents=True, exist_ok=True)
    with open(work / "lock", "a") as file:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError:
            raise RunInUseError(f"another build is writing {work}: wait for it, or choose another output") from None
        if not shared:
            for path in [*work.glob(".*.tmp-*"), *work.glob("*/.*.tmp-*")]:
                path.unlink(missing_ok=True)
        yield


def prune(work: Path, used: Iterable[Path]) -> None:
    """Delete work of other configs, so that the work folder stays as large as one build needs."""
    kept = set(used)
    for stage in STAGES:
        for path in (work / stage).glob("*"):
            if path not in kept:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
