"""How a branch of a layer joins the residual stream: where its norms stand, and how large a step it takes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megatron_lite.layers.dropout import DropoutPlace, dropout
from megatron_lite.layers.linear import parameter_of, replicated_vector
from megatron_lite.layers.norms import norm_of
from megatron_lite.model_config import ModelConfig


class LearnedStep(nn.Module):
    """x times one learned number."""

    def __init__(self, *, name: str) -> None:
        super().__init__()
        self.weight = parameter_of(replicated_vector(name, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Residual(nn.Module):
    """x + h f(norm(x)), norm(x + h f(x)) or x + h norm(f(norm(x))), for one branch f: [B, S/tp or S, D] -> the same.

    Branches one after the other are residuals called one after the other; for branches beside each other, which read the same
    x, `enter` and `leave` are the two halves of a call. The norms' logical names are `name`_norm and `name`_output_norm, a
    learned step's `name`_step_size, or that of the layer's `step` where one is given.
    """

    def __init__(
        self, config: ModelConfig, *, name: str, where: int, num_layers: int, step: LearnedStep | None = None, norm_input: bool = True
    ) -> None:
        super().__init__()
        self.where, self.dropout, self.post = where, config.hidden_dropout, config.norm.placement == "post"
        self.norm = norm_of(config, name=f"{name}_norm") if norm_input else None
        self.output_norm = norm_of(config, name=f"{name}_output_norm") if config.norm.placement == "sandwich" else None
        if step is None and config.residual.learned_step_size == "branch":
            step = LearnedStep(name=f"{name}_step_size")
        self.learned_step = step
        self.step_size = config.residual.step(num_layers) if step is None else 1.0

    def forward(self, x: Tensor, branch: Callable[[Tensor], Tensor], place: DropoutPlace | None) -> Tensor:
        return self.leave(x, branch(self.enter(x)), place)

    def enter(self, x: Tensor) -> Tensor:
        """What the branch reads of the stream."""
        return x if self.post or self.norm is None else self.norm(x)

    def leave(self, x: Tensor, out: Tensor, place: DropoutPlace | None) -> Tensor:
        """The stream with what the branch gave, dropped out by the place."""
        if self.output_norm is not None:
            out = self.output_norm(out)
        out = dropout(out, self.dropout, place, where=self.where)
        if self.learned_step is not None:
            out = self.learned_step(out)
        x = x + out if self.step_size == 1.0 else torch.add(x, out, alpha=self.step_size)
        return self.norm(x) if self.post and self.norm is not None else x
