"""A norm, or its gradient, is not what the formula says."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lite.layers.norms import LayerNorm, RMSNorm

NORMS = {
    "rms": RMSNorm(48, name="norm.weight", eps=1e-5),
    "rms-zero-centred": RMSNorm(48, name="norm.weight", eps=1e-5, zero_centred=True),
    "layer": LayerNorm(48, name="norm.weight", eps=1e-5, bias=False),
    "layer-bias": LayerNorm(48, name="norm.weight", eps=1e-5, bias=True),
    "layer-bias-zero-centred": LayerNorm(48, name="norm.weight", eps=1e-5, bias=True, zero_centred=True),
}


def exact(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """By torch, in float64."""
    gain = weight + 1 if "zero-centred" in kind else weight
    return F.rms_norm(x, (48,), gain, 1e-5) if kind.startswith("rms") else F.layer_norm(x, (48,), gain, bias, 1e-5)


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-6), (torch.bfloat16, 6e-3), (torch.float64, 1e-12)])
def test_output_and_gradients_are_those_of_float64(kind: str, dtype: torch.dtype, limit: float) -> None:
    torch.manual_seed(1)
    norm = NORMS[kind].to(dtype)
    for parameter in norm.parameters():
        parameter.grad = None
        torch.nn.init.normal_(parameter)
    x = (torch.randn(3, 7, 48) * torch.logspace(-3, 2, 7)[:, None]).to(dtype).requires_grad_()  # from below eps to far above
    upstream = torch.randn(3, 7, 48).to(dtype)
    out = norm(x)
    out.backward(upstream)
    ours = [x, *norm.parameters()]
    theirs = [value.detach().double().requires_grad_() for value in ours]
    wanted = exact(theirs[0], theirs[1], theirs[2] if len(theirs) > 2 else None, kind)
    wanted.backward(upstream.double())
    for mine, true in ((out, wanted), *((a.grad, b.grad) for a, b in zip(ours, theirs, strict=True))):
        assert mine is not None and true is not None and mine.dtype == dtype
        assert (mine.double() - true).norm() / true.norm() < limit


def test_b055_a_gain_near_one_keeps_its_bits_in_bf16() -> None:
    """1 + w is made in fp32: in bf16 a w of 2^-9 would vanish beside the 1."""
    norm = RMSNorm(32, name="norm.weight", eps=1e-6, zero_centred=True).to(torch.bfloat16)
    torch.nn.init.constant_(norm.weight, 2.0**-9)
    x = 300 + 50 * torch.rand(64, 32)
    weightless = (x.bfloat16().float() * x.bfloat16().float().square().mean(-1, keepdim=True).rsqrt()).double()
    ratio = norm(x.bfloat16()).double().sum() / weightless.sum()
    assert abs(ratio - (1 + 2.0**-9)) < 5e-4


def test_few_rows_without_gradient_are_the_same() -> None:
    """What decoding takes is the norm and the rotation that training takes."""
    from megatron_lite.attention_config import RopeConfig
    from megatron_lite.layers.positions import rotate, rotation

    norm = RMSNorm(48, name="norm.weight", eps=1e-5)
    torch.nn.init.normal_(norm.weight)
    x, heads = torch.randn(2, 3, 48), torch.randn(2, 3, 4, 16)
    turned = rotation(torch.tensor([[5, 6, 7], [0, 1, 40]]), 16, RopeConfig())
    want = norm(x), rotate(heads, turned), rotate(heads.bfloat16(), turned)
    with torch.inference_mode():
        got = norm(x), rotate(heads, turned), rotate(heads.bfloat16(), turned)
    assert torch.allclose(got[0], want[0], rtol=1e-6, atol=1e-6)
    assert torch.equal(got[1], want[1]) and torch.equal(got[2], want[2]) and got[2].dtype == torch.bfloat16
