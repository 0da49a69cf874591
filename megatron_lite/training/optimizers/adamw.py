"""AdamW (Loshchilov and Hutter 2019) over groups: what decays and what does not, and what learns at a rate of its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from megatron_lite.config import OptimizerConfig
from megatron_lite.models.init import is_vocabulary
from megatron_lite.parallel.shard_spec import ShardSpec, spec_of

BIAS_TABLES = "position_bias.weight"  # of distances and heads: nothing in them grows with the width, and as biases they do not decay
STATES = ("exp_avg", "exp_avg_sq")


def decays(name: str, spec: ShardSpec, config: OptimizerConfig) -> bool:
    """Matrices decay; norm gains and biases never do; embeddings and the head as optimizer.decay_embeddings says.

    Decided by the spec's shape: under ZeRO-3 the parameter itself has been flattened away.
    """
    is_matrix = len(spec.local_shape) >= 2 and not name.endswith(BIAS_TABLES)
    return is_matrix and (config.decay_embeddings or not is_vocabulary(name))


def parameter_groups(
    named: Iterable[tuple[str, torch.nn.Parameter]], config: OptimizerConfig, *, width_multiplier: float = 1.0
) -> list[dict[str, Any]]:
    """Every parameter in exactly one group, in the model's order; a group that would be empty is left out.

    With a width multiplier m other than 1 (muP: Yang et al. 2022, table 8) the matrices inside the layers are groups of their own
    that learn at lr / m and decay as much as without it.
    """
    decayed: list[torch.nn.Parameter] = []
    plain: list[torch.nn.Parameter] = []
    inner: list[torch.nn.Parameter] = []
    for name, parameter in named:
        if width_multiplier != 1.0 and grows_both_ways(spec_of(parameter)):
            inner.append(parameter)
        else:
            (decayed if decays(name, spec_of(parameter), config) else plain).append(parameter)
    found = (
        {"params": inner, "weight_decay": config.weight_decay * width_multiplier, "lr_factor": 1.0 / width_multiplier},
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    )
    return [group for group in found if group["params"]]


def grows_both_ways(spec: ShardSpec) -> bool:
    """Whether it is a matrix whose rows and columns both grow with the model's width; embeddings and the head have tokens in one."""
    tables = any(is_vocabulary(piece.name) or piece.name.endswith(BIAS_TABLES) for piece in spec.pieces)
    return len(spec.local_shape) >= 2 and not tables and bool(spec.pieces)


def build_adamw(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.AdamW:
    """torch's AdamW in its fused form: one pass over memory for each tensor, on CPU and on CUDA."""
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def ensure_state(optimizer: torch.optim.Optimizer, tensors: Iterable[torch.Tensor]) -> None:
    """Zero moments and step 0 for each tensor that has none yet: what the first step would make."""
    for tensor in tensors:
        if not optimizer.state.get(tensor):
            optimizer.state[tensor] = {
                "step": torch.zeros((), dtype=torch.float32, device=tensor.device),  # never shared: each tensor counts its own
                **{state: torch.zeros_like(tensor, requires_grad=False) for state in STATES},
            }


def set_updates_done(optimizer: torch.optim.Optimizer, tensors: Iterable[torch.Tensor], number: int) -> None:
    """Write the counter of every tensor, in place."""
    for tensor in tensors:
        optimizer.state[tensor]["step"].fill_(float(number))


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """The learning rate, times a group's own factor where it has one."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_factor", 1.0)
