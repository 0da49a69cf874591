"""Weights of a checkpoint into safetensors files of a Hugging Face folder, streamed: memory stays at a few blocks however
large the model and whatever layout wrote it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from data_pipeline.errors import CheckpointError
from megatron_lite.checkpoint.huggingface.folder import INDEX, SINGLE
from megatron_lite.checkpoint.huggingface.tensors import Place
from megatron_lite.checkpoint.load import execute
from megatron_lite.checkpoint.manifest import Manifest
from megatron_lite.checkpoint.plan import Index, make_plan
from megatron_lite.checkpoint.save import framed
from megatron_lite.checkpoint.slices import Block, LogicalSlice

DTYPES = {"fp32": (torch.float32, "F32"), "bf16": (torch.bfloat16, "BF16"), "fp16": (torch.float16, "F16")}
CHUNK_ELEMENTS = 1 << 23  # 32 MiB of fp32 at once


@dataclass(frozen=True)
class File:
    """A safetensors file to be: its tensors in order, by their names."""

    name: str
    shapes: Mapping[str, tuple[int, ...]]


def export_weights(
    checkpoint: Path,
    manifest: Manifest,
    folder: Path,
    places: Mapping[str, Place],
    *,
    dtype: str,
    max_file_bytes: int,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> list[str]:
    """Write the master weights where they lie in theirs, in the order of `places`; the names of the files. A matrix that theirs
    has the other way round stands whole in memory for a while.

    Raises CheckpointError for names that the checkpoint has not, damaged bytes, and numbers that `dtype` can't hold.
    """
    _check_names(checkpoint, manifest, places)
    item = DTYPES[dtype][0].itemsize
    shapes = {place.theirs: place.stored_shape for place in places.values()}
    turned = {place.theirs for place in places.values() if place.transposed}
    files = share_out(shapes, item_bytes=item, max_file_bytes=max_file_bytes)
    read = read_in_order(checkpoint, manifest, list(places), chunk_elements=chunk_elements)
    parts = _in_their_order(read, places, turned, dtype)
    for file in files:
        with open(folder / file.name, "wb") as out:
            out.write(header(file.shapes, dtype))
            for theirs, shape in file.shapes.items():
                left = math.prod(shape)
                while left:
                    ours, values = next(parts)
                    assert places[ours].theirs == theirs, (ours, theirs)
                    out.write(values.view(torch.uint8).numpy().data)
                    left -= values.numel()
                    del values  # before the next part is made
    if len(files) > 1:
        total = sum(math.prod(shape) for shape in shapes.values())
        weight_map = {name: file.name for file in files for name in file.shapes}
        tree = {"metadata": {"total_size": total * item, "total_parameters": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
    return [file.name for file in files]


def _in_their_order(
    parts: Iterator[tuple[str, torch.Tensor]], places: Mapping[str, Place], turned: set[str], dtype: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """The parts in `dtype`, those of a matrix that is to be turned put together before."""
    held: list[torch.Tensor] = []
    for ours, part in parts:
        place = places[ours]
        if place.theirs not in turned:
            yield ours, _converted(part, dtype, ours)
            continue
        held.append(_converted(part, dtype, ours).clone())
        if sum(each.numel() for each in held) == math.prod(place.stored_shape):
            yield ours, torch.cat(held).view(place.stored_shape[::-1]).t().reshape(-1)
            held = []


def read_in_order(
    checkpoint: Path, manifest: Manifest, names: Sequence[str], *, chunk_elements: int = CHUNK_ELEMENTS
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, flat fp32 part) of master weights, tensor after tensor and each from its first element to its last. A part is
    good until the next is asked for."""
    index, buffer = Index(manifest), torch.empty(chunk_elements)
    for batch in _batches({name: math.prod(manifest.tensors[name].shape) for name in names}, chunk_elements):
        parts, at = [], 0
        for name, first, last in batch:
            block = Block.whole(name, manifest.tensors[name].shape)
            parts.append(LogicalSlice(block, "master", first, last, buffer[at : at + last - first]))
            at += last - first
        execute(checkpoint, make_plan(manifest, parts, index=index))
        yield from ((part.block.name, part.view) for part in parts)


def _batches(lengths: Mapping[str, int], limit: int) -> Iterator[list[tuple[str, int, int]]]:
    """Runs of (name, first, last) of at most `limit` elements together: long tensors in parts, short ones several at a time."""
    batch: list[tuple[str, int, int]] = []
    room = limit
    for name, length in lengths.items():
        first = 0
        while first < length:
            last = min(length, first + room)
            batch.append((name, first, last))
            room -= last - first
            first = last
            if room == 0:
                yield batch
                batch, room = [], limit
    if batch:
        yield batch


def share_out(shapes: Mapping[str, tuple[int, ...]], *, item_bytes: int, max_file_bytes: int) -> list[File]:
    """Tensors into files of at most `max_file_bytes`, in order; a tensor larger than that has a file of its own."""
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    held = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * item_bytes
        if groups[-1] and held + size > max_file_bytes:
            groups.append({})
            held = 0
        groups[-1][name] = shape
        held += size
    if len(groups) == 1:
        return [File(SINGLE, groups[0])]
    return [File(f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors", group) for number, group in enumerate(groups)]


def header(shapes: Mapping[str, tuple[int, ...]], dtype: str) -> bytes:
    """What a safetensors file begins with, for tensors that lie one after the other."""
    item, name = DTYPES[dtype][0].itemsize, DTYPES[dtype][1]
    entries: dict[str, object] = {}
    at = 0
    for tensor, shape in shapes.items():
        end = at + math.prod(shape) * item
        entries[tensor] = {"dtype": name, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    return framed(entries)


def _converted(values: torch.Tensor, dtype: str, name: str) -> torch.Tensor:
    converted = values.to(DTYPES[dtype][0])
    if not bool(torch.isfinite(converted).all()):
        if bool(torch.isfinite(values).all()):
            raise CheckpointError(f"{name} has {values.abs().max().item():.4g} in it, which {dtype} can't hold: export as bf16 or fp32")
        raise CheckpointError(f"{name} has numbers in it that are not finite: export an older checkpoint")
    return converted


def _check_names(checkpoint: Path, manifest: Manifest, places: Mapping[str, Place]) -> None:
    missing = sorted(places.keys() - manifest.tensors.keys())
    unexpected = sorted(manifest.tensors.keys() - places.keys())
    other = [name for name, place in places.items() if name in manifest.tensors and manifest.tensors[name].shape != place.shape]
    faults = [
        f"{what} {', '.join(found[:12])}"
        for what, found in (("lacks", missing), ("has", unexpected), ("has other shapes of", other))
        if found
    ]
    if faults:
        raise CheckpointError(f"{checkpoint} is not of the model that it names: it {'; it '.join(faults)}")
