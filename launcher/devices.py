"""Peak arithmetic rates of devices, for MFU."""

from __future__ import annotations

# Dense bf16 FLOP/s from the makers' data sheets; the first name that occurs in the device's name counts.
PEAK_BF16_FLOPS = (
    ("B200", 2.25e15),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("A40", 149.7e12),
    ("A10G", 70e12),
    ("A10", 125e12),
    ("L4", 121e12),
    ("RTX 4090", 165.2e12),
    ("RTX 3090", 71e12),
)


def peak_flops(device_name: str, precision: str) -> float | None:
    """FLOP/s of one device at this precision; None where we don't know it. fp32 rates depend on TF32 and are left out."""
    if precision != "bf16":
        return None
    return next((peak for name, peak in PEAK_BF16_FLOPS if name in device_name), None)


def mfu(*, tokens_per_second: float, flops_per_token: float, num_devices: int, peak: float) -> float:
    """Model FLOPs utilisation: tokens/s x FLOPs/token / (devices x peak) (Chowdhery et al. 2022, appendix B)."""
    return tokens_per_second * flops_per_token / (num_devices * peak)
