"""If these fail, docs/layers.md shows a multi-head attention or a Pre-LN block that computes something else than ours does."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lite.layers.attention import Attention
from megatron_lite.layers.context import ForwardContext
from megatron_lite.layers.kernels import AttentionMask
from megatron_lite.model_config import ModelConfig
from megatron_lite.models.block import Block
from megatron_lite.parallel.groups import ProcessGroups

CONFIG = ModelConfig.model_validate(
    {
        "vocab_size": 97,
        "hidden_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 6,
        "intermediate_size": 192,
        "position": {"type": "none"},
        "norm": {"type": "layer_norm", "bias": True},
        "mlp": {"activation": "gelu", "gated": False, "bias": True},
        "attention": {"qkv_bias": True, "o_bias": True},
    }
)


class MultiHeadAttention(nn.Module):
    """Heads side by side: softmax(q k^T / sqrt(d_k)) v of each, over what is not in the future, then a projection of all."""

    def __init__(self, width: int, heads: int, *, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        if fused:
            self.qkv = nn.Linear(width, 3 * width)
        else:
            self.q, self.k, self.v = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)
        self.o = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).split(width, dim=-1) if self.fused else (self.q(x), self.k(x), self.v(x))
        q, k, v = (each.view(batch, length, self.heads, -1).transpose(1, 2) for each in (q, k, v))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(future, float("-inf")).softmax(dim=-1) @ v
        return self.o(mixed.transpose(1, 2).reshape(batch, length, width))


class PreLNBlock(nn.Module):
    """x + attention(ln1(x)), then x + mlp(ln2(x))."""

    def __init__(self, width: int, heads: int, inner: int, *, fused: bool) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = MultiHeadAttention(width, heads, fused=fused)
        self.mlp = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


def pairs(by_hand: nn.Module, ours: nn.Module, table: dict[str, str]) -> list[tuple[list[nn.Parameter], nn.Parameter]]:
    """Parameters of the few lines beside ours; q, k and v of ours are one, one after the other."""
    given = dict(by_hand.named_parameters())
    found = []
    for name, parameter in ours.named_parameters():
        module, _, kind = name.rpartition(".")
        found.append(([given.pop(f"{each}.{kind}") for each in table[module].split()], parameter))
    assert not given
    return found


def assert_same_outputs_and_gradients(by_hand: nn.Module, ours: nn.Module, table: dict[str, str]) -> None:
    """The same weights give the same outputs and gradients, of inputs and of every weight, in float64."""
    beside = pairs(by_hand.double(), ours.double(), table)
    with torch.no_grad():
        for given, parameter in beside:
            for each in given:
                each.add_(0.1 * torch.randn_like(each))  # norms and biases too are not as they were made
            parameter.copy_(torch.cat(given))
    x = torch.randn(3, 17, CONFIG.hidden_size, dtype=torch.float64)
    inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    results = [by_hand(inputs[0]), ours(inputs[1], ForwardContext(rotation=None, masks={None: AttentionMask()}, split=False))]
    for result in results:
        F.gelu(result).sum().backward()
    close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)
    close(results[1], results[0])
    close(inputs[1].grad, inputs[0].grad)
    for given, parameter in beside:
        close(parameter.grad, torch.cat([each.grad for each in given if each.grad is not None]))


@pytest.mark.parametrize("fused", [True, False])
def test_multi_head_attention(fused: bool) -> None:
    torch.manual_seed(1)
    by_hand = MultiHeadAttention(CONFIG.hidden_size, CONFIG.num_attention_heads, fused=fused)
    ours = Attention(CONFIG, ProcessGroups.single(), name="layers.0.attention", layer=0, recompute=False)
    assert_same_outputs_and_gradients(by_hand, ours, {"qkv": "qkv" if fused else "q k v", "o": "o"})


@pytest.mark.parametrize("fused", [True, False])
def test_pre_ln_block(fused: bool) -> None:
    torch.manual_seed(1)
    by_hand = PreLNBlock(CONFIG.hidden_size, CONFIG.num_attention_heads, CONFIG.intermediate_size, fused=fused)
    ours = Block(CONFIG, ProcessGroups.single(), layer=0, recompute_attention=False)
    qkv = "attn.qkv" if fused else "attn.q attn.k attn.v"
    table = {"attention_residual.norm": "ln1", "attention.qkv": qkv, "attention.o": "attn.o"}
    table |= {"mlp_residual.norm": "ln2", "mlp.gate_up": "mlp.0", "mlp.down": "mlp.2"}
    assert_same_outputs_and_gradients(by_hand, ours, table)
