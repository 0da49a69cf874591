"""A norm, or its gradient, is not what the formula says."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron_lite.layers.norms import RMSNorm


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-6), (torch.bfloat16, 6e-3), (torch.float64, 1e-12)])
def test_output_and_gradients_are_those_of_float64(dtype: torch.dtype, limit: float) -> None:
    torch.manual_seed(1)
    norm = RMSNorm(48, name="norm.weight", eps=1e-5).to(dtype)
    torch.nn.init.normal_(norm.weight)
    x = (torch.randn(3, 7, 48) * torch.logspace(-3, 2, 7)[:, None]).to(dtype).requires_grad_()  # from below eps to far above
    upstream = torch.randn(3, 7, 48).to(dtype)
    out = norm(x)
    out.backward(upstream)
    exact_x, exact_weight = (value.detach().double().requires_grad_() for value in (x, norm.weight))
    exact = F.rms_norm(exact_x, (48,), exact_weight, 1e-5)
    exact.backward(upstream.double())
    for ours, true in ((out, exact), (x.grad, exact_x.grad), (norm.weight.grad, exact_weight.grad)):
        assert ours is not None and true is not None and ours.dtype == dtype
        assert (ours.double() - true).norm() / true.norm() < limit
