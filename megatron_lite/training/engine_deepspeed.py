"""The DeepSpeed engine: ZeRO stages 0 to 3 over dp, beside our own tensor parallelism.

What is relied on here was measured with 0.19.8; each thing that DeepSpeed would do wrong by default has its reason beside it.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from data_pipeline.errors import ConfigError, NonFiniteError
from megatron_lite.checkpoint.slices import OwnedSlice
from megatron_lite.config import OptimizerConfig, ParallelConfig, TrainingConfig
from megatron_lite.model_config import ModelConfig
from megatron_lite.models.batch import Batch, DropoutKey
from megatron_lite.models.build import build_model
from megatron_lite.models.decoder import Decoder, ForwardOptions
from megatron_lite.models.init import local_init, materialise
from megatron_lite.parallel.groups import ProcessGroups
from megatron_lite.parallel.replicated import register_gradient_sums
from megatron_lite.parallel.shard_spec import spec_of
from megatron_lite.training.deepspeed_config import deepspeed_config
from megatron_lite.training.optimizers import adamw
from megatron_lite.training.stability import clip_factor, global_norm, require_finite


class DeepSpeedEngine:
    """One model, its flat partitions and a torch AdamW that steps on them."""

    def __init__(
        self,
        model: ModelConfig,
        training: TrainingConfig,
        optimizer: OptimizerConfig,
        parallel: ParallelConfig,
        groups: ProcessGroups,
        *,
        seed: int,
        device: torch.device,
        overrides: Mapping[str, Any] | None = None,
    ) -> None:
        if training.precision == "bf16" and parallel.zero_stage == 0:
            raise ConfigError("bf16 needs parallel.zero_stage 1, 2 or 3: DeepSpeed's stage 0 steps on zero gradients at construction")
        deepspeed = _load(device)
        from megatron_lite.training.engine_deepspeed_groups import ModelParallelUnit
        from megatron_lite.training.engine_deepspeed_partitions import Partitions

        self._groups, self._max_norm, self._stage = groups, optimizer.max_grad_norm, parallel.zero_stage
        config = deepspeed_config(training, optimizer, parallel, dp=groups.dp.size, overrides=overrides)
        mpu = ModelParallelUnit(groups)
        self._model = build_model(
            model,
            groups,
            seed=seed,
            device=device,
            options=ForwardOptions.of(training),
            materialise=False,
        )
        dtype = torch.bfloat16 if training.precision == "bf16" else torch.float32
        partition = _partitioner(deepspeed, config, mpu) if self._stage == 3 else None
        materialise(self._model, model, seed=seed, device=device, dtype=dtype, after_module=partition)
        register_gradient_sums(self._model, groups)
        if training.compile:
            for layer in self._model.blocks:
                layer.compile()
        named = self._model.named_parameters()
        groups_of_parameters = adamw.parameter_groups(named, optimizer, width_multiplier=model.width_multiplier)
        client = adamw.build_adamw(groups_of_parameters, optimizer)
        with contextlib.redirect_stdout(io.StringIO()):  # BF16_Optimizer prints the machine's memory
            self._engine, *_ = deepspeed.initialize(model=self._model, optimizer=client, config=config, mpu=mpu, dist_init_required=False)
        self._partitions = Partitions(self._engine, dp_rank=groups.dp.rank, dp_size=groups.dp.size)
        self._updates = 0
        if dtype is torch.bfloat16:
            self._write_exact_masters(seed)

    def _write_exact_masters(self, seed: int) -> None:
        """DeepSpeed took its fp32 masters from the rounded weights: put the initial values themselves there."""
        for _, parameter, part in self._partitions.fragments():
            exact = local_init(spec_of(parameter), self._model.config, seed, start=part.start, stop=part.stop)
            part.flat.detach()[part.offset : part.offset + exact.numel()].copy_(exact)
        self.refresh()

    @property
    def model(self) -> Decoder:
        return self._model

    @property
    def groups(self) -> ProcessGroups:
        return self._groups

    def forward(self, batch: Batch, dropout: DropoutKey | None) -> tuple[torch.Tensor, torch.Tensor]:
        return self._engine(batch, dropout)

    @torch.no_grad()
    def eval_forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        return self._model(batch, None)  # ZeRO-3's gathering hooks are on the modules

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss, scale_wrt_gas=False)

    def step(self, lr: float) -> float:
        what = f"the gradient norm of update {self.optimizer_step + 1}"
        adamw.set_lr(self._partitions.torch_optimizer, lr)
        if self._stage == 0:
            norm = self._step_unsharded(what)
        else:
            self._engine.step()  # leaves the weights alone where the norm is not finite
            norm = require_finite(float(self._engine.optimizer._global_grad_norm), what=what)
        self._updates += 1
        return norm

    @torch.no_grad()
    def _step_unsharded(self, what: str) -> float:
        """At stage 0 DeepSpeed keeps no norm, so it is taken and applied here."""
        gradients = [(spec_of(weight), weight.grad) for weight in self._model.parameters() if weight.grad is not None]
        try:
            norm = require_finite(float(global_norm(gradients, self._groups)), what=what)
        except NonFiniteError:
            self._engine.zero_grad()
            raise
        factor = clip_factor(norm, self._max_norm)
        if factor < 1.0:
            for _, gradient in gradients:
                gradient.mul_(factor)
        self._engine.step()
        return norm

    def owned_slices(self) -> list[OwnedSlice]:
        return self._partitions.slices()

    def refresh(self) -> None:
        self._partitions.refresh()

    @property
    def optimizer_step(self) -> int:
        return self._updates

    def set_optimizer_step(self, number: int) -> None:
        adamw.set_updates_done(self._partitions.torch_optimizer, self._partitions.flats(), number)
        self._updates = number


def _load(device: torch.device) -> Any:
    """DeepSpeed, imported and attached to torch.distributed."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else a warning from every process
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))  # srun sets none, DeepSpeed reads it
    if not dist.is_initialized():
        dist.init_process_group("gloo" if device.type == "cpu" else "nccl", store=dist.HashStore(), rank=0, world_size=1)
    import deepspeed
    from deepspeed.utils import groups, logger

    logger.setLevel(logging.ERROR)
    # It calls collectives by names that torch 2.13 calls old: a warning for each call of each rank.
    warnings.filterwarnings("ignore", message="`torch.distributed.*is deprecated", category=FutureWarning)
    # Not used in training. On CPU it would be compiled at start: 86 s, or the end of it where there is no compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    groups.mpu = None  # of an earlier engine in this process
    return deepspeed


def _partitioner(deepspeed: Any, config: dict[str, Any], mpu: Any) -> Any:
    """What partitions a module's parameters over dp as soon as they exist, so that the whole model never does.

    zero.Init is not entered: that would patch torch's factories to the training dtype and change the initial values. Without
    its data_parallel_group every tp rank would silently get the first one's cut. Its broadcast is skipped, since initial values
    are the same on every dp rank by construction.
    """
    init = deepspeed.zero.Init(data_parallel_group=mpu.get_data_parallel_group(), config_dict_or_path=config, mpu=mpu)

    def convert(parameter: torch.nn.Parameter) -> None:
        init._convert_to_deepspeed_param(parameter)
        parameter.partition()  # type: ignore[attr-defined]

    init._zero_init_param = convert

    def after_module(module: torch.nn.Module, own: list[torch.nn.Parameter]) -> None:
        init._convert_to_zero_parameters(own)

    return after_module
