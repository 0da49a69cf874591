"""What a checkpoint folder says about itself: the run's state, every logical tensor, and where each part of it lies.

    step_00000100/manifest.json            this, as JSON
    step_00000100/manifest.json.sha256     its hash, as `sha256sum -c` reads it
    step_00000100/rank_00000.safetensors   the bytes: one file for each rank that owned something

A file's slices stand in columns, since there are ranks x parameters x states of them.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.errors import CheckpointError
from megatron_lite.checkpoint.slices import Block
from megatron_lite.model_config import ModelConfig

FORMAT = "megatron-lite checkpoint"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
MANIFEST_HASH = "manifest.json.sha256"
BLOCK_BYTES = 1 << 24  # of a file's data area, each with its own checksum
ITEM_BYTES = 4  # every state is stored in fp32
REMEDY = "Restore the file from a copy, or go on from an older good checkpoint with checkpoint.allow_fallback=true."


@dataclass(frozen=True)
class RunState:
    """The few numbers that a run is besides its tensors; nothing here knows a layout. JSON values only."""

    step: int  # updates done
    samples: int  # rows consumed
    tokens: int  # targets consumed
    seed: int
    sequence_length: int
    global_batch_size: int  # sequences
    model: dict[str, Any]  # the resolved model section
    tokenizer_hash: str
    data_identity: Any  # hashes of the sources
    phases: list[Any] = field(default_factory=list)  # of the mixture: from which sample which weights
    optimizer: dict[str, float] = field(default_factory=dict)  # scalars, such as the number of updates

    def identity(self) -> dict[str, Any]:
        """What may not change within a run. Keys of the model that came after the checkpoint was written have the defaults that
        are what was done before."""
        names = ("tokenizer_hash", "data_identity", "seed", "sequence_length")
        model = _over(ModelConfig().model_dump(mode="json"), _plain(self.model))
        return {"model": model, **{name: _plain(getattr(self, name)) for name in names}}


@dataclass(frozen=True)
class TensorEntry:
    """A logical tensor: its global shape, and which states of it are stored."""

    shape: tuple[int, ...]
    states: tuple[str, ...]
    dtype: str = "F32"


@dataclass(frozen=True)
class FileEntry:
    """One file: its checksums, and its slices in the order of their bytes."""

    name: str
    data_start: int  # bytes before the data area: the safetensors header
    data_bytes: int
    header_checksum: str  # xxh3_64 in hex
    checksums: tuple[str, ...]  # of each BLOCK_BYTES of the data area
    blocks: tuple[Block, ...]
    states: tuple[str, ...]
    block: np.ndarray  # int64[slices]: number in `blocks`
    state: np.ndarray  # int64[slices]: number in `states`
    first: np.ndarray  # int64[slices]: flat range within the block
    last: np.ndarray
    offset: np.ndarray  # int64[slices]: byte in the data area

    def to_json(self) -> dict[str, Any]:
        columns = {name: getattr(self, name).tolist() for name in _COLUMNS}
        blocks = [[block.name, block.global_shape, block.start, block.shape] for block in self.blocks]
        kept = ("name", "data_start", "data_bytes", "header_checksum", "checksums", "states")
        return {**{name: getattr(self, name) for name in kept}, "blocks": blocks, "slices": columns}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> FileEntry:
        blocks = tuple(Block(name, tuple(full), tuple(start), tuple(shape)) for name, full, start, shape in value["blocks"])
        columns = {name: np.array(column, dtype=np.int64) for name, column in value["slices"].items()}
        plain = {name: value[name] for name in ("name", "data_start", "data_bytes", "header_checksum")}
        known: dict[str, Any] = {**plain, **columns}
        return cls(**known, checksums=tuple(value["checksums"]), states=tuple(value["states"]), blocks=blocks)


_COLUMNS = ("block", "state", "first", "last", "offset")


@dataclass(frozen=True)
class Manifest:
    """All that is known of a checkpoint without opening its tensor files."""

    state: RunState
    attempt: int
    tensors: dict[str, TensorEntry]
    files: tuple[FileEntry, ...]

    def num_bytes(self) -> int:
        return sum(file.data_start + file.data_bytes for file in self.files)

    def to_bytes(self) -> bytes:
        value = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "state": asdict(self.state),
            "attempt": self.attempt,
            "block_bytes": BLOCK_BYTES,
            "tensors": {name: asdict(entry) for name, entry in self.tensors.items()},
            "files": [file.to_json() for file in self.files],
        }
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def build_manifest(state: RunState, attempt: int, files: list[FileEntry]) -> Manifest:
    """Put the ranks' files together. Raises AssertionError unless every element is covered exactly once."""
    shapes: dict[str, tuple[int, ...]] = {}
    states: dict[str, set[str]] = {}
    for file in files:
        for block in file.blocks:
            assert shapes.setdefault(block.name, block.global_shape) == block.global_shape, f"{block.name} has two shapes"
        for number, name in np.unique(np.stack([file.block, file.state]), axis=1).T.tolist():
            states.setdefault(file.blocks[number].name, set()).add(file.states[name])
    check_coverage(files)
    tensors = {name: TensorEntry(shapes[name], tuple(sorted(states[name]))) for name in sorted(states)}
    return Manifest(state, attempt, tensors, tuple(files))


