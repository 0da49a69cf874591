"""Norms, the MLP and how they are put together, in obvious maths: what tests/reference.py builds a layer of.

`w` holds a layer's tensors by their names within the layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megatron_lite.model_config import ModelConfig
from tests.reference_attention import wide


def norm(x: Tensor, w: Mapping[str, Tensor], name: str, config: ModelConfig) -> Tensor:
    """x / sqrt(mean(x^2) + eps) or (x - mean) / sqrt(variance + eps), times the gain, plus the bias."""
    of_x = wide(x)
    if config.norm.type == "layer_norm":
        of_x = of_x - of_x.mean(-1, keepdim=True)
        eps = config.layer_norm_eps
    else:
        eps = config.rms_norm_eps
    normed = of_x / (of_x.square().mean(-1, keepdim=True) + eps).sqrt()
    if config.norm.zero_centred:
        out = (normed * (1 + wide(w[f"{name}.weight"]))).to(x.dtype)
    else:
        out = normed.to(x.dtype) * w[f"{name}.weight"]
    return out + w[f"{name}.bias"] if f"{name}.bias" in w else out


def activation(x: Tensor, name: str) -> Tensor:
    if name == "silu":
        return x * torch.sigmoid(x)
    if name == "gelu":
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    if name == "gelu_pytorch_tanh":
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    positive = torch.where(x > 0, x, torch.zeros_like(x))
    return {"relu": positive, "relu2": positive * positive}[name]


def product(x: Tensor, w: Mapping[str, Tensor], name: str) -> Tensor:
    """By a matrix, with its bias where there is one."""
    out = x @ w[f"{name}.weight"].T
    return out + w[f"{name}.bias"] if f"{name}.bias" in w else out


def mlp(x: Tensor, w: Mapping[str, Tensor], config: ModelConfig) -> Tensor:
    if not config.mlp.gated:
        return product(activation(product(x, w, "mlp.up"), config.mlp.activation), w, "mlp.down")
    return product(activation(product(x, w, "mlp.gate"), config.mlp.activation) * product(x, w, "mlp.up"), w, "mlp.down")


def embedding_multiplier(config: ModelConfig) -> float:
    given = config.embedding_multiplier
    return math.sqrt(config.hidden_size) if isinstance(given, str) else given


def logits(products: Tensor, config: ModelConfig) -> Tensor:
    """Of hidden states times the head; under muP divided by how much wider the model is than its base."""
    out = products * config.logit_scale
    if config.mup.base_hidden_size is not None:
        out = out * config.mup.base_hidden_size / config.hidden_size
    cap = config.final_logit_softcapping
    return out if cap is None else cap * torch.tanh(out / cap)


def layer(
    x: Tensor,
    w: Mapping[str, Tensor],
    config: ModelConfig,
    branches: Mapping[str, Callable[[Tensor], Tensor]],
    dropped: Callable[[Tensor, str], Tensor],
    *,
    num_layers: int,
) -> Tensor:
    """x through the branches of one layer, by name; `dropped` is the dropout of a branch's output."""
    placement, residual = config.norm.placement, config.residual

    def step(name: str) -> Tensor | float:
        if residual.learned_step_size == "layer":
            return w["step_size"]
        if residual.learned_step_size == "branch":
            return w[f"{name}_step_size"]
        return 1 / math.sqrt(num_layers) if residual.step_size == "inverse_sqrt_layers" else float(residual.step_size)

    def change(name: str, read: Tensor) -> Tensor:
        if placement == "post":
            out = branches[name](read)
        else:
            out = branches[name](norm(read, w, f"{next(iter(branches)) if residual.parallel == 'one_norm' else name}_norm", config))
        if placement == "sandwich":
            out = norm(out, w, f"{name}_output_norm", config)
        return step(name) * dropped(out, name)

    if residual.parallel != "none":
        return x + sum(change(name, x) for name in branches)
    for name in branches:
        x = x + change(name, x)
        if placement == "post":
            x = norm(x, w, f"{name}_norm", config)
    return x
