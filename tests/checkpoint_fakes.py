"""A model's worth of logical tensors, and engines that own it in every way that real ones do, without a process group."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_lite.checkpoint.manifest import FileEntry, Manifest, RunState, build_manifest
from megatron_lite.checkpoint.save import write_file, write_manifest
from megatron_lite.checkpoint.slices import STATES, OwnedSlice, logical_slices
from megatron_lite.parallel.shard_spec import Piece, ShardSpec

VOCABULARY, WIDTH, HEADS, HEAD_SIZE, KV_HEADS, FEED_FORWARD = 61, 24, 8, 6, 2, 40

SHAPES = {
    "embedding.weight": (VOCABULARY, WIDTH),
    "layers.0.attention.q.weight": (HEADS * HEAD_SIZE, WIDTH),
    "layers.0.attention.k.weight": (KV_HEADS * HEAD_SIZE, WIDTH),
    "layers.0.attention.v.weight": (KV_HEADS * HEAD_SIZE, WIDTH),
    "layers.0.attention.o.weight": (WIDTH, HEADS * HEAD_SIZE),
    "layers.0.mlp.gate.weight": (FEED_FORWARD, WIDTH),
    "layers.0.mlp.up.weight": (FEED_FORWARD, WIDTH),
    "layers.0.mlp.down.weight": (WIDTH, FEED_FORWARD),
    "layers.0.experts.weight": (6, 8, 5),
    "odd": (37,),
    "one": (1,),
    "scalar": (),
}


def logical_state(seed: int = 0) -> dict[tuple[str, str], torch.Tensor]:
    """Random values for every (name, state)."""
    generator = torch.Generator().manual_seed(seed)
    return {(name, state): torch.randn(shape, generator=generator) for name, shape in SHAPES.items() for state in STATES}


def specs(tp: int, rank: int) -> dict[str, ShardSpec]:
    """Local parameters of one tp rank: rows, columns, fused rows, heads shared by several ranks, a padded vocabulary, replicated."""

    def rows(name: str, offset: int = 0, padded: int | None = None) -> Piece:
        full = SHAPES[name]
        share = (padded or full[0]) // tp
        first, last = min(rank * share, full[0]), min((rank + 1) * share, full[0])
        return Piece(name, full, (first, *(0 for _ in full[1:])), (last - first, *full[1:]), offset)

    def columns(name: str) -> Piece:
        full = SHAPES[name]
        share = full[1] // tp
        return Piece(name, full, (0, rank * share, *(0 for _ in full[2:])), (full[0], share, *full[2:]))

    def fused(*names: str) -> ShardSpec:
        pieces: list[Piece] = []
        for name in names:
            pieces.append(rows(name, sum(piece.numel for piece in pieces)))
        return ShardSpec(tuple(pieces), (sum(piece.shape[0] for piece in pieces), WIDTH), cut=True)

    def same(name: str) -> ShardSpec:
        return ShardSpec((Piece(name, SHAPES[name], (0,) * len(SHAPES[name]), SHAPES[name]),), SHAPES[name], cut=False)

    padded = -(-VOCABULARY // tp) * tp
    down, o, experts = (columns(name) for name in ("layers.0.mlp.down.weight", "layers.0.attention.o.weight", "layers.0.experts.weight"))
    return {
        "embedding.weight": ShardSpec((rows("embedding.weight", padded=padded),), (padded // tp, WIDTH), cut=True),
        "qkv": fused(*(f"layers.0.attention.{part}.weight" for part in "qkv")),
        "o": ShardSpec((o,), o.shape, cut=True),
        "gate_up": fused("layers.0.mlp.gate.weight", "layers.0.mlp.up.weight"),
        "down": ShardSpec((down,), down.shape, cut=True),
        "experts": ShardSpec((experts,), experts.shape, cut=True),
        **{name: same(name) for name in ("odd", "one", "scalar")},
    }


@dataclass(frozen=True)
class Layout:
    """How a fake engine cuts: `whole` as plain data parallel, `flat` as ZeRO 1 and 2, `each` as ZeRO 3."""

    tp: int
    dp: int
    ownership: str

    def __str__(self) -> str:
        return f"tp{self.tp}-dp{self.dp}-{self.ownership}"

    def ranks(self) -> list[tuple[int, int]]:
        return [(dp_rank, tp_rank) for dp_rank in range(self.dp) for tp_rank in range(self.tp)]


def owned(layout: Layout, dp_rank: int, tp_rank: int, *, fill: float = float("nan")) -> list[OwnedSlice]:
    """What this rank owns, filled with NaN: whatever loading forgets is seen."""
    slices: list[OwnedSlice] = []
    local = specs(layout.tp, tp_rank)
    sizes = {name: math.prod(spec.local_shape) for name, spec in local.items()}
    flat = -(-sum(sizes.values()) // (2 * layout.dp)) * 2 * layout.dp  # ZeRO 1 and 2 pad the end of the group
    at = 0
    for name, spec in local.items():
        if layout.ownership == "flat":
            share = flat // layout.dp
            start, stop = (min(max(edge - at, 0), sizes[name]) for edge in (dp_rank * share, (dp_rank + 1) * share))
        else:
            share = -(-sizes[name] // layout.dp)  # ZeRO 3 pads each parameter; the last ranks may have padding only
            start, stop = (min(edge, sizes[name]) for edge in (dp_rank * share, (dp_rank + 1) * share))
        at += sizes[name]
        write = (start, stop)
        if layout.ownership == "whole":
            start, stop = 0, sizes[name]
        if start < stop:
            slices += [OwnedSlice(name, spec, state, start, stop, torch.full((stop - start,), fill), *write) for state in STATES]
    return slices


def fill(slices: list[OwnedSlice], values: dict[tuple[str, str], torch.Tensor]) -> None:
    """Put the logical values into the views, by indices spelled out one by one; padding becomes 0."""
    for part in slices:
        flat = torch.zeros(math.prod(part.spec.local_shape))
        for piece in part.spec.pieces:
            where = tuple(slice(start, start + size) for start, size in zip(piece.start, piece.shape))
            flat[piece.offset : piece.offset + piece.numel] = values[piece.name, part.state][where].reshape(-1)
        part.view.copy_(flat[part.start : part.stop])


def run_state(step: int = 1, **changes: object) -> RunState:
    known: dict[str, object] = {
        "step": step,
        "samples": 16 * step,
        "tokens": 256 * step,
        "seed": 1,
        "sequence_length": 16,
        "global_batch_size": 16,
    }
    known |= {"model": {"hidden_size": WIDTH}, "tokenizer_hash": "ab", "data_identity": ["cd"], "optimizer": {"step": float(step)}}
    return RunState(**(known | changes))  # type: ignore[arg-type]


def write_checkpoint(
    folder: Path, layout: Layout, values: dict[tuple[str, str], torch.Tensor], *, state: RunState | None = None
) -> Manifest:
    """A checkpoint as the ranks of this layout would write it, one after the other in this process."""
    folder.mkdir(parents=True)
    entries: list[FileEntry] = []
    for number, (dp_rank, tp_rank) in enumerate(layout.ranks()):
        slices = owned(layout, dp_rank, tp_rank)
        fill(slices, values)
        parts = [part for each in slices if each.spec.cut or tp_rank == 0 for part in logical_slices(each, to_write=True)]
        if parts:
            entries.append(write_file(folder / f"rank_{number:05d}.safetensors", parts))
    manifest = build_manifest(state or run_state(), 1, entries)
    write_manifest(folder, manifest.to_bytes())
    return manifest
