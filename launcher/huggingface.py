"""A run that takes its first weights from a Hugging Face folder: does its config fit them? No torch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from data_pipeline.errors import ConfigError, Fault
from data_pipeline.loader import Dataset
from launcher.config import RunConfig
from megatron_lite.checkpoint.committed import committed
from megatron_lite.checkpoint.huggingface.families import Family, changed, differences
from megatron_lite.checkpoint.huggingface.folder import check_tensors, open_tensors, read_model
from megatron_lite.model_config import ModelConfig

PREFIX = "hf:"
# What weights made elsewhere are trained on with: longer or narrower contexts, another eps. Whatever else differs is a mistake in a
# model section that was written for them: their norms' gains, say, would be read as other gains.
ADAPTED = ("rope.theta", "rope.scaling.", "attention.sliding_window", "attention.global_every", "rms_norm_eps", "layer_norm_eps")


def huggingface_folder(init_from: str | None) -> Path | None:
    """The folder of `hf:DIR`; None where init_from is something else."""
    if init_from is None or not init_from.startswith(PREFIX):
        return None
    return Path(init_from.removeprefix(PREFIX)).expanduser()


def require_fitting_weights(config: RunConfig, datasets: Iterable[Dataset]) -> None:
    """Compare a new run's model and tokenizer with the folder that `checkpoint.init_from: hf:DIR` names; a run that has
    checkpoints no longer needs it. The vocabulary is resolved. Raises ConfigError with every difference but those of ADAPTED,
    CheckpointError where the folder's files don't hold what they should."""
    source = config.checkpoint.init_from
    if source is None or config.checkpoint.resume not in ("auto", "never") or committed(config.run.folder / "checkpoints"):
        return
    folder = huggingface_folder(source)
    if folder is None:
        _require_own_format(source)
        return
    family, theirs = read_model(folder)
    allowed = {key for key, _, _ in _changed_meaning(family, config.model, theirs)}
    faults = [each for each in differences(family, config.model, theirs, where=str(folder / "config.json")) if each.field not in allowed]
    faults += tokenizer_faults(folder, theirs, datasets)
    if faults:
        raise ConfigError(faults)
    check_tensors(folder, open_tensors(folder), family, theirs)


def _require_own_format(source: str) -> None:
    """Raises ConfigError for a folder of transformers' format that is named as if it were of ours."""
    folder = Path(source).expanduser()
    if (folder / "config.json").is_file() and not (folder / "manifest.json").exists() and not (folder / "checkpoints").exists():
        want = "a run or one of its checkpoints, or hf: before a folder of transformers' format"
        raise ConfigError([Fault("checkpoint.init_from", source, want, f"use checkpoint.init_from={PREFIX}{source}")])


def changed_meaning_of_folder(folder: Path, model: ModelConfig) -> list[tuple[str, Any, Any]]:
    """(key, the folder's, this model's) of what may be otherwise, and changes what the folder's weights compute at first."""
    family, theirs = read_model(folder)
    return _changed_meaning(family, model, theirs)


def _changed_meaning(family: Family, ours: ModelConfig, theirs: ModelConfig) -> list[tuple[str, Any, Any]]:
    return [(f"model.{key}", before, after) for key, (before, after) in changed(family, ours, theirs).items() if key.startswith(ADAPTED)]


def tokenizer_faults(folder: Path, model: ModelConfig, datasets: Iterable[Dataset]) -> list[Fault]:
    """Data whose ids mean other tokens than the model's own. A folder without a tokenizer.json can't be compared."""
    own = folder / "tokenizer.json"
    if not own.is_file():
        return []
    fix = f"build the data with `tokenizer: {{type: pretrained, name_or_path: {folder}}}`"
    wanted = vocabulary(own)
    return [
        Fault("data.path", str(dataset.path), f"data with the tokenizer of {folder}", fix)
        for dataset in datasets
        if vocabulary(dataset.tokenizer_path) != wanted
    ]


def vocabulary(path: Path) -> list[Any]:
    """What every id is and in which order pieces merge: equal for tokenizers that give the same ids, whatever else differs."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        model = tree["model"]
        merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges") or []]
        return [model.get("vocab"), merges, {token["content"]: token["id"] for token in tree["added_tokens"]}]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError([Fault("tokenizer.json", str(path), "a tokenizer.json of the `tokenizers` library", str(error))]) from None
