"""The gated feed-forward network."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lite.layers.linear import ColumnLinear, RowLinear
from megatron_lite.parallel.groups import ProcessGroups


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020): [B, S, D] -> [B, S, D], the F dim cut over tp."""

    def __init__(self, hidden_size: int, intermediate_size: int, groups: ProcessGroups, *, name: str) -> None:
        super().__init__()
        blocks = {f"{name}.gate.weight": intermediate_size, f"{name}.up.weight": intermediate_size}
        self.gate_up = ColumnLinear(hidden_size, blocks, groups)
        self.down = RowLinear(intermediate_size, hidden_size, groups, name=f"{name}.down.weight")

    def forward(self, x: Tensor, *, split: bool) -> Tensor:
        gate, up = self.gate_up(x, split=split).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up, split=split)
