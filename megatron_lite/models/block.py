"""One layer of a decoder or an encoder."""

from __future__ import annotations

from torch import Tensor, nn

from megatron_lite.layers.attention import Attention
from megatron_lite.layers.context import ForwardContext
from megatron_lite.layers.cross_attention import CrossAttention
from megatron_lite.layers.dropout import ATTENTION, CROSS_ATTENTION, MLP, dropout
from megatron_lite.layers.mlp import SwiGLU
from megatron_lite.layers.norms import RMSNorm
from megatron_lite.model_config import ModelConfig
from megatron_lite.parallel.groups import ProcessGroups


class Block(nn.Module):
    """x + attention(norm(x)), with `cross` x + cross_attention(norm(x)), then x + mlp(norm(x)): [B, S/tp or S, D] -> the same.

    `layer` is its number in the whole model, `within` what stands before it in names: "encoder." or nothing.
    """

    def __init__(
        self, config: ModelConfig, groups: ProcessGroups, *, layer: int, recompute_attention: bool, within: str = "", cross: bool = False
    ) -> None:
        super().__init__()
        self.name, self.dropout = f"{within}layers.{layer}", config.hidden_dropout
        eps, size = config.rms_norm_eps, config.hidden_size
        self.attention_norm = RMSNorm(size, name=f"{self.name}.attention_norm.weight", eps=eps)
        self.attention = Attention(config, groups, name=f"{self.name}.attention", layer=layer, recompute=recompute_attention)
        self.cross_attention: CrossAttention | None = None
        if cross:
            name = f"{self.name}.cross_attention"
            self.cross_attention_norm = RMSNorm(size, name=f"{name}_norm.weight", eps=eps)
            self.cross_attention = CrossAttention(config, groups, name=name, layer=layer, recompute=recompute_attention)
        self.mlp_norm = RMSNorm(size, name=f"{self.name}.mlp_norm.weight", eps=eps)
        self.mlp = SwiGLU(size, config.intermediate_size, groups, name=f"{self.name}.mlp")

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        mixed = self.attention(self.attention_norm(x), context)
        x = x + dropout(mixed, self.dropout, context.dropout, where=ATTENTION)
        if self.cross_attention is not None:
            seen = self.cross_attention(self.cross_attention_norm(x), context)
            x = x + dropout(seen, self.dropout, context.dropout, where=CROSS_ATTENTION)
        expanded = self.mlp(self.mlp_norm(x), split=context.split)
        return x + dropout(expanded, self.dropout, context.dropout, where=MLP)
