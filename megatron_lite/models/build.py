"""From a config to a model on this rank."""

from __future__ import annotations

import torch

from megatron_lite.layers.attention import KVLinear, QKVLinear
from megatron_lite.layers.embedding import LMHead
from megatron_lite.layers.linear import ColumnLinear, RowLinear
from megatron_lite.layers.matmul import by_columns
from megatron_lite.model_config import ModelConfig
from megatron_lite.models.decoder import PLAIN, Decoder, ForwardOptions
from megatron_lite.models.init import materialise as materialise_model
from megatron_lite.models.seq2seq import Seq2Seq
from megatron_lite.parallel.groups import ProcessGroups

FAMILIES: dict[str, type[Decoder]] = {"decoder": Decoder, "seq2seq": Seq2Seq}


def build_model(
    config: ModelConfig,
    groups: ProcessGroups,
    *,
    seed: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    options: ForwardOptions = PLAIN,
    materialise: bool = True,
) -> Decoder:
    """This rank's part of the model with its initial weights; without `materialise` it stays on the meta device."""
    with torch.device("meta"):
        model = FAMILIES[config.family](config, groups, options)
    if materialise:
        materialise_model(model, config, seed=seed, device=device, dtype=dtype)
    return model


def ready_to_decode(model: Decoder) -> Decoder:
    """The same model in evaluation, its matrices laid out anew for products of few rows (layers/matmul.py): to be decoded with, since our
    engines and checkpoints view a matrix as one run of numbers."""
    for module in model.modules():
        if isinstance(module, (QKVLinear, KVLinear, ColumnLinear, RowLinear, LMHead)):
            module.weight.data = by_columns(module.weight.data)
    return model.eval()
