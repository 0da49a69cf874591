"""A bias under tensor parallelism is added once a rank, or its gradient is a part of it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lite.layers.linear import ColumnLinear, RowLinear
from megatron_lite.parallel.collectives import all_gather, own_block
from megatron_lite.parallel.replicated import register_gradient_sums
from tests.logical import Blocks, assemble, blocks_of, gradient, load_logical
from tests.ranks import Ranks, groups_of

WIDTH, INSIDE, LENGTH = 8, 12, 6
SHAPES = {
    "a.weight": (INSIDE, WIDTH),
    "b.weight": (INSIDE, WIDTH),
    "o.weight": (WIDTH, INSIDE),
    "a.bias": (INSIDE,),
    "b.bias": (INSIDE,),
    "o.bias": (WIDTH,),
}


def tensors() -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Weights, an input and what its output's gradient is, alike on every rank."""
    draw = torch.Generator().manual_seed(3)
    weights = {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}
    return weights, torch.randn(2, LENGTH, WIDTH, generator=draw), torch.randn(2, LENGTH, WIDTH, generator=draw)


def both(split: bool) -> tuple[Tensor, Blocks]:
    """On a rank: the output of a(x) * b(x) through o, whole, and gradients."""
    groups = groups_of(tp=2, sequence_parallel=split)
    model = nn.Module()
    model.into = ColumnLinear(WIDTH, {"a.weight": INSIDE, "b.weight": INSIDE}, groups, bias=True)
    model.out = RowLinear(INSIDE, WIDTH, groups, name="o.weight", bias=True)
    register_gradient_sums(model, groups)
    weights, x, upstream = tensors()
    load_logical(model, weights)
    x, upstream = (own_block(each, groups.tp, dim=1) if split else each for each in (x, upstream))
    left, right = model.into(x, split=split).chunk(2, dim=-1)
    out = model.out(left * right, split=split)
    out.backward(upstream)
    return all_gather(out.detach(), groups.tp, dim=1) if split else out.detach(), blocks_of(model, gradient)


@pytest.mark.parametrize("split", [False, True])
def test_output_and_gradients_are_those_of_one_process(ranks2: Ranks, split: bool) -> None:
    weights, x, upstream = tensors()
    for tensor in weights.values():
        tensor.requires_grad_()
    left, right = (F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"]) for name in "ab")
    out = F.linear(left * right, weights["o.weight"], weights["o.bias"])
    out.backward(upstream)
    results = ranks2.run(both, split)
    for found, _ in results:
        torch.testing.assert_close(found, out.detach())
    for name, found in assemble(blocks for _, blocks in results).items():
        torch.testing.assert_close(found, weights[name].grad, msg=name)
