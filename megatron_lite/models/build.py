"""From a config to a model on this rank."""

from __future__ import annotations

import torch

from megatron_lite.config import NO_EXTRAS, LossConfig
from megatron_lite.layers.document_kernels import AskedKernel
from megatron_lite.model_config import ModelConfig
from megatron_lite.models.decoder import Checkpointing, Decoder
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
    checkpointing: Checkpointing = "none",
    document_kernel: AskedKernel = "auto",
    extras: LossConfig = NO_EXTRAS,
    materialise: bool = True,
) -> Decoder:
    """This rank's part of the model with its initial weights; without `materialise` it stays on the meta device."""
    with torch.device("meta"):
        model = FAMILIES[config.family](config, groups, checkpointing=checkpointing, document_kernel=document_kernel, extras=extras)
    if materialise:
        materialise_model(model, config, seed=seed, device=device, dtype=dtype)
    return model
