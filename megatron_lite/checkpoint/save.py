"""Saving: every rank writes what it owns, rank 0 commits. What is not committed does not exist."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from io import FileIO
from pathlib import Path

import numpy as np
import torch
import xxhash

from data_pipeline.errors import CheckpointError
from data_pipeline.storage import fsync_folder
from megatron_lite.checkpoint.agree import broadcast_json, gather_bytes, raise_together
from megatron_lite.checkpoint.find import folder_name, inspect_checkpoint, quarantine
from megatron_lite.checkpoint.manifest import (
    BLOCK_BYTES,
    ITEM_BYTES,
    MANIFEST,
    MANIFEST_HASH,
    FileEntry,
    RunState,
    build_manifest,
    hash_line,
)
from megatron_lite.checkpoint.slices import STATES, Block, LogicalSlice, OwnedSlice, logical_slices
from megatron_lite.parallel.groups import ProcessGroups

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def save_checkpoint(
    root: Path,
    *,
    step: int,
    slices: Iterable[OwnedSlice],
    groups: ProcessGroups,
    attempt: int,
    state: RunState,
    on_point: Callable[[str], None] | None = None,
) -> Path:
    """Write `root/step_N` on all ranks of the world together, and return it once it is durable.

    Collective over the world. A checkpoint that this attempt has already committed is returned as it is; any other folder of
    that name is moved aside. Raises CheckpointError on every rank if any rank failed; nothing is left behind then, and older
    checkpoints are untouched. `on_point` is called on every rank at "slice" (after each), "before_manifest", "before_rename"
    and "before_parent_fsync", so that tests can kill a process there.
    """
    assert state.step == step, (state.step, step)
    reached = on_point or (lambda _: None)
    world, final = groups.world, Path(root) / folder_name(step)
    temporary = final.with_name(f"{final.name}.tmp-{attempt}")
    if _prepare(final, temporary, groups, attempt):
        return final
    error: Exception | None = None
    index = b""
    try:
        wanted = [part for owned in slices if owned.spec.cut or groups.tp.rank == 0 for part in logical_slices(owned, to_write=True)]
        if wanted:
            entry = write_file(temporary / f"rank_{groups.rank:05d}.safetensors", wanted, on_slice=lambda: reached("slice"))
            index = json.dumps(entry.to_json(), separators=(",", ":")).encode()
    except Exception as caught:  # told to the others below; a rank that left here would leave them waiting
        error = _explained(caught, temporary)
    try:
        raise_together(error, world, doing=f"checkpoint {final.name} was not saved")
        error = None
        reached("before_manifest")
        indexes = gather_bytes(index, world)
        try:
            if groups.rank == 0:
                files = [FileEntry.from_json(json.loads(text)) for text in indexes if text]
                write_manifest(temporary, build_manifest(state, attempt, files).to_bytes())
        except Exception as caught:
            error = _explained(caught, temporary)
        raise_together(error, world, doing=f"checkpoint {final.name} was not saved")
        reached("before_rename")
        try:
            if groups.rank == 0:
                temporary.rename(final)
                reached("before_parent_fsync")
                fsync_folder(final.parent)
        except OSError as caught:
            error = _explained(caught, final)
        if groups.rank != 0:
            reached("before_parent_fsync")
        raise_together(error, world, doing=f"checkpoint {final.name} was not saved")
    except CheckpointError:
        if groups.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def _prepare(final: Path, temporary: Path, groups: ProcessGroups, attempt: int) -> bool:
    """Make the empty folder to write into; True where this attempt has saved this step already."""
    error: Exception | None = None
    done = False
    if groups.rank == 0:
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
            if final.exists():
                found = inspect_checkpoint(final)
                done = not isinstance(found, str) and found.attempt == attempt
                if not done:
                    quarantine(final)
            if not done:
                if temporary.exists():
                    shutil.rmtree(temporary)
                temporary.mkdir()
        except OSError as caught:
            error = _explained(caught, temporary)
    raise_together(error, groups.world, doing=f"checkpoint {final.name} was not saved")
    return bool(broadcast_json(done, groups.world))


def write_file(path: Path, slices: list[LogicalSlice], *, on_slice: Callable[[], None] = lambda: None) -> FileEntry:
    """Stream the slices into a durable safetensors file: states in order, names in order. Memory: one chunk, where on a GPU."""
    slices = sorted(slices, key=lambda part: (_rank_of_state(part.state), part.block.name, part.block.start, part.first))
    blocks = {part.block: number for number, part in enumerate({part.block: part for part in slices}.values())}
    states = sorted({part.state for part in slices}, key=_rank_of_state)
    counts = np.array([part.last - part.first for part in slices], dtype=np.int64)
    ends = np.cumsum(counts * ITEM_BYTES)
    header = _header(slices, (ends - counts * ITEM_BYTES).tolist(), ends.tolist())
    with open(path, "wb", buffering=0) as file:
        _write_all(file, memoryview(header))
        sums = _Checksums()
        for part in slices:
            assert part.view.dtype == torch.float32, f"{part.block.name} {part.state} is {part.view.dtype}"
            for chunk in part.view.detach().split(BLOCK_BYTES // ITEM_BYTES):
                data = memoryview(chunk.cpu().numpy()).cast("B")
                sums.update(data)
                _write_all(file, data)
            on_slice()
        os.fsync(file.fileno())
    return FileEntry(
        name=path.name,
        data_start=len(header),
        data_bytes=int(ends[-1]),
        header_checksum=xxhash.xxh3_64_hexdigest(header),
        checksums=tuple(sums.finish()),
        blocks=tuple(blocks),
        states=tuple(states),
        block=np.array([blocks[part.block] for part in slices], dtype=np.int64),
        state=np.array([states.index(part.state) for part in slices], dtype=np.int64),
        first=np.array([part.first for part in slices], dtype=np.int64),
        last=np.array([part.last for part in slices], dtype=np.int64),
        offset=ends - counts * ITEM_BYTES,
    )


def _rank_of_state(state: str) -> tuple[int, str]:
    return (STATES.index(state) if state in STATES else len(STATES), state)


def _header(slices: list[LogicalSlice], starts: list[int], ends: list[int]) -> bytes:
    """A safetensors header; a slice that is a whole block keeps the block's shape, so that other tools see the tensor."""
    entries: dict[str, object] = {}
    for part, start, end in zip(slices, starts, ends):
        whole = part.last - part.first == part.block.numel
        shape = list(part.block.shape) if whole else [part.last - part.first]
        entries[_label(part.block, part.state, part.first)] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    return framed(entries)


