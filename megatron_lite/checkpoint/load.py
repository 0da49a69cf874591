"""Loading is resharding: what this rank needs is looked up in what was written, whatever layout wrote it.

Of a file only the checksummed blocks that hold something needed are read, each into a small buffer, verified, and copied from
there: memory stays at a few blocks, and the bytes that were verified are the bytes that are used.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from data_pipeline.errors import CheckpointError
from megatron_lite.checkpoint.agree import broadcast_json, gather_json, raise_together
from megatron_lite.checkpoint.manifest import BLOCK_BYTES, ITEM_BYTES, REMEDY, FileEntry, Manifest, read_manifest
from megatron_lite.checkpoint.plan import Job, Plan, make_plan
from megatron_lite.checkpoint.slices import Block, LogicalSlice, OwnedSlice, logical_slices, overlap, padding, window
from megatron_lite.parallel.groups import ProcessGroups

_BLOCKS_AT_ONCE = 4  # a thread takes this many neighbouring blocks of a file
_BATCH_BYTES = 1 << 28  # whole tensors that load_logical holds at once


def load_into(path: Path, slices: Sequence[OwnedSlice], groups: ProcessGroups, *, weights_only: bool = False) -> Manifest:
    """Fill every slice of every rank from a checkpoint, and return its manifest. Collective over the world.

    `weights_only` fills master weights and leaves optimizer states as they are. Raises CheckpointError on every rank: for
    missing and unexpected names and for other shapes before anything is written; for damaged bytes, naming file and range.
    """
    wanted = [owned for owned in slices if owned.state == "master" or not weights_only]
    targets = [part for owned in wanted for part in logical_slices(owned, to_write=False)]
    manifest: Manifest | None = None
    error: Exception | None = None
    try:
        manifest = read_manifest(path)
    except Exception as caught:
        error = caught
    doing = f"checkpoint {Path(path).name} can't be loaded"
    raise_together(error, groups.world, doing=doing)
    assert manifest is not None
    _check_names(manifest, wanted, groups, weights_only=weights_only, path=path)
    try:
        execute(path, make_plan(manifest, targets))
        for owned in wanted:
            for view in padding(owned):
                view.zero_()
    except Exception as caught:
        error = caught
    raise_together(error, groups.world, doing=doing)
    return manifest


def load_logical(path: Path, names: Iterable[str] | None = None, state: str = "master") -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole fp32 tensor) one by one, sorted by name. Holds 256 MiB at once, or one tensor where that is larger.

    Raises CheckpointError for names that are not stored and for damaged bytes.
    """
    manifest = read_manifest(path)
    asked = sorted(manifest.tensors if names is None else set(names))
    absent = [name for name in asked if name not in manifest.tensors or state not in manifest.tensors[name].states]
    if absent:
        raise CheckpointError(f"{path} does not store {state} of {_listed(absent)}")
    batch: dict[str, torch.Tensor] = {}
    for number, name in enumerate(asked):
        batch[name] = torch.empty(manifest.tensors[name].shape, dtype=torch.float32)
        if number + 1 == len(asked) or sum(tensor.numel() for tensor in batch.values()) * ITEM_BYTES >= _BATCH_BYTES:
            whole = [(Block.whole(key, tensor.shape), tensor) for key, tensor in batch.items()]
            execute(path, make_plan(manifest, [LogicalSlice(block, state, 0, block.numel, tensor.view(-1)) for block, tensor in whole]))
            del whole
            while batch:
                key = next(iter(batch))
                yield key, batch.pop(key)


def verify_checkpoint(path: Path, *, share: int = 0, shares: int = 1) -> Manifest:
    """Read every byte of a checkpoint, or of every so-manieth file, and check it. Raises CheckpointError naming what is damaged."""
    manifest = read_manifest(path)
    for entry in manifest.files[share::shares]:
        execute(path, Plan([(entry, {number: [] for number in range(len(entry.checksums))})]))
    return manifest


