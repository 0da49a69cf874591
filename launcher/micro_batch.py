"""The size of a micro-batch where the config leaves it open. No torch here: `mlite plan` needs it too."""

from __future__ import annotations

from typing import Literal

# Tokens a forward pass where the micro batch is `auto`: enough to fill the device, few enough to fit beside the model.
AUTO_TOKENS = {"cpu": 4096, "cuda": 16384}


def resolve_micro_batch(size: int | Literal["auto"], *, global_batch_size: int, dp: int, sequence_length: int, device_type: str) -> int:
    """Sequences a forward pass: as asked, else the largest divisor of this rank's share within AUTO_TOKENS, at least 1."""
    if isinstance(size, int):
        return size
    share, most = global_batch_size // dp, max(1, AUTO_TOKENS[device_type] // sequence_length)
    return max(divisor for divisor in range(1, min(share, most) + 1) if share % divisor == 0)
