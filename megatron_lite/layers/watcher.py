"""What is looked at inside a forward where somebody asked: sums of squares by key, on this rank."""

from __future__ import annotations

import torch
from torch import Tensor


class Watcher:
    """Sums over all that it was shown under a key. Nothing waits for the device."""

    def __init__(self) -> None:
        self.squares: dict[str, Tensor] = {}  # float64 scalars
        self.counts: dict[str, Tensor] = {}

    @torch.no_grad()
    def see(self, key: str, x: Tensor, *, copies: int = 1, mask: Tensor | None = None) -> None:
        """Add what x holds, where the mask says so; `copies`: how many tp ranks show the same, of which each is a share."""
        shown = x if mask is None else x.masked_fill(~mask, 0.0)
        squares = torch.linalg.vector_norm(shown, dtype=torch.float64).square() / copies
        count = squares.new_full((), x.numel()) if mask is None else mask.sum().double()
        self.squares[key] = self.squares[key] + squares if key in self.squares else squares
        self.counts[key] = self.counts[key] + count / copies if key in self.counts else count / copies
