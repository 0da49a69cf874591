"""The feed-forward network."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lite.layers.linear import ColumnLinear, RowLinear
from megatron_lite.model_config import ModelConfig
from megatron_lite.parallel.groups import ProcessGroups


def _squared_relu(x: Tensor) -> Tensor:
    """So et al. 2021."""
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,  # exact, by the error function (Hendrycks and Gimpel 2016)
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),  # GPT-2's gelu_new is the same
    "relu": F.relu,
    "relu2": _squared_relu,
}


class FeedForward(nn.Module):
    """down(act(gate(x)) * up(x)) or down(act(up(x))): [B, S/tp or S, D] -> the same, the F dim cut over tp."""

    def __init__(self, config: ModelConfig, groups: ProcessGroups, *, name: str) -> None:
        super().__init__()
        size, width, bias = config.hidden_size, config.intermediate_size, config.mlp.bias
        self.gated, self.activation = config.mlp.gated, ACTIVATIONS[config.mlp.activation]
        blocks = {f"{name}.{which}.weight": width for which in (("gate", "up") if self.gated else ("up",))}
        self.gate_up = ColumnLinear(size, blocks, groups, bias=bias)
        self.down = RowLinear(width, size, groups, name=f"{name}.down.weight", bias=bias)

    def forward(self, x: Tensor, *, split: bool) -> Tensor:
        inner = self.gate_up(x, split=split)
        if not self.gated:
            return self.down(self.activation(inner), split=split)
        gate, up = inner.chunk(2, dim=-1)
        return self.down(self.activation(gate) * up, split=split)
