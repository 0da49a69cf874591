"""What a training step needs of an engine, and which engine a config asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from megatron_lite.checkpoint.slices import OwnedSlice
from megatron_lite.config import OptimizerConfig, ParallelConfig, TrainingConfig
from megatron_lite.model_config import ModelConfig
from megatron_lite.models.batch import Batch, DropoutKey
from megatron_lite.models.decoder import Decoder
from megatron_lite.parallel.groups import ProcessGroups


class Engine(Protocol):
    """A model with its optimizer on this rank. Everything but the properties is collective: all ranks make the same calls."""

    @property
    def model(self) -> Decoder: ...

    @property
    def groups(self) -> ProcessGroups: ...

    def forward(self, batch: Batch, dropout: DropoutKey | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(sum of the losses of the micro-batch's targets: fp32, how many they are: int64), the same on every tp rank."""

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add the loss's gradient to the fp32 sum of this step. With the step's last micro-batch the sums are averaged over
        dp: so scale the loss by dp over the global number of targets."""

    def step(self, lr: float) -> float:
        """Clip and update; returns the global gradient norm before clipping. Raises NonFiniteError, on all ranks alike and
        before any weight is touched, where that norm is not finite; the gradients are then dropped."""

    def eval_forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """As forward, without dropout and without a gradient."""

    def owned_slices(self) -> list[OwnedSlice]:
        """This rank's fp32 masters and moments, as live storage. After writing to it, call refresh()."""

    def refresh(self) -> None:
        """Make the weights that forward uses those of the masters."""

    @property
    def optimizer_step(self) -> int:
        """The number of updates made."""

    def set_optimizer_step(self, number: int) -> None: ...


def build_engine(
    model: ModelConfig,
    training: TrainingConfig,
    optimizer: OptimizerConfig,
    parallel: ParallelConfig,
    groups: ProcessGroups,
    *,
    seed: int,
    device: torch.device,
    deepspeed_overrides: Mapping[str, Any] | None = None,
) -> Engine:
    """Build the model with its initial weights and the engine that training.engine names. Collective over the world."""
    if training.engine == "torch":
        from megatron_lite.training.engine_torch import TorchEngine

        return TorchEngine(model, training, optimizer, groups, seed=seed, device=device)
    from megatron_lite.training.engine_deepspeed import DeepSpeedEngine  # takes a second to load, and may be absent

    return DeepSpeedEngine(model, training, optimizer, parallel, groups, seed=seed, device=device, overrides=deepspeed_overrides)
