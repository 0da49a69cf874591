"""Initial weights as a pure function of (seed, logical name, logical index): alike on every layout and machine.

A logical matrix is made of 256 x 256 tiles. Element (i, j) of a tile is the inverse normal CDF, in float64, of one draw
of Philox keyed by (seed, name) at the counter of (tile, i, j), rounded to fp32. Only rows that are asked for are drawn.
"""

from __future__ import annotations

import fnmatch
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from megatron_lite.model_config import ModelConfig
from megatron_lite.parallel.shard_spec import Piece, ShardSpec, spec_of

TILE = 256


@dataclass(frozen=True)
class Distribution:
    """normal(0, std), or the same constant everywhere."""

    std: float = 0.0
    constant: float = 0.0


def distribution(name: str, config: ModelConfig) -> Distribution:
    """Every logical parameter's distribution."""
    std, layers = config.init.std, config.encoder_layers if name.startswith("encoder.") else config.num_hidden_layers
    additions = 2 * config.encoder_layers if name.startswith("encoder.") else (3 if config.encoder_layers else 2) * config.num_hidden_layers
    residual = std / math.sqrt(additions) if config.init.scaled_residual else std
    table = {
        "*norm.weight": Distribution(constant=0.0 if config.norm.zero_centred else 1.0),
        "*step_size": Distribution(constant=config.residual.step(layers)),
        "*.bias": Distribution(constant=0.0),
        "*attention.o.weight": Distribution(std=residual),  # what adds to the residual stream, as GPT-2 scales it
        "*.mlp.down.weight": Distribution(std=residual),
        "*.weight": Distribution(std=std),
    }
    return next(value for pattern, value in table.items() if fnmatch.fnmatchcase(name, pattern))


def local_init(spec: ShardSpec, config: ModelConfig, seed: int, *, start: int = 0, stop: int | None = None) -> Tensor:
    """The local parameter's initial elements start..stop in row-major order, exact fp32, flat. Padding is 0."""
    stop = math.prod(spec.local_shape) if stop is None else stop
    out = np.zeros(stop - start, dtype=np.float32)
    for piece in spec.pieces:
        first, last = max(start, piece.offset), min(stop, piece.offset + piece.numel)
        if first >= last:
            continue
        what = distribution(piece.name, config)
        part = out[first - start : last - start]
        if what.std == 0.0:
            part[:] = what.constant
        else:
            _fill_normal(part, piece, what.std, seed, first - piece.offset)
    return torch.from_numpy(out)


def _fill_normal(out: np.ndarray, piece: Piece, std: float, seed: int, first: int) -> None:
    """out = the piece's elements first..first+len(out), tile by tile."""
    width = piece.shape[1]
    row, last_row = first // width, -(-(first + out.size) // width)
    while row < last_row:
        logical = piece.start[0] + row
        num_rows = min(TILE - logical % TILE, last_row - row)
        band = _band(piece, std, seed, logical, num_rows).reshape(-1)
        begin, end = row * width, (row + num_rows) * width
        low, high = max(begin, first), min(end, first + out.size)
        out[low - first : high - first] = band[low - begin : high - begin]
        row += num_rows


def _band(piece: Piece, std: float, seed: int, row: int, num_rows: int) -> np.ndarray:
    """fp32 [num_rows, width]: logical rows row..row+num_rows, all in one row of tiles, at the piece's columns."""
    first, width = piece.start[1], piece.shape[1]
    band = np.empty((num_rows, width), dtype=np.float32)
    for column in range(first // TILE * TILE, first + width, TILE):
        tile = _tile_rows(piece.name, seed, row // TILE, column // TILE, row % TILE, num_rows)
        low, high = max(column, first), min(column + TILE, first + width)
        band[:, low - first : high - first] = tile[:, low - column : high - column] * std
    return band


def _tile_rows(name: str, seed: int, tile_row: int, tile_column: int, row: int, num_rows: int) -> np.ndarray:
    """float64 [num_rows, TILE] standard normal: rows row..row+num_rows of a tile."""
    key = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:16], "little")
    bits = np.random.Philox(key=key, counter=[row * (TILE // 4), 0, tile_column, tile_row]).random_raw(num_rows * TILE)
    uniform = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52  # in (0, 1), never either end
    return torch.special.ndtri(torch.from_numpy(uniform)).numpy().reshape(num_rows, TILE)


def materialise(
    model: nn.Module,
    config: ModelConfig,
    *,
    seed: int,
    device: torch.device | str,
    dtype: torch.dtype,
    after_module: Callable[[nn.Module, list[nn.Parameter]], None] | None = None,
) -> None:
    """Give a model that was built on the meta device its initial weights, module by module; a tied parameter stays one.

    `after_module` is called with each module and the parameters just made for it, before the next module's are made:
    an engine that shards parameters does it there, so that the model never stands whole in memory.
    """
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        own = []
        for key, old in list(module._parameters.items()):
            if old is None:
                continue
            if id(old) not in made:
                spec = spec_of(old)
                value = local_init(spec, config, seed).view(spec.local_shape).to(device=device, dtype=dtype)
                new = nn.Parameter(value, requires_grad=old.requires_grad)
                new.__dict__.update(old.__dict__)  # the spec and DeepSpeed's mark
                made[id(old)] = new
                own.append(new)
            module._parameters[key] = made[id(old)]
        if own and after_module is not None:
            after_module(module, own)
