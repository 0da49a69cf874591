"""A Hugging Face model folder, opened: its config, and which file holds which tensor. Without torch; of files mostly headers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from data_pipeline.errors import CheckpointError, ConfigError, Fault
from megatron_lite.checkpoint.huggingface.catalogue import FAMILIES
from megatron_lite.checkpoint.huggingface.families import Family, from_tree
from megatron_lite.model_config import ModelConfig

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_READABLE = ("F32", "BF16", "F16")
_AT_ONCE = 1 << 22  # bytes


@dataclass(frozen=True)
class Stored:
    """One tensor as a file holds it."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


def read_model(folder: Path) -> tuple[Family, ModelConfig]:
    """The architecture and the model section that the folder's config.json asks for. Raises ConfigError for what we can't be,
    CheckpointError where files are needed to tell and can't be read."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ConfigError(
            [
                Fault(
                    "hf:DIR", str(folder), "a folder with a config.json", "download a model first: `hf download OWNER/NAME --local-dir DIR`"
                )
            ]
        )
    family, config = from_tree(FAMILIES, _json(path), where=str(path))
    if family.head_as_stored and config.tie_word_embeddings:
        different = _no_copies(family.named(open_tensors(folder)), family, config)
        config = config.model_copy(update={"tie_word_embeddings": not any(map(family.is_head, different))})
    return family, config


def open_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of the folder by their name. Raises CheckpointError naming a file that is missing, cut off or a pickle."""
    found: dict[str, Stored] = {}
    for file, promised in _files(Path(folder)).items():
        held = _header(file)
        absent = sorted(promised - held.keys())
        if absent:
            raise CheckpointError(f"{file} does not hold {', '.join(absent[:5])}, which {INDEX} says it does: download it again")
        twice = sorted(held.keys() & found.keys())
        if twice:
            raise CheckpointError(f"{twice[0]} stands in {found[twice[0]].file.name} and in {file.name}: {folder} is a mix of two models")
        found.update(held)
    return found


def check_tensors(folder: Path, stored: Mapping[str, Stored], family: Family, config: ModelConfig) -> None:
    """Raises CheckpointError naming every tensor that is missing, unexpected, of another shape or of a type that we don't read."""
    stored = family.named(stored)
    wanted = {place.theirs: place.stored_shape for place in family.places(config).values()}
    missing = [name for name in wanted if name not in stored]
    unexpected = [name for name in stored if name not in wanted and not family.is_ignored(name)]
    unexpected = [name for name in unexpected if family.original_of(name, config) is None]
    nonzero = [name for name in unexpected if re.fullmatch(family.zeros, name) and not _is_zero(stored[name])]
    unexpected = [name for name in unexpected if not re.fullmatch(family.zeros, name)]
    shared = [name for name in wanted if name in stored]
    shapes = [
        f"{name}: {list(stored[name].shape)} instead of {list(wanted[name])}" for name in shared if stored[name].shape != wanted[name]
    ]
    dtypes = [f"{name}: {stored[name].dtype}" for name in shared if stored[name].dtype not in _READABLE]
    faults = [
        f"{what}: {', '.join(names[:12])}{f' and {len(names) - 12} more' if len(names) > 12 else ''}"
        for what, names in (
            ("missing", missing),
            ("not part of the model", unexpected),
            ("not all zero, which this program has nothing for", nonzero),
            ("of another shape than its config.json says", shapes),
            (f"of a type other than {', '.join(_READABLE)}", dtypes),
        )
        if names
    ]
    for name, original in _no_copies(stored, family, config).items():
        fix = "set tie_word_embeddings false in config.json" if family.is_head(name) else "this program has one for both"
        faults.append(f"{name} is no copy of {original}: {fix}")
    if faults:
        raise CheckpointError("\n".join([f"{folder} does not hold a {family.architecture} of its config.json:", *faults]))


def _files(folder: Path) -> dict[Path, set[str]]:
    """The safetensors files, each with the tensors that the index promises in it."""
    if (folder / SINGLE).is_file():
        return {folder / SINGLE: set()}
    if not (folder / INDEX).is_file():
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        if pickles:
            raise CheckpointError(
                f"{folder} has its weights as {pickles[0]}, a pickle, which can run anything: load it with transformers where you trust it, "
                "and save_pretrained() writes safetensors"
            )
        raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}: download it again")
    weight_map = _json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) and Path(name).name == name for name in weight_map.values()):
        raise CheckpointError(f"{folder / INDEX} has no weight_map of file names beside it: download it again")
    files: dict[Path, set[str]] = {}
    for name, file in weight_map.items():
        files.setdefault(folder / file, set()).add(name)
    return files


def _header(file: Path) -> dict[str, Stored]:
    try:
        with safe_open(file, framework="numpy") as opened:
            parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
            return {name: Stored(file, name, tuple(part.get_shape()), part.get_dtype()) for name, part in parts.items()}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} can't be read ({error}): it is missing or was cut off; download it again") from None


def _no_copies(stored: Mapping[str, Stored], family: Family, config: ModelConfig) -> dict[str, str]:
    """Tensors that must be a copy of another that is there, and are not; each with that other."""
    pairs = {name: original for name in stored if (original := family.original_of(name, config)) is not None and original in stored}
    return {name: original for name, original in pairs.items() if not _equal(stored[name], stored[original])}


def _equal(one: Stored, other: Stored) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return all(part == its for part, its in zip(_bytes(one), _bytes(other), strict=True))


def _is_zero(stored: Stored) -> bool:
    return not any(part.strip(b"\0") for part in _bytes(stored))


def _bytes(stored: Stored) -> Iterator[bytes]:
    """A tensor's bytes, some at a time."""
    with open(stored.file, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        begin, end = json.loads(file.read(length))[stored.name]["data_offsets"]
        file.seek(8 + length + begin)
        for at in range(begin, end, _AT_ONCE):
            yield file.read(min(_AT_ONCE, end - at))


def _json(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} can't be read: {error}") from None
    if not isinstance(tree, dict):
        raise CheckpointError(f"{path} is no JSON object")
    return tree