def _check_names(manifest: Manifest, wanted: Sequence[OwnedSlice], groups: ProcessGroups, *, weights_only: bool, path: Path) -> None:
    """Compare what all ranks need with what is stored; every rank raises the same."""
    mine = {f"{piece.name}|{owned.state}": list(piece.global_shape) for owned in wanted for piece in owned.spec.pieces}
    needed: dict[str, list[int]] = {}
    for each in gather_json(mine, groups.world):
        needed.update(each)
    faults: list[str] = []
    if groups.rank == 0:
        stored = {
            f"{name}|{state}": list(entry.shape)
            for name, entry in manifest.tensors.items()
            for state in entry.states
            if state == "master" or not weights_only
        }
        missing, unexpected = sorted(set(needed) - set(stored)), sorted(set(stored) - set(needed))
        other = [
            f"{key}: stored {stored[key]}, wanted {needed[key]}" for key in sorted(set(needed) & set(stored)) if stored[key] != needed[key]
        ]
        faults += [f"missing in the checkpoint: {_listed(missing)}"] if missing else []
        faults += [f"not in this model: {_listed(unexpected)}"] if unexpected else []
        faults += [f"of another shape: {_listed(other)}"] if other else []
    faults = broadcast_json(faults, groups.world)
    if faults:
        what = "\n".join(["it is of another model:", *faults, "Use the model section that it was trained with (config.yaml of its run)."])
        raise CheckpointError(f"checkpoint {path} can't be loaded: {what}")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")


# ------------------------------------------------------------------------------------------------- reading


@dataclass
class _Reader:
    """Reads and verifies blocks of one file, and copies out of them. Threads share it."""

    path: Path
    entry: FileEntry

    def check_header(self) -> None:
        """The file's size and its header, which nothing but other programs reads."""
        try:
            with open(self.path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                header = file.read(self.entry.data_start)
        except OSError as error:
            raise CheckpointError(f"{self.path} can't be read ({error.strerror}). {REMEDY}") from None
        if size != self.entry.data_start + self.entry.data_bytes:
            wanted = self.entry.data_start + self.entry.data_bytes
            raise CheckpointError(f"{self.path} has {size:,} bytes instead of {wanted:,}: it was cut off or written to. {REMEDY}")
        if xxhash.xxh3_64_hexdigest(header) != self.entry.header_checksum:
            raise CheckpointError(
                f"{self.path} is damaged: its header (bytes 0 to {len(header) - 1:,}) does not match its checksum. {REMEDY}"
            )

    def run(self, blocks: dict[int, list[Job]]) -> None:
        """Read these blocks and do the copies that need them."""
        buffer = memoryview(bytearray(BLOCK_BYTES))
        with open(self.path, "rb", buffering=0) as file:
            for number, jobs in blocks.items():
                start = number * BLOCK_BYTES
                data = buffer[: min(BLOCK_BYTES, self.entry.data_bytes - start)]
                self._fill(file.fileno(), data, self.entry.data_start + start)
                if xxhash.xxh3_64_hexdigest(data) != self.entry.checksums[number]:
                    first = self.entry.data_start + start
                    where = f"bytes {first:,} to {first + len(data) - 1:,}"
                    raise CheckpointError(f"{self.path} is damaged: {where} do not match their checksum. {REMEDY}")
                values = torch.frombuffer(data, dtype=torch.float32)
                for job in jobs:
                    _copy(job, values, start // ITEM_BYTES)

    def _fill(self, descriptor: int, data: memoryview, position: int) -> None:
        while len(data):
            count = os.preadv(descriptor, [data], position)
            if count == 0:
                raise CheckpointError(f"{self.path} ends at byte {position:,}: it was cut off while being read. {REMEDY}")
            data, position = data[count:], position + count


def _copy(job: Job, values: torch.Tensor, at: int) -> None:
    """Copy what job wants of `values`, the file's elements from number `at` on."""
    source, target = job.source, job.target
    begin = max(source.offset, at)
    end = min(source.offset + source.last - source.first, at + len(values))
    first = source.first + begin - source.offset  # in the source's block
    part = source.block.rectangles(first, source.first + end - source.offset)
    held = values[begin - at : end - at]
    for rectangle in overlap(part, target.block.rectangles(target.first, target.last)):
        window(target.view, target.block, target.first, rectangle).copy_(window(held, source.block, first, rectangle))


def execute(path: Path, plan: Plan) -> None:
    """Read what the plan needs, a few blocks a thread."""
    work = []
    for entry, blocks in plan.files:
        reader = _Reader(Path(path) / entry.name, entry)
        reader.check_header()
        numbers = sorted(blocks)
        for at in range(0, len(numbers), _BLOCKS_AT_ONCE):
            work.append((reader, {number: blocks[number] for number in numbers[at : at + _BLOCKS_AT_ONCE]}))
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        for done in [pool.submit(reader.run, blocks) for reader, blocks in work]:
            done.result()
