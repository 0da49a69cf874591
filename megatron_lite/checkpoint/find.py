"""Which checkpoints a folder has. There is no pointer file: a committed folder is found by its name and its manifest."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from data_pipeline.errors import CheckpointError
from data_pipeline.storage import fsync_folder
from megatron_lite.checkpoint.agree import broadcast_json, raise_together
from megatron_lite.checkpoint.committed import step_of
from megatron_lite.checkpoint.load import verify_checkpoint
from megatron_lite.checkpoint.manifest import RunState, read_manifest, state_from_json
from megatron_lite.parallel.groups import ProcessGroups

_UNFINISHED = re.compile(r"step_(\d{8,})\.(tmp-\d+|deleting)")


@dataclass(frozen=True)
class CheckpointInfo:
    """A complete checkpoint: its files are there, each of the right size, and its manifest is sound."""

    path: Path
    step: int
    attempt: int
    num_bytes: int
    state: RunState


@dataclass(frozen=True)
class Survey:
    """All that stands in a folder of checkpoints."""

    complete: list[CheckpointInfo] = field(default_factory=list)  # oldest first
    damaged: list[tuple[Path, str]] = field(default_factory=list)  # oldest first, with the reason
    unfinished: list[Path] = field(default_factory=list)  # saves that were never committed, deletions that were cut off


@dataclass(frozen=True)
class Choice:
    """The checkpoint to go on from, and what was passed over to get there; the same on every rank."""

    info: CheckpointInfo
    passed_over: list[tuple[Path, str]]  # damaged later steps: to be moved aside by `quarantine` before training goes on
    unfinished: list[Path]


def folder_name(step: int) -> str:
    return f"step_{step:08d}"


def survey(root: Path) -> Survey:
    """Look at every checkpoint of a folder; other folders and files there are nobody's business. Reads no tensor bytes."""
    found = Survey()
    entries = sorted(Path(root).iterdir(), key=lambda path: (len(path.name), path.name)) if Path(root).is_dir() else []
    for path in entries:
        if _UNFINISHED.fullmatch(path.name):
            found.unfinished.append(path)
        if step_of(path.name) is None or not path.is_dir():
            continue
        info = inspect_checkpoint(path)
        if isinstance(info, str):
            found.damaged.append((path, info))
        else:
            found.complete.append(info)
    return found


def inspect_checkpoint(path: Path) -> CheckpointInfo | str:
    """The checkpoint if it is complete, else a sentence that says what is wrong with it. Reads no tensor bytes."""
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return str(error)
    for file in manifest.files:
        try:
            size = (path / file.name).stat().st_size
        except OSError as error:
            return f"{path / file.name} can't be read: {error.strerror}"
        if size != file.data_start + file.data_bytes:
            return f"{path / file.name} has {size:,} bytes instead of {file.data_start + file.data_bytes:,}: it was cut off or written to"
    if step_of(path.name) not in (None, manifest.state.step):
        return f"{path} holds step {manifest.state.step}: it was renamed"
    return CheckpointInfo(path, manifest.state.step, manifest.attempt, manifest.num_bytes(), manifest.state)


def newest_checkpoint(root: Path, groups: ProcessGroups, *, allow_fallback: bool = False) -> Choice | None:
    """The newest checkpoint, chosen by rank 0 for all; None where none was ever committed. Collective over the world.

    Raises CheckpointError on every rank where the newest is damaged and `allow_fallback` is off, or where no good one is left.
    With `allow_fallback` every byte is read before the choice falls, a share of the files on each rank.
    """
    damaged: dict[str, str] = {}
    while True:
        answer = broadcast_json(_choose(root, damaged, allow_fallback=allow_fallback) if groups.rank == 0 else None, groups.world)
        if answer is None:
            return None
        choice = _choice(answer)
        damage = _damage(choice.info.path, groups) if allow_fallback else None
        if damage is None:
            return choice
        damaged[choice.info.path.name] = damage


def checkpoint_at(path: Path, groups: ProcessGroups) -> CheckpointInfo:
    """The checkpoint in this very folder, inspected by rank 0 for all. Collective. Raises CheckpointError on every rank."""
    answer: dict[str, Any] = {}
    if groups.rank == 0:
        info = inspect_checkpoint(Path(path))
        answer = (
            {"error": info} if isinstance(info, str) else {"info": dict(asdict(info), path=str(path)), "passed_over": [], "unfinished": []}
        )
    return _choice(broadcast_json(answer, groups.world)).info


def _choice(answer: dict[str, Any]) -> Choice:
    if "error" in answer:
        raise CheckpointError(answer["error"])
    info = dict(answer["info"], path=Path(answer["info"]["path"]), state=state_from_json(answer["info"]["state"]))
    passed_over = [(Path(path), reason) for path, reason in answer["passed_over"]]
    return Choice(CheckpointInfo(**info), passed_over, [Path(path) for path in answer["unfinished"]])


def _choose(root: Path, damaged: dict[str, str], *, allow_fallback: bool) -> dict[str, Any] | None:
    """`damaged` are folders that look complete but are not, with the reason."""
    try:
        found = survey(root)
    except OSError as error:  # told to every rank, as any other outcome
        return {"error": f"can't look for checkpoints in {root}: {error.strerror}"}
    if not found.complete and not found.damaged:
        return None
    complete = [info for info in found.complete if info.path.name not in damaged]
    bad = found.damaged + [(info.path, damaged[info.path.name]) for info in found.complete if info.path.name in damaged]
    best = complete[-1] if complete else None
    later = sorted((path, reason) for path, reason in bad if best is None or _step(path) > best.step)
    if best is None or (later and not allow_fallback):
        return {"error": _refusal(root, later, complete)}
    info = dict(asdict(best), path=str(best.path))
    return {"info": info, "passed_over": [(str(path), why) for path, why in later], "unfinished": [str(path) for path in found.unfinished]}


def _damage(path: Path, groups: ProcessGroups) -> str | None:
    """What is wrong with the bytes of a checkpoint, the same on every rank; None where nothing is."""
    error: Exception | None = None
    try:
        verify_checkpoint(path, share=groups.world.rank, shares=groups.world.size)
    except Exception as caught:
        error = caught
    try:
        raise_together(error, groups.world, doing=f"{path.name} is damaged")
    except CheckpointError as told:
        return str(told)
    return None


def _refusal(root: Path, damaged: list[tuple[Path, str]], complete: list[CheckpointInfo]) -> str:
    lines = [f"{path.name}: {reason}" for path, reason in reversed(damaged)]
    if complete:
        good = ", ".join(info.path.name for info in reversed(complete))
        remedy = (
            f"Good: {good}. Start again with checkpoint.allow_fallback=true to go on from {complete[-1].path.name}, or restore the files."
        )
    else:
        remedy = "No good checkpoint is left there: restore the files, or move the folder away to start from step 0."
    return "\n".join([f"the newest checkpoint in {root} is damaged:", *lines, remedy])


def _step(path: Path) -> int:
    step = step_of(path.name)
    assert step is not None, path
    return step


def quarantine(path: Path) -> Path:
    """Move a damaged or abandoned checkpoint out of the way, and return where it is now: step_N.bad. On one rank only."""
    number = 1
    while (target := path.with_name(f"{path.name}.bad" if number == 1 else f"{path.name}.bad-{number}")).exists():
        number += 1
    path.rename(target)
    fsync_folder(target.parent)
    return target
