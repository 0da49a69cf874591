"""One layer of the decoder or the encoder."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from megatron_lite.layers.attention import Attention
from megatron_lite.layers.context import ForwardContext
from megatron_lite.layers.cross_attention import CrossAttention
from megatron_lite.layers.dropout import ATTENTION, CROSS_ATTENTION, MLP
from megatron_lite.layers.mlp import FeedForward
from megatron_lite.layers.residual import LearnedStep, Residual
from megatron_lite.model_config import ModelConfig
from megatron_lite.parallel.groups import ProcessGroups


class Block(nn.Module):
    """Attention, with `cross` cross-attention, then the MLP; or attention and MLP beside each other: [B, S/tp or S, D] -> the same.

    `layer` is its number in the whole model, `within` what stands before it in names: "encoder." or nothing.
    """

    def __init__(
        self, config: ModelConfig, groups: ProcessGroups, *, layer: int, recompute_attention: bool, within: str = "", cross: bool = False
    ) -> None:
        super().__init__()
        self.name, recompute = f"{within}layers.{layer}", recompute_attention
        self.parallel, self.one_norm = config.residual.parallel != "none", config.residual.parallel == "one_norm"
        step = LearnedStep(name=f"{self.name}.step_size") if config.residual.learned_step_size == "layer" else None
        num_layers = config.encoder_layers if within else config.num_hidden_layers
        residual = partial(Residual, config, num_layers=num_layers, step=step)
        self.attention_residual = residual(name=f"{self.name}.attention", where=ATTENTION)
        self.attention = Attention(config, groups, name=f"{self.name}.attention", layer=layer, recompute=recompute)
        self.cross_attention: CrossAttention | None = None
        if cross:
            self.cross_attention_residual = residual(name=f"{self.name}.cross_attention", where=CROSS_ATTENTION)
            self.cross_attention = CrossAttention(config, groups, name=f"{self.name}.cross_attention", layer=layer, recompute=recompute)
        self.mlp_residual = residual(name=f"{self.name}.mlp", where=MLP, norm_input=not self.one_norm)
        self.mlp = FeedForward(config, groups, name=f"{self.name}.mlp")

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        if self.parallel:
            return self._beside_each_other(x, context)
        x = self.attention_residual(x, lambda entered: self.attention(entered, context), context.dropout)
        if self.cross_attention is not None:
            cross = self.cross_attention
            x = self.cross_attention_residual(x, lambda entered: cross(entered, context), context.dropout)
        return self.mlp_residual(x, lambda entered: self.mlp(entered, split=context.split), context.dropout)

    def _beside_each_other(self, x: Tensor, context: ForwardContext) -> Tensor:
        entered = self.attention_residual.enter(x)
        beside = entered if self.one_norm else self.mlp_residual.enter(x)
        x = self.attention_residual.leave(x, self.attention(entered, context), context.dropout)
        return self.mlp_residual.leave(x, self.mlp(beside, split=context.split), context.dropout)