def check_coverage(files: list[FileEntry]) -> None:
    """Raises AssertionError unless the slices hold every element of every (tensor, state) exactly once."""
    numbers: dict[tuple[Block, str], int] = {}
    rows = []
    for file in files:
        pairs, inverse = np.unique(np.stack([file.block, file.state]), axis=1, return_inverse=True)
        ids = [numbers.setdefault((file.blocks[block], file.states[state]), len(numbers)) for block, state in pairs.T.tolist()]
        rows.append(np.stack([np.array(ids, dtype=np.int64)[inverse.reshape(-1)], file.first, file.last]))
    table = np.concatenate(rows, axis=1) if rows else np.zeros((3, 0), dtype=np.int64)
    key, first, last = table[:, np.lexsort((table[1], table[0]))]
    tiles: dict[tuple[str, str], list[Block]] = {}
    starts = np.flatnonzero(np.diff(key, prepend=-1))
    joined = first[1:] == last[:-1]
    joined[starts[1:] - 1] = True
    assert joined.all(), f"{_named(numbers, int(key[1:][~joined][0]))}: slices overlap or leave a gap"
    ends = np.append(starts[1:], len(key)) - 1
    for (block, state), low, high in zip(numbers, first[starts].tolist(), last[ends].tolist()):
        assert (low, high) == (0, block.numel), f"{block.name} {state}: [{low}, {high}) of {block.numel} elements of a block"
        tiles.setdefault((block.name, state), []).append(block)
    for (name, state), blocks in tiles.items():
        full = Block.whole(name, blocks[0].global_shape)
        assert sum(block.numel for block in blocks) == full.numel, f"{name} {state}: blocks do not add up to {full.shape}"
        assert len(blocks) == 1 or _disjoint(blocks), f"{name} {state}: blocks overlap"


def _disjoint(blocks: list[Block]) -> bool:
    edges = np.array([(b.row, b.row + b.numel // b.width, b.column, b.column + b.width) for b in blocks])
    top, bottom, left, right = (edges[:, column] for column in range(4))
    meets = (top[:, None] < bottom) & (top < bottom[:, None]) & (left[:, None] < right) & (left < right[:, None])
    return int(meets.sum()) == len(blocks)


def _named(numbers: dict[tuple[Block, str], int], number: int) -> str:
    block, state = list(numbers)[number]
    return f"{block.name} {state}"


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint folder. Raises CheckpointError where it is missing, damaged or of another format."""
    path = Path(path)
    try:
        data, line = (path / MANIFEST).read_bytes(), (path / MANIFEST_HASH).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} is not a complete checkpoint: can't read {error.filename} ({error.strerror}). {REMEDY}") from None
    if line != hash_line(data):
        raise CheckpointError(f"{path / MANIFEST} (bytes 0 to {len(data):,}) does not match {MANIFEST_HASH}: it is damaged. {REMEDY}")
    value = json.loads(data)
    if value.get("format") != FORMAT or value.get("format_version") != FORMAT_VERSION:
        found = f"{value.get('format')!r} version {value.get('format_version')!r}"
        raise CheckpointError(
            f"{path} is of format {found}; this program reads {FORMAT!r} version {FORMAT_VERSION}. Use the one that wrote it."
        )
    tensors = {name: TensorEntry(tuple(e["shape"]), tuple(e["states"]), e["dtype"]) for name, e in value["tensors"].items()}
    return Manifest(state_from_json(value["state"]), value["attempt"], tensors, tuple(FileEntry.from_json(file) for file in value["files"]))


def state_from_json(value: dict[str, Any]) -> RunState:
    assert set(value) == {item.name for item in fields(RunState)}, sorted(value)
    return RunState(**value)


def hash_line(data: bytes) -> bytes:
    """The line that `sha256sum manifest.json` prints."""
    return f"{hashlib.sha256(data).hexdigest()}  {MANIFEST}\n".encode()


def _plain(value: Any) -> Any:
    """As it reads back from JSON: tuples are lists, keys are strings."""
    return json.loads(json.dumps(value))


def _over(base: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """`base` with the values in the place of its own, mapping by mapping."""
    both = {key: _over(old, values[key]) for key, old in base.items() if isinstance(old, dict) and isinstance(values.get(key), dict)}
    return {**base, **values, **both}
