"""What all ranks must know alike before any goes on: one choice, one list of failures. Bytes travel as tensors, not as pickles."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from data_pipeline.errors import CheckpointError
from megatron_lite.parallel.groups import Axis


def gather_bytes(payload: bytes, axis: Axis) -> list[bytes]:
    """Every rank's bytes, by rank, on the first rank of the axis; nothing on the others. Collective."""
    if axis.size == 1:
        return [payload]
    device = _device(axis)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(axis.size)]
    dist.all_gather(sizes, torch.tensor([len(payload)], device=device), group=axis.group)
    longest = max(int(size) for size in sizes)
    if longest == 0:
        return [b""] * axis.size if axis.rank == 0 else []
    mine = torch.zeros(longest, dtype=torch.uint8, device=device)
    mine[: len(payload)] = _tensor(payload).to(device)
    places = [torch.empty_like(mine) for _ in range(axis.size)] if axis.rank == 0 else None
    dist.gather(mine, places, dst=axis.ranks[0], group=axis.group)
    return [place.cpu().numpy().tobytes()[: int(size)] for place, size in zip(places or [], sizes)]


def broadcast_bytes(payload: bytes | None, axis: Axis) -> bytes:
    """The first rank's bytes, on every rank of the axis. Collective."""
    if axis.size == 1:
        assert payload is not None
        return payload
    device = _device(axis)
    size = torch.tensor([len(payload or b"")], device=device)
    dist.broadcast(size, src=axis.ranks[0], group=axis.group)
    if int(size) == 0:
        return b""
    data = _tensor(payload or b"").to(device) if axis.rank == 0 else torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(data, src=axis.ranks[0], group=axis.group)
    return data.cpu().numpy().tobytes()


def broadcast_json(value: Any, axis: Axis) -> Any:
    """The first rank's JSON value, on every rank of the axis. Collective."""
    return json.loads(broadcast_bytes(json.dumps(value).encode() if axis.rank == 0 else None, axis))


def gather_json(value: Any, axis: Axis) -> list[Any]:
    """Every rank's JSON value, by rank, on the first rank of the axis; nothing on the others. Collective."""
    return [json.loads(text) for text in gather_bytes(json.dumps(value, separators=(",", ":")).encode(), axis)]


def raise_together(error: BaseException | None, axis: Axis, *, doing: str) -> None:
    """Raises CheckpointError on every rank of the axis if any rank failed, naming who and why. Collective."""
    failures = gather_bytes(_sentence(error).encode(), axis)
    text = "\n".join(f"rank {rank}: {failure.decode()}" for rank, failure in enumerate(failures) if failure)
    told = broadcast_bytes(text.encode(), axis).decode()
    if told:
        lines = told.split("\n")
        shown = "\n".join(lines[:8] + ([f"... and {len(lines) - 8} more lines"] if len(lines) > 8 else []))
        raise CheckpointError(f"{doing}:\n{shown}") from error


def _sentence(error: BaseException | None) -> str:
    if error is None:
        return ""
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _tensor(payload: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(payload, dtype=np.uint8).copy())


def _device(axis: Axis) -> torch.device:
    """Where the group communicates: gloo on the CPU, nccl on this process's GPU."""
    if "gloo" in dist.get_backend(axis.group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
