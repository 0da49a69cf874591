"""A keyed permutation of 0..n-1 that is computed, never stored: a Feistel network with cycle walking.

The order of training data is f(key, index), so a place in it is a number: nothing to save, nothing to lose. Keys are
text; the same key and n give the same order for ever (a golden test holds it).
"""

from __future__ import annotations

import hashlib

import numpy as np

NUM_ROUNDS = 8  # 4 are enough with ideal round functions (Luby and Rackoff 1988); ours are cheap and domains may be tiny
_MIN_BITS = 6
_MASK_64 = (1 << 64) - 1
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # the finaliser of splitmix64


class Permutation:
    """A bijection of 0..n-1 chosen by `key`."""

    def __init__(self, n: int, *, key: str) -> None:
        assert 0 <= n < 1 << 62
        self.n = n
        bits = max(_MIN_BITS, (n - 1).bit_length())
        self._low_bits = bits // 2
        self._low_mask = (1 << self._low_bits) - 1
        self._high_mask = (1 << (bits - self._low_bits)) - 1
        digest = hashlib.shake_256(f"megatron-lite permutation 1\n{n}\n{key}".encode()).digest(8 * NUM_ROUNDS)
        self._keys = [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(NUM_ROUNDS)]

    def __call__(self, index: int) -> int:
        """Where `index` goes."""
        assert 0 <= index < self.n, (index, self.n)
        value = self._forward(index)
        while value >= self.n:  # walking the cycle stays a bijection; the domain is less than 2n (or 64), so it is short
            value = self._forward(value)
        return value

    def inverse(self, value: int) -> int:
        """Which index goes to `value`."""
        assert 0 <= value < self.n, (value, self.n)
        index = self._backward(value)
        while index >= self.n:
            index = self._backward(index)
        return index

    def _forward(self, x: int) -> int:
        high, low = x >> self._low_bits, x & self._low_mask
        for i, key in enumerate(self._keys):
            if i % 2 == 0:
                high ^= _mix(low ^ key) & self._high_mask
            else:
                low ^= _mix(high ^ key) & self._low_mask
        return high << self._low_bits | low

    def _backward(self, x: int) -> int:
        high, low = x >> self._low_bits, x & self._low_mask
        for i in range(NUM_ROUNDS - 1, -1, -1):
            if i % 2 == 0:
                high ^= _mix(low ^ self._keys[i]) & self._high_mask
            else:
                low ^= _mix(high ^ self._keys[i]) & self._low_mask
        return high << self._low_bits | low

    def many(self, start: int, stop: int) -> np.ndarray:
        """The images of start..stop-1 as int64, equal to calling one by one."""
        values = self._forward_many(np.arange(start, stop, dtype=np.uint64))
        while (outside := values >= self.n).any():
            values[outside] = self._forward_many(values[outside])
        return values.astype(np.int64)

    def _forward_many(self, x: np.ndarray) -> np.ndarray:
        high, low = x >> np.uint64(self._low_bits), x & np.uint64(self._low_mask)
        for i, key in enumerate(self._keys):
            if i % 2 == 0:
                high = high ^ (_mix_many(low ^ np.uint64(key)) & np.uint64(self._high_mask))
            else:
                low = low ^ (_mix_many(high ^ np.uint64(key)) & np.uint64(self._low_mask))
        return high << np.uint64(self._low_bits) | low


def _mix(x: int) -> int:
    x = ((x ^ x >> 30) * _MULTIPLIERS[0]) & _MASK_64
    x = ((x ^ x >> 27) * _MULTIPLIERS[1]) & _MASK_64
    return x ^ x >> 31


def _mix_many(x: np.ndarray) -> np.ndarray:
    x = (x ^ x >> np.uint64(30)) * np.uint64(_MULTIPLIERS[0])
    x = (x ^ x >> np.uint64(27)) * np.uint64(_MULTIPLIERS[1])
    return x ^ x >> np.uint64(31)
