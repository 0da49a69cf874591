"""Random bits as a pure function of logical coordinates, in integer operations that every device does alike.

A *row key* of 64 bits is the hash of (seed, step, sample, layer, site, coordinates...); an element's 32 bits are the hash of
its row key and its channel. Nothing depends on the layout, the device or what was drawn before.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # splitmix64's finalizer (Steele, Lea and Flood 2014)
_CHANNEL, _LOW_1, _LOW_2 = 0x9E3779B1, 0x7FEB352D, 0x846CA68B  # "lowbias32" (Wellons 2018)

_SCHEMA = "(Tensor keys, int word, SymInt[] starts, SymInt[] sizes, SymInt num_channels, float probability) -> Tensor"


@dataclass(frozen=True)
class DropoutKey:
    """What makes the dropout masks of one training step. Where a key is expected, None means evaluation: no dropout."""

    seed: int
    step: int


def sample_keys(key: DropoutKey, samples: Tensor) -> Tensor:
    """int64 hash of (seed, step, sample) for each of the samples [B]."""
    state = 0
    for word in (key.seed, key.step):
        state = _mix_number(state ^ _mix_number((word + _GOLDEN) & _WORD))
    return _mix(_mix(samples + _signed(_GOLDEN, 64)) ^ _signed(state, 64))


def site(name: str) -> int:
    """A place in the model as a word to fold: a constant of the code, so that compiled code need not hash strings."""
    return _signed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"), 64)


def folded(keys: Tensor, word: int) -> Tensor:
    """int64 hash of (key, word)."""
    return _mix(keys ^ word)


# One opaque operator: inductor keeps `arange` times a constant as a 64-bit index and would draw other bits.
@torch.library.custom_op("megatron_lite::keep_mask", mutates_args=(), schema=_SCHEMA)
def keep_mask(keys: Tensor, word: int, starts: list[int], sizes: list[int], num_channels: int, probability: float) -> Tensor:
    """bool [B, *sizes, num_channels]: False with `probability`, to within 2^-31.

    keys int64 [B]; `word` is the site; dim i of the sizes has the coordinates starts[i] .. starts[i] + sizes[i].
    """
    keys = folded(keys, word)
    for start, size in zip(starts, sizes):
        coordinates = torch.arange(start, start + size, device=keys.device)
        keys = _mix(keys.unsqueeze(-1) ^ _mix(coordinates + _signed(_GOLDEN, 64)))
    low = keys.to(torch.int32).unsqueeze(-1)  # the conversion wraps: the low 32 bits
    high = (keys >> 32).to(torch.int32).unsqueeze(-1)
    channels = torch.arange(num_channels, dtype=torch.int32, device=keys.device) * _signed(_CHANNEL, 32)
    bits = channels ^ low
    bits ^= (bits >> 16) & 0xFFFF  # a logical shift: int32's own carries the sign down
    bits *= _LOW_1
    bits ^= high
    bits ^= (bits >> 15) & 0x1FFFF
    bits *= _signed(_LOW_2, 32)
    bits ^= (bits >> 16) & 0xFFFF
    return (bits & 0x7FFFFFFF) >= round(probability * 2**31)


@keep_mask.register_fake
def _shape_of_keep_mask(keys: Tensor, word: int, starts: list[int], sizes: list[int], num_channels: int, probability: float) -> Tensor:
    return keys.new_empty((keys.shape[0], *sizes, num_channels), dtype=torch.bool)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed(_MIX_1, 64)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed(_MIX_2, 64)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _mix_number(x: int) -> int:
    x = ((x ^ (x >> 30)) * _MIX_1) & _WORD
    x = ((x ^ (x >> 27)) * _MIX_2) & _WORD
    return x ^ (x >> 31)


def _signed(word: int, bits: int) -> int:
    """The same bits read as a two's complement number."""
    return word - (1 << bits) if word >> (bits - 1) else word
