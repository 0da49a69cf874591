"""`mlite import`: the model section that a Hugging Face folder's weights fit, and what to type next."""

from __future__ import annotations

from pathlib import Path

import yaml

from data_pipeline.errors import ConfigError, Fault
from data_pipeline.storage import atomic_write
from launcher.huggingface import PREFIX
from megatron_lite.checkpoint.huggingface.folder import check_tensors, open_tensors, read_model
from megatron_lite.model_config import ModelConfig
from megatron_lite.sizes import num_parameters


def import_model(folder: Path, *, to: Path | None, force: bool) -> None:
    """Check config.json and the name, shape and type of every tensor, then write the model section. Raises ConfigError for a
    model that ours can't be, CheckpointError for a folder that is not whole."""
    family, model = read_model(folder)
    stored = open_tensors(folder)
    check_tensors(folder, stored, family, model)
    target = to or Path("configs/model") / f"{folder.resolve().name}.yaml"
    if target.exists() and not force:
        raise ConfigError([Fault("--to", str(target), "a file that is not there yet", "--force overwrites it")])
    with atomic_write(target) as file:
        file.write(f"# {family.architecture} of {folder}\n{model_yaml(model)}".encode())
    dtypes = ", ".join(sorted({tensor.dtype for tensor in stored.values()}))
    print(f"{folder}: {family.architecture}, {num_parameters(model):,} parameters in {dtypes}; every tensor is there")
    print(f"{target} is its model section. In a run config:")
    print(f"  model: {target}")
    print(f"  checkpoint: {{init_from: {PREFIX}{folder}}}")
    if (folder / "tokenizer.json").is_file():
        print("and in the config of its data:")
        print(f"  tokenizer: {{type: pretrained, name_or_path: {folder}}}")


def model_yaml(model: ModelConfig) -> str:
    """The section, without what is as by default."""
    shape = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    defaults = ModelConfig().model_dump(mode="json")
    if model.head_dim == model.hidden_size / model.num_attention_heads:
        model = model.model_copy(update={"head_dim": None})
    tree = {key: value for key, value in model.model_dump(mode="json").items() if key in shape or value != defaults[key]}
    return yaml.safe_dump(tree, sort_keys=False)
