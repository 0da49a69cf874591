"""`mlite export`: a run's model as a folder that `transformers`, and what reads its format, loads."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_pipeline.dataset import Dataset
from data_pipeline.errors import CheckpointError, ConfigError, Fault
from data_pipeline.schema import override_name, validate
from data_pipeline.storage import atomic_folder
from launcher.saved_config import read_config, run_of
from megatron_lite.checkpoint.huggingface.catalogue import family_for
from megatron_lite.checkpoint.huggingface.families import Family, left_behind, to_tree
from megatron_lite.model_config import ModelConfig
from megatron_lite.sizes import num_parameters

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def export_run(
    path: Path, overrides: Sequence[str], *, to: Path, family: str = "auto", dtype: str, max_file_size: str, force: bool
) -> None:
    """Write the newest checkpoint of a run, or the one at `path`, to the folder `to`. Raises ConfigError for what the
    architecture can't represent, DataError for another tokenizer's data, CheckpointError where there is no usable checkpoint."""
    faults = [Fault("--dtype", dtype, "auto, fp32, bf16 or fp16")] if dtype not in ("auto", *DTYPES) else []
    faults += target_faults(to, force=force)
    fix = "leave it out; to go on training with it, use checkpoint.init_from, else write it into the exported config.json"
    names = [name for name in map(override_name, overrides) if name.split(".")[0] == "model"]
    faults += [Fault(name, "another value", "the model as it was trained, which is what is exported", fix) for name in names]
    if faults:
        raise ConfigError(faults)
    config = read_config(run_of(path), overrides)
    max_file_bytes = parse_size(max_file_size)
    dtype = config.training.precision if dtype == "auto" else dtype

    from launcher.finished import dataset_of, find_checkpoint  # load torch
    from megatron_lite.checkpoint.huggingface.export import export_weights
    from megatron_lite.checkpoint.manifest import read_manifest
    from megatron_lite.parallel.groups import ProcessGroups

    info = find_checkpoint(path, config, ProcessGroups.single())
    model = validate(ModelConfig, info.state.model, prefix=f"{info.path}: model")
    architecture = family_for(model, family)
    tree = to_tree(architecture, model)
    dataset = dataset_of(config, info.state, info.path)
    try:
        with atomic_folder(to, replace=True) as folder:
            places = architecture.places(model)
            files = export_weights(info.path, read_manifest(info.path), folder, places, dtype=dtype, max_file_bytes=max_file_bytes)
            write_texts(folder, tree, dataset, model, dtype=dtype)
    except OSError as error:
        raise CheckpointError(f"{to} was not written: {error.strerror or error}") from None
    report(to, architecture, model, dataset, files=files, dtype=dtype, source=f"step {info.state.step} of {info.path}")


def target_faults(to: Path, *, force: bool) -> list[Fault]:
    """What is there already; `--force` takes an export's place, never that of anything else."""
    if not to.exists() or (to.is_dir() and not any(to.iterdir())):
        return []
    is_export = (to / "config.json").is_file() and any(to.glob("*.safetensors"))
    if not is_export:
        return [Fault("--to", str(to), "a folder that is not there yet", "something other than a model is there: choose another")]
    return [] if force else [Fault("--to", str(to), "a folder that is not there yet", "--force replaces the model that is there")]


def parse_size(text: str) -> int:
    """Bytes of `5GB`, `200MB`. Raises ConfigError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(KB|MB|GB)", text.strip().upper())
    if found is None or float(found[1]) <= 0:
        raise ConfigError([Fault("--max-file-size", text, "a size such as 5GB or 200MB")])
    return int(float(found[1]) * _UNITS[found[2]])


def write_texts(folder: Path, tree: dict[str, Any], dataset: Dataset, model: ModelConfig, *, dtype: str) -> None:
    """config.json, generation_config.json and the tokenizer's files; its tokenizer.json is the dataset's, byte for byte."""
    begin = dataset.vocabulary.begin_id
    ids = {"bos_token_id": begin, "eos_token_id": dataset.eod_id}
    name, pairs = DTYPES[dtype], model.family == "seq2seq"
    ids |= {"decoder_start_token_id": begin, "pad_token_id": dataset.eod_id} if pairs else {}
    write_json(folder / "config.json", {**tree, **ids, "dtype": name, "torch_dtype": name})  # transformers 5, transformers 4
    # batches are padded with the end, on the left, where prompts of any length end together; sources on the right, since positions
    # count from the first place. Not in config.json, where it would take the end's embedding out of training, but where targets are
    # made of labels
    write_json(folder / "generation_config.json", {**ids, "pad_token_id": dataset.eod_id})
    facts = dataset.manifest.tokenizer
    special = {"eos_token": facts["eod_token"], "bos_token": facts.get("bos_token") or facts["eod_token"]}
    special |= {"pad_token": facts["eod_token"], "padding_side": "right" if pairs else "left"}
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "clean_up_tokenization_spaces": False,
        "model_max_length": model.max_position_embeddings,
    }
    write_json(folder / "tokenizer_config.json", tokenizer)
    shutil.copyfile(dataset.tokenizer_path, folder / "tokenizer.json")


def write_json(path: Path, tree: dict[str, Any]) -> None:
    path.write_text(json.dumps(tree, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def report(to: Path, family: Family, model: ModelConfig, dataset: Dataset, *, files: list[str], dtype: str, source: str) -> None:
    number = f"{len(files)} files" if len(files) > 1 else "one file"
    print(f"{to}: {family.architecture}, {num_parameters(model):,} parameters in {dtype}, {number}, from {source}")
    if dtype != "fp32":
        print(f"  weights are rounded to {dtype}; --dtype fp32 keeps the checkpoint's own numbers")
    for left in left_behind(family, model):
        print(f"  {left} is for training only and does not go along")
    if model.family == "seq2seq":
        print("  every source was read with the end token behind it: put tokenizer.eos_token there")
    elif not _begins_texts(dataset):
        print("  every document was trained on from a begin token: put tokenizer.bos_token before a prompt, as `mlite generate` does")
    print(f"  back again: checkpoint.init_from=hf:{to}")


def _begins_texts(dataset: Dataset) -> bool:
    """Whether the tokenizer puts the begin token before a text by itself, as transformers uses it."""
    from tokenizers import Tokenizer

    begin = dataset.vocabulary.begin_id
    ids: list[int] = Tokenizer.from_file(str(dataset.tokenizer_path)).encode("").ids
    return ids[:1] == [begin]
