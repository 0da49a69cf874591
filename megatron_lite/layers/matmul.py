"""Matrix products. In fp32 on AVX-512 processors they go to oneDNN: MKL, torch's own choice, is half as fast on AMD's."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_LEAST_MULTIPLICATIONS = 1 << 21  # below it the calls cost more than the products, with those of the backward
_LEAST_WITHOUT_GRADIENT = 1 << 20  # the call alone, of 1 to 8 rows
_PAGE = 4096  # bytes: addresses that differ by a multiple of it compete for the same places in the first cache


def _found() -> Any:
    """oneDNN's x @ weight^T in full fp32, which torch has for its compiler; None where it is not there."""
    if torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512":
        return getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    return None


_onednn = _found()


def times_transposed(a: Tensor, b: Tensor) -> Tensor:
    """a @ b^T: [..., K], [N, K] -> [..., N], without a gradient. The inputs may be transposed views."""
    return _product(a, b) if _serves(a, b) else F.linear(a, b)


def multiply_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out [M, N] = a @ b^T: [M, K], [N, K], without a gradient."""
    if _serves(a, b):
        out.copy_(_product(a, b))
    else:
        torch.mm(a, b.t(), out=out)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight^T + bias: [..., K], [N, K], [N] -> [..., N]."""
    learning = torch.is_grad_enabled()
    if not _serves(x, weight, _LEAST_MULTIPLICATIONS if learning else _LEAST_WITHOUT_GRADIENT):
        return F.linear(x, weight, bias)
    if learning:
        return _Linear.apply(x, weight, bias)
    out = _product(x, weight)
    return out if bias is None else out.add_(bias)


def by_columns(weight: Tensor) -> Tensor:
    """weight [N, K], the same numbers laid out column by column if the products of a few rows that decoding asks for are faster so: in
    fp32 on these processors. From memory MKL reads rows at 13 to 18 GB/s, columns at 16 to 29; oneDNN 16 to 28 and 20 to 37.

    Columns whose starts lie 4 KiB apart share a few sets of the cache, and oneDNN then takes 10: large ones stay as they are.
    """
    if _onednn is None or weight.dtype != torch.float32 or weight.device.type != "cpu":
        return weight
    num_rows = weight.shape[0]
    if num_rows * weight.element_size() % _PAGE == 0 and weight.numel() >= _LEAST_WITHOUT_GRADIENT:
        return weight
    return weight.t().contiguous().t()


def _serves(a: Tensor, b: Tensor, least: int = _LEAST_MULTIPLICATIONS) -> bool:
    if a.numel() * b.shape[0] < least or _onednn is None:
        return False
    return a.dtype == b.dtype == torch.float32 and a.device.type == "cpu"


def _product(a: Tensor, b: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return _whole_product(a, b)
    return _onednn(_dense(a), _dense(b), None, "none", [], "")


@torch.library.custom_op("megatron_lite::product", mutates_args=(), schema="(Tensor a, Tensor b) -> Tensor")
def _whole_product(a: Tensor, b: Tensor) -> Tensor:
    """The same as an operator of our own: torch's compiler takes oneDNN's for constant weights only."""
    return _onednn(_dense(a), _dense(b), None, "none", [], "")


@_whole_product.register_fake
def _shape_of_product(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(*a.shape[:-1], b.shape[0])


def _dense(x: Tensor) -> Tensor:
    """x, copied unless it or its transpose is without gaps: for others oneDNN has but its reference loops."""
    return x if x.is_contiguous() or (x.dim() == 2 and x.t().is_contiguous()) else x.contiguous()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        out = _product(x, weight)
        return out if bias is None else out.add_(bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        of_x = times_transposed(gradient, weight.t()) if ctx.needs_input_grad[0] else None
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = times_transposed(gradient.flatten(0, -2).t(), x.flatten(0, -2).t())
        return of_x, of_weight, gradient.flatten(0, -2).sum(dim=0) if ctx.needs_input_grad[2] else None
