"""Weights out of a Hugging Face folder into whatever this rank owns: of each tensor only the rows and columns it needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from data_pipeline.errors import CheckpointError
from megatron_lite.checkpoint.agree import raise_together
from megatron_lite.checkpoint.huggingface.folder import check_tensors, open_tensors, read_model
from megatron_lite.checkpoint.huggingface.tensors import Place
from megatron_lite.checkpoint.slices import LogicalSlice, OwnedSlice, logical_slices, padding, window
from megatron_lite.parallel.groups import ProcessGroups

_AT_ONCE = 1 << 24  # elements that are converted at a time


def load_huggingface(folder: Path, slices: Sequence[OwnedSlice], groups: ProcessGroups) -> None:
    """Fill every rank's master weights, in fp32 whatever the files' type; optimizer states stay as they are. Collective over
    the world. Raises CheckpointError on every rank: for names and shapes before anything is written, for files that can't be
    read."""
    error: Exception | None = None
    try:
        folder = Path(folder)
        family, config = read_model(folder)
        stored = family.named(open_tensors(folder))
        check_tensors(folder, stored, family, config)
        places = family.places(config)
        masters = [owned for owned in slices if owned.state == "master"]
        targets = [part for owned in masters for part in logical_slices(owned, to_write=False)]
        _check_targets(folder, {ours: place.shape for ours, place in places.items()}, targets)
        with ExitStack() as stack:
            files: dict[Path, Any] = {}
            for part in targets:
                place = places[part.block.name]
                source = stored[place.theirs]
                if source.file not in files:
                    files[source.file] = stack.enter_context(safe_open(source.file, framework="pt"))
                _fill(part, place, files[source.file].get_slice(source.name))
        for owned in masters:
            for view in padding(owned):
                view.zero_()
    except (OSError, SafetensorError) as caught:
        error = CheckpointError(f"a file of {folder} can't be read: {caught}")
    except Exception as caught:
        error = caught
    raise_together(error, groups.world, doing=f"{folder} can't be loaded")


def _check_targets(folder: Path, shapes: Mapping[str, tuple[int, ...]], targets: Sequence[LogicalSlice]) -> None:
    """The model that was built is the one that the folder holds."""
    wrong = {
        f"{part.block.name}: {list(shapes.get(part.block.name, ()))} instead of {list(part.block.global_shape)}"
        for part in targets
        if shapes.get(part.block.name) != part.block.global_shape
    }
    if wrong:
        raise CheckpointError(f"{folder} holds another model: {', '.join(sorted(wrong)[:12])}")


def _fill(part: LogicalSlice, place: Place, source: Any) -> None:
    """Copy the slice's rectangles out of a stored matrix (a vector is one row), some rows at a time."""
    one_row, above = len(part.block.shape) < 2, place.first_row
    for top, bottom, left, right in part.block.rectangles(part.first, part.last):
        target = window(part.view, part.block, part.first, (top, bottom, left, right))
        rows = max(1, _AT_ONCE // (right - left))
        for row in range(top, bottom, rows):
            end = min(row + rows, bottom)
            values: torch.Tensor
            if one_row:
                values = source[above + left : above + right]
            elif place.transposed:
                values = source[left:right, above + row : above + end].t()
            else:
                values = source[above + row : above + end, left:right]
            target[row - top : end - top].copy_(values)
