"""What others would run: `transformers`' Llama, and a Llama in plain torch modules, each in a careful user's loop."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lite.model_config import ModelConfig

Loss = Callable[[Tensor, Tensor], Tensor]


class PlainAttention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_size = config.head_size
        size, heads, kv = config.hidden_size, config.num_attention_heads, config.kv_heads
        self.q, self.k, self.v = (nn.Linear(size, n * config.head_size, bias=False) for n in (heads, kv, kv))
        self.o = nn.Linear(heads * config.head_size, size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (y(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for y in (self.q, self.k, self.v))
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class PlainBlock(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.first, self.second = (nn.RMSNorm(size, eps=config.rms_norm_eps) for _ in range(2))
        self.attention = PlainAttention(config)
        self.gate, self.up = (nn.Linear(size, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.first(x), cos, sin)
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class PlainLlama(nn.Module):
    """Inputs [B, S] -> logits [B, S, V]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.hidden_size)
        self.layers = nn.ModuleList(PlainBlock(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocabulary, bias=False)
        angles = torch.arange(config.max_position_embeddings)[:, None] * config.rope.theta ** (
            -torch.arange(0, config.head_size, 2) / config.head_size
        )
        self.cos, self.sin = (torch.cat((x, x), dim=-1) for x in (angles.cos(), angles.sin()))

    def forward(self, inputs: Tensor) -> Tensor:
        cos, sin = (x[: inputs.shape[1]] for x in (self.cos, self.sin))
        x = self.embedding(inputs)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


def plain(config: ModelConfig, device: torch.device) -> tuple[nn.Module, nn.ModuleList, Loss]:
    with device:
        model = PlainLlama(config)
    return model, model.layers, lambda inputs, targets: F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())


def transformers(config: ModelConfig, device: torch.device) -> tuple[nn.Module, nn.ModuleList, Loss]:
    from transformers import LlamaConfig, LlamaForCausalLM

    theirs = LlamaConfig(
        vocab_size=config.vocabulary,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.kv_heads,
        intermediate_size=config.intermediate_size,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        use_cache=False,
    )
    with device:
        model = LlamaForCausalLM(theirs)
    model.train()
    return model, model.model.layers, lambda inputs, targets: model(input_ids=inputs, labels=targets, shift_labels=targets).loss


class Loop:
    """fp32 weights under bf16 autocast, or bf16 weights with fp32 masters; fused AdamW, clipping."""

    def __init__(
        self, make: Callable[..., tuple[nn.Module, nn.ModuleList, Loss]], config: ModelConfig, device: torch.device, *, masters: bool
    ) -> None:
        self.device, self.masters = device, masters
        self.model, self.layers, self.loss = make(config, device)
        self.weights = list(self.model.parameters())
        self.stepped: list[Any] = self.weights
        if masters:
            self.stepped = [nn.Parameter(weight.detach().clone()) for weight in self.weights]
            for weight in self.weights:
                weight.data = weight.data.bfloat16()
        self.optimizer = torch.optim.AdamW(self.stepped, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def compile(self) -> None:
        for layer in self.layers:
            layer.compile()

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=not self.masters):
            loss = self.loss(inputs, targets)
        loss.backward()
        if self.masters:
            for weight, master in zip(self.weights, self.stepped, strict=True):
                assert weight.grad is not None
                master.grad, weight.grad = weight.grad.float(), None
        nn.utils.clip_grad_norm_(self.stepped, 1.0, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.masters:
            with torch.no_grad():
                torch._foreach_copy_(self.weights, self.stepped)
        return float(loss.detach())

    def num_parameters(self) -> int:
        return sum(weight.numel() for weight in itertools.chain(self.weights))
