"""Products that go to another library compute something else than torch's own, or lose a gradient."""

from __future__ import annotations

import time

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lite.layers import matmul

needs_onednn = pytest.mark.skipif(matmul._onednn is None, reason="no AVX-512, or a torch without oneDNN's product")


def gradients(function: object, *inputs: Tensor) -> tuple[Tensor, ...]:
    inputs = tuple(each.clone().requires_grad_() for each in inputs)
    out = function(*inputs)  # type: ignore[operator]
    return out.detach(), *torch.autograd.grad((out * torch.arange(out.numel()).view_as(out).cos()).sum(), inputs)


@pytest.mark.parametrize("shape", [(3, 5, 7), (2, 200, 64), (1, 333, 130)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_linear_and_its_gradients_are_those_of_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(shape, dtype=dtype), torch.randn(203, shape[-1], dtype=dtype)
    for inputs in ((x, weight), (x, weight, torch.randn(203, dtype=dtype))):
        for ours, theirs in zip(gradients(matmul.linear, *inputs), gradients(F.linear, *inputs), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5 if dtype != torch.bfloat16 else 1e-2, atol=2e-4)


@needs_onednn
def test_large_fp32_products_are_as_exact_as_fp32_is() -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(512, 300), torch.randn(700, 300)
    exact = (x.double() @ weight.double().t()).float()
    assert matmul._serves(x, weight)
    assert (matmul.linear(x, weight) - exact).norm() / exact.norm() < 1e-6  # tf32 or bf16 inside would be 1e-4 and more


def test_transposed_views_are_read_as_they_are() -> None:
    torch.manual_seed(1)
    a, b = torch.randn(260, 300).t(), torch.randn(260, 310).t()
    torch.testing.assert_close(matmul.times_transposed(a, b), a @ b.t(), rtol=1e-5, atol=1e-4)


@needs_onednn
def test_views_with_gaps_do_not_fall_to_reference_loops() -> None:
    a, b = torch.randn(600, 2, 200)[:, 0], torch.randn(700, 2, 200)[:, 1]
    began = time.process_time()
    torch.testing.assert_close(matmul.times_transposed(a, b), a @ b.t(), rtol=1e-5, atol=1e-4)
    assert time.process_time() - began < 2.0


@needs_onednn
def test_a_row_does_not_depend_on_other_rows() -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(256, 128), torch.randn(300, 128)
    other = x.clone()
    other[128:] = torch.randn(128, 128)
    assert torch.equal(matmul.linear(x, weight)[:128], matmul.linear(other, weight)[:128])


@needs_onednn
@pytest.mark.parametrize("num_rows", [203, 1024, 8192])
@pytest.mark.parametrize("rows", [1, 3, 8, 200])
def test_a_matrix_laid_out_by_columns_multiplies_alike(rows: int, num_rows: int) -> None:
    torch.manual_seed(1)
    x, weight, bias = torch.randn(rows, 130), torch.randn(num_rows, 130), torch.randn(num_rows)
    laid = matmul.by_columns(weight)
    assert torch.equal(laid, weight)
    assert laid.t().is_contiguous() == (num_rows != 8192)  # 4 KiB columns, and large enough for oneDNN: left as it was
    with torch.no_grad():
        torch.testing.assert_close(matmul.linear(x, laid, bias), F.linear(x, weight, bias), rtol=1e-5, atol=2e-4)
    assert matmul.by_columns(laid).data_ptr() == laid.data_ptr()  # a second time is no copy
    assert matmul.by_columns(weight.bfloat16()).is_contiguous()
