"""The plain torch engine: every rank of dp holds all of its tp share, gradients are all-reduced, nothing else is sharded.

It is what the DeepSpeed engine is compared with, and it runs without torch.distributed in one process.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_lite.checkpoint.slices import OwnedSlice
from megatron_lite.config import OptimizerConfig, TrainingConfig
from megatron_lite.model_config import ModelConfig
from megatron_lite.models.batch import Batch, DropoutKey
from megatron_lite.models.build import build_model
from megatron_lite.models.decoder import Decoder, ForwardOptions
from megatron_lite.models.init import local_init
from megatron_lite.parallel.groups import ProcessGroups
from megatron_lite.parallel.replicated import register_gradient_sums
from megatron_lite.parallel.shard_spec import spec_of
from megatron_lite.training.optimizers import adamw
from megatron_lite.training.stability import clip_factor, global_norm, require_finite


class TorchEngine:
    """fp32, or bf16 weights with fp32 masters; gradients add up in one flat fp32 buffer either way."""

    def __init__(
        self,
        model: ModelConfig,
        training: TrainingConfig,
        optimizer: OptimizerConfig,
        groups: ProcessGroups,
        *,
        seed: int,
        device: torch.device,
    ) -> None:
        self._groups, self._max_norm = groups, optimizer.max_grad_norm
        self._bf16 = training.precision == "bf16"
        dtype = torch.bfloat16 if self._bf16 else torch.float32
        self._model = build_model(
            model,
            groups,
            seed=seed,
            device=device,
            dtype=dtype,
            options=ForwardOptions.of(training),
        )
        if training.compile:
            for layer in self._model.blocks:
                layer.compile()
        register_gradient_sums(self._model, groups)
        self._weights = dict(self._model.named_parameters())
        self._masters = {name: self._master(weight, seed) for name, weight in self._weights.items()} if self._bf16 else self._weights
        self._gradients = torch.zeros(sum(weight.numel() for weight in self._weights.values()), dtype=torch.float32, device=device)
        self._point_gradients_into_the_buffer()
        self._optimizer = adamw.build_adamw(
            adamw.parameter_groups(self._masters.items(), optimizer, width_multiplier=model.width_multiplier), optimizer
        )
        adamw.ensure_state(self._optimizer, self._masters.values())
        self._updates = 0

    def _master(self, weight: torch.nn.Parameter, seed: int) -> torch.nn.Parameter:
        """The fp32 weight before rounding, with the same spec."""
        spec = spec_of(weight)
        master = torch.nn.Parameter(local_init(spec, self._model.config, seed).view(spec.local_shape).to(weight.device))
        master.__dict__.update(weight.__dict__)
        return master

    def _point_gradients_into_the_buffer(self) -> None:
        """fp32: autograd adds to `.grad` in place. bf16: each micro-gradient is added in fp32 as it comes, and dropped."""
        at = 0
        for name, weight in self._weights.items():
            view = self._gradients[at : at + weight.numel()].view(weight.shape)
            at += weight.numel()
            self._masters[name].grad = view
            if self._bf16:
                weight.register_post_accumulate_grad_hook(_adder(view))

    @property
    def model(self) -> Decoder:
        return self._model

    @property
    def groups(self) -> ProcessGroups:
        return self._groups

    def forward(self, batch: Batch, dropout: DropoutKey | None) -> tuple[torch.Tensor, torch.Tensor]:
        return self._model(batch, dropout)

    @torch.no_grad()
    def eval_forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        return self._model(batch, None)

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        loss.backward()
        if last and self._groups.dp.group is not None:
            dist.all_reduce(self._gradients, group=self._groups.dp.group)
            self._gradients /= self._groups.dp.size

    @torch.no_grad()
    def step(self, lr: float) -> float:
        gradients = ((spec_of(master), master.grad) for master in self._masters.values())
        try:
            norm = require_finite(
                float(global_norm(((spec, gradient) for spec, gradient in gradients if gradient is not None), self._groups)),
                what=f"the gradient norm of update {self.optimizer_step + 1}",
            )
            factor = clip_factor(norm, self._max_norm)
            if factor < 1.0:
                self._gradients *= factor
            adamw.set_lr(self._optimizer, lr)
            self._optimizer.step()
        finally:
            self._gradients.zero_()
        self._updates += 1
        self.refresh()
        return norm

    def owned_slices(self) -> list[OwnedSlice]:
        """All of every parameter, since every dp rank needs it; each dp rank writes an equal share."""
        dp, slices = self._groups.dp, []
        for name, master in self._masters.items():
            size, state = master.numel(), self._optimizer.state[master]
            first, last = size * dp.rank // dp.size, size * (dp.rank + 1) // dp.size
            for kind, tensor in (("master", master), *((moment, state[moment]) for moment in adamw.STATES)):
                slices.append(OwnedSlice(name, spec_of(master), kind, 0, size, tensor.detach().view(-1), first, last))
        return slices

    @torch.no_grad()
    def refresh(self) -> None:
        if self._bf16:
            for name, weight in self._weights.items():
                weight.copy_(self._masters[name])

    @property
    def optimizer_step(self) -> int:
        return self._updates

    def set_optimizer_step(self, number: int) -> None:
        adamw.set_updates_done(self._optimizer, self._masters.values(), number)
        self._updates = number


def _adder(view: torch.Tensor) -> Callable[[torch.Tensor], None]:
    def add(weight: torch.Tensor) -> None:
        assert weight.grad is not None
        view.add_(weight.grad)
        weight.grad = None

    return add
