"""Between a rank's local parameters and the logical tensors that they are blocks of."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from megatron_lite.models.batch import Batch, DropoutKey
from megatron_lite.parallel.shard_spec import Piece, spec_of

Blocks = list[tuple[Piece, Tensor]]


def weight(parameter: Tensor) -> Tensor:
    return parameter


def gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def blocks_of(model: nn.Module, read: Callable[[Tensor], Tensor] = weight) -> Blocks:
    """On a rank: its blocks of every logical tensor, fp32 copies of what `read` gives for the parameter."""
    blocks = []
    for parameter in model.parameters():
        flat = read(parameter).detach().float().reshape(-1)
        for piece in spec_of(parameter).pieces:
            blocks.append((piece, flat[piece.offset : piece.offset + piece.numel].reshape(piece.shape).clone()))
    return blocks


def assemble(ranks: Iterable[Blocks]) -> dict[str, Tensor]:
    """Whole logical tensors by name. What several ranks hold must be bit-equal, and nothing may be missing."""
    whole: dict[str, Tensor] = {}
    seen: dict[str, Tensor] = {}
    for blocks in ranks:
        for piece, block in blocks:
            where = tuple(slice(start, start + size) for start, size in zip(piece.start, piece.shape))
            out = whole.setdefault(piece.name, torch.zeros(piece.global_shape))
            have = seen.setdefault(piece.name, torch.zeros(piece.global_shape, dtype=torch.bool))
            if have[where].any():
                assert have[where].all() and torch.equal(out[where], block), f"{piece.name} differs between ranks"
            out[where], have[where] = block, True
    for name, have in seen.items():
        assert have.all(), f"{name}: elements on no rank"
    return whole


def load_logical(model: nn.Module, logical: dict[str, Tensor]) -> None:
    """Put whole logical tensors into the local parameters; padding is left alone."""
    with torch.no_grad():
        for parameter in model.parameters():
            flat = parameter.data.view(-1)
            for piece in spec_of(parameter).pieces:
                where = tuple(slice(start, start + size) for start, size in zip(piece.start, piece.shape))
                flat[piece.offset : piece.offset + piece.numel] = logical[piece.name][where].reshape(-1).to(flat.dtype)


def assert_recomputing_changes_nothing(build: Callable[[str], nn.Module], batch: Batch) -> None:
    """`build` gives a model with dropout by its activation checkpointing: loss and every gradient are bit-equal with all kinds of it."""
    results = []
    for checkpointing in ("none", "selective", "full"):
        model = build(checkpointing)
        loss, _ = model(batch, DropoutKey(1, 2))
        loss.backward()
        results.append((loss.detach(), assemble([blocks_of(model, gradient)])))
    (kept_loss, kept), *again = results
    for loss, gradients in again:
        assert torch.equal(loss, kept_loss) and gradients.keys() == kept.keys()
        for name, tensor in gradients.items():
            assert torch.equal(tensor, kept[name]), name
