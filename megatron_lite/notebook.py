"""A trained model in a notebook: load the folder, write, score.

import megatron_lite
model = megatron_lite.load("runs/mine")
model.generate("A run is", temperature=0.7), model.logprobs("A run is a function.")
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from data_pipeline.errors import CheckpointError, ConfigError, DataError, Fault
from data_pipeline.schema import validate
from data_pipeline.storage import sha256_file
from data_pipeline.tokenizer.encode import Encoder
from data_pipeline.yaml_text import read_yaml
from megatron_lite.checkpoint.find import CheckpointInfo, checkpoint_at, newest_checkpoint
from megatron_lite.checkpoint.huggingface.folder import read_model
from megatron_lite.checkpoint.huggingface.load import load_huggingface
from megatron_lite.checkpoint.load import load_into
from megatron_lite.checkpoint.slices import model_slices
from megatron_lite.inference.text import LanguageModel
from megatron_lite.model_config import ModelConfig
from megatron_lite.models.build import build_model, ready_to_decode
from megatron_lite.models.decoder import Decoder
from megatron_lite.parallel.groups import ProcessGroups

TOKENIZER = "tokenizer.json"
IDS = "generation_config.json"  # as `transformers` has it: bos_token_id, eos_token_id


def load(path: str | Path, *, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32) -> LanguageModel:
    """A run's newest checkpoint, the checkpoint at `path`, or a Hugging Face folder, in one process; a GPU where there is one.

    It is laid out for decoding: to save its tensors, make them contiguous(). Raises ConfigError for what is none of these, CheckpointError
    for a damaged one, DataError where there is no tokenizer.
    """
    path = Path(path)
    groups = ProcessGroups.single()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    info = find_checkpoint(path, groups)
    if info is None:
        _, config = read_model(path)
        tokenizer = _of_folder(path)
        model = _empty(config, groups, device, dtype)
        load_huggingface(path, model_slices(model), groups)
    else:
        config = validate(ModelConfig, info.state.model, prefix=f"{info.path}: model")
        found = find_tokenizer(info.path, info.state.tokenizer_hash)
        if found is None:
            raise DataError(f"no {TOKENIZER} of {path} or of its data is the one that it was trained with: put it into the run folder")
        tokenizer = found
        model = _empty(config, groups, device, dtype)
        load_into(info.path, model_slices(model), groups, weights_only=True)
    return tokenizer.with_model(model, step=info.state.step if info is not None else None)


def find_checkpoint(path: Path, groups: ProcessGroups) -> CheckpointInfo | None:
    """The checkpoint at `path` or the newest of the run there; None for a Hugging Face folder."""
    if (path / "manifest.json").is_file():
        return checkpoint_at(path, groups)
    if (path / "config.json").is_file():
        return None
    if not (path / "config.yaml").is_file():
        raise ConfigError([Fault("path", str(path), "a run folder, one of its checkpoints, or a Hugging Face folder")])
    choice = newest_checkpoint(path / "checkpoints", groups)
    if choice is None:
        raise CheckpointError(f"{path} has no checkpoint yet: train it, or give a checkpoint folder")
    return choice.info


@dataclass(frozen=True)
class SavedTokenizer:
    """Where a tokenizer is, and the ids that stand around documents."""

    path: Path
    begin_id: int | None
    stop_ids: tuple[int, ...]

    def with_model(self, model: Decoder, *, step: int | None) -> LanguageModel:
        return LanguageModel(ready_to_decode(model), Encoder.open(self.path), self.begin_id, self.stop_ids, step)


def find_tokenizer(checkpoint: Path, tokenizer_hash: str) -> SavedTokenizer | None:
    """The tokenizer that a checkpoint was trained with: its run folder's, or that of the run's data. None where neither has it."""
    run = checkpoint.resolve().parent.parent
    for folder in (run, *_data_folders(run)):
        file = folder / TOKENIZER
        has_ids = (folder / IDS).is_file() or (folder / "manifest.json").is_file()
        if file.is_file() and has_ids and sha256_file(file) == tokenizer_hash:
            return _of_folder(folder)
    return None


def _data_folders(run: Path) -> list[Path]:
    """Dataset folders that the run's config names, from here and from where it was started."""
    try:
        data = read_yaml(run / "config.yaml")["data"]
        attempts = sorted((run / "attempts").glob("[0-9]*/environment.json"))
        started = Path(json.loads(attempts[-1].read_text(encoding="utf-8"))["cwd"]) if attempts else Path()
    except (ConfigError, KeyError, OSError, ValueError):
        return []
    named = [data.get("path"), *(source.get("path") for source in data.get("sources") or [])]
    return [base / path for path in named if path and "://" not in path for base in (Path(), started)]


def _of_folder(folder: Path) -> SavedTokenizer:
    """Of a run folder, a Hugging Face folder or a dataset."""
    path = folder / TOKENIZER
    if not path.is_file():
        raise DataError(f"{folder} has no {TOKENIZER}: text can't be encoded without it")
    if (folder / "manifest.json").is_file():  # a dataset
        facts = _json(folder / "manifest.json")["tokenizer"]
        return SavedTokenizer(path, facts["eod_id"] if facts["bos_id"] is None else facts["bos_id"], (facts["eod_id"],))
    known: dict[str, Any] = {}
    for name in ("config.json", IDS):
        if (folder / name).is_file():
            known |= {key: value for key, value in _json(folder / name).items() if value is not None}
    ends = known.get("eos_token_id", [])
    begin = known.get("decoder_start_token_id", known.get("bos_token_id"))  # the former of an encoder-decoder
    return SavedTokenizer(path, begin, tuple(ends) if isinstance(ends, list) else (ends,))


def _json(path: Path) -> dict[str, Any]:
    try:
        tree: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return tree
    except (OSError, ValueError) as error:
        raise DataError(f"{path} can't be read ({error}). Restore it from a copy.") from None


def _empty(config: ModelConfig, groups: ProcessGroups, device: torch.device | str, dtype: torch.dtype) -> Decoder:
    return build_model(config, groups, seed=0, device=device, dtype=dtype)