def framed(entries: Mapping[str, object]) -> bytes:
    """What a safetensors file begins with: the length of its header, and the header, padded to 8 bytes."""
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _label(block: Block, state: str, first: int) -> str:
    return f"{block.name}/{state}@{','.join(map(str, block.start))}+{first}"


class _Checksums:
    """xxh3_64 of each BLOCK_BYTES of a stream."""

    def __init__(self) -> None:
        self._hash, self._filled = xxhash.xxh3_64(), 0
        self._done: list[str] = []

    def update(self, data: memoryview) -> None:
        while len(data):
            part = data[: BLOCK_BYTES - self._filled]
            self._hash.update(part)
            self._filled += len(part)
            data = data[len(part) :]
            if self._filled == BLOCK_BYTES:
                self._end()

    def _end(self) -> None:
        self._done.append(self._hash.hexdigest())
        self._hash, self._filled = xxhash.xxh3_64(), 0

    def finish(self) -> list[str]:
        if self._filled:
            self._end()
        return self._done


def _write_all(file: FileIO, data: memoryview) -> None:
    """A raw write may stop early; the next one then gives the reason."""
    while len(data):
        data = data[file.write(data) :]


def write_manifest(folder: Path, data: bytes) -> None:
    for name, content in ((MANIFEST, data), (MANIFEST_HASH, hash_line(data))):
        with open(folder / name, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    fsync_folder(folder)


def _explained(error: Exception, path: Path) -> Exception:
    if isinstance(error, OSError) and error.errno in _NO_SPACE:
        return CheckpointError(
            f"no space left for {error.filename or path} ({error.strerror}). Earlier checkpoints are intact; free some space, "
            "or lower checkpoint.keep_last, and start the same command again."
        )
    return error
