"""What is kept: the newest few, and every N-th for good. Nothing is deleted before the next one is safe."""

from __future__ import annotations

import shutil
from pathlib import Path

from data_pipeline.errors import ConfigError, Fault
from data_pipeline.storage import fsync_folder
from megatron_lite.checkpoint.find import survey


def apply_retention(root: Path, *, keep_last: int, keep_every_steps: int | None, protect: Path) -> list[Path]:
    """Delete older checkpoints of the same run, and return which. On one rank, after `protect` was committed.

    Kept are `protect`, the `keep_last` newest up to it (it counts), and those whose step is a multiple of `keep_every_steps`.
    Later steps, damaged folders, folders of another run (other model, tokenizer, data, seed) and everything with another name
    are neither counted nor touched. Saves that were never committed are removed. A deletion is a rename first, so that a
    half-deleted folder never looks whole. Raises ConfigError where nothing would be kept.
    """
    if keep_last < 1:
        raise ConfigError([Fault("checkpoint.keep_last", keep_last, "at least 1", "the newest checkpoint is always kept")])
    found = survey(root)
    newest = next((info for info in found.complete if info.path.resolve() == Path(protect).resolve()), None)
    if newest is None:
        return []
    ours = [info for info in found.complete if info.step <= newest.step and info.state.identity() == newest.state.identity()]
    for leftover in found.unfinished:
        shutil.rmtree(leftover, ignore_errors=True)
    deleted = []
    for info in ours[:-keep_last]:
        if keep_every_steps and info.step % keep_every_steps == 0:
            continue
        doomed = info.path.with_name(f"{info.path.name}.deleting")
        info.path.rename(doomed)
        fsync_folder(doomed.parent)
        shutil.rmtree(doomed, ignore_errors=True)
        deleted.append(info.path)
    return deleted
