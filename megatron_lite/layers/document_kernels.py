"""Which kernel keeps documents apart, and why not a better one.

| kernel | what it is                                           | where                                            |
|--------|------------------------------------------------------|--------------------------------------------------|
| pieces | SDPA, piece by piece                                  | CPU                                              |
| varlen | FlashAttention over the pieces laid end to end       | fp16 and bf16, compute capability 8.0, E % 8 = 0 |
| flex   | FlexAttention, which skips tiles that hold no pair   | any dtype where Triton is, E >= 16               |
| blocks | SDPA with a bool [B, 1, S, S]                        | anywhere                                         |
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from typing import Literal

import torch

DocumentKernel = Literal["pieces", "varlen", "flex", "blocks"]
AskedKernel = Literal["auto", "varlen", "flex", "blocks"]


@dataclass(frozen=True)
class KernelChoice:
    """A kernel, and what stood against those that would have come first; "" where nothing did."""

    name: DocumentKernel
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})" if self.reason else self.name


@functools.lru_cache
def choose_kernel(
    asked: AskedKernel, *, device: torch.device, dtype: torch.dtype, head_size: int, changed_scores: str = ""
) -> KernelChoice:
    """The first of what was asked for, varlen, flex and blocks that this device, dtype and head size can have, and scores that are
    changed in this way, if they are."""
    if device.type == "cpu":
        if asked == "blocks":
            return KernelChoice("blocks")
        return KernelChoice("pieces", "" if asked == "auto" else f"on CPU {asked} has no backward")
    if changed_scores:
        return KernelChoice("blocks", "" if asked == "blocks" else f"not varlen or flex: {changed_scores}")
    triton = importlib.util.find_spec("triton") is not None
    return rank_kernels(asked, capability=torch.cuda.get_device_capability(device), dtype=dtype, head_size=head_size, triton=triton)


def rank_kernels(asked: AskedKernel, *, capability: tuple[int, int], dtype: torch.dtype, head_size: int, triton: bool) -> KernelChoice:
    """The choice on a CUDA device of this compute capability."""
    obstacles: list[str] = []
    if asked in ("auto", "varlen"):
        why = _obstacle_to_varlen(capability, dtype, head_size)
        if not why:
            return KernelChoice("varlen")
        obstacles.append(f"not varlen: {why}")
    if asked != "blocks":
        why = "Triton is not installed" if not triton else f"it takes head_dim from 16 on, not {head_size}" if head_size < 16 else ""
        if not why:
            return KernelChoice("flex", "; ".join(obstacles))
        obstacles.append(f"not flex: {why}")
    return KernelChoice("blocks", "; ".join(obstacles))


def _obstacle_to_varlen(capability: tuple[int, int], dtype: torch.dtype, head_size: int) -> str:
    if capability < (8, 0):
        return f"FlashAttention needs compute capability 8.0, this device has {capability[0]}.{capability[1]}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"FlashAttention has no {str(dtype).removeprefix('torch.')}"
    if head_size % 8 or head_size > 256:
        return f"FlashAttention takes head_dim in steps of 8 up to 256, not {head_size}"
    return ""
