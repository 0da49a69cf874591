"""Initial weights as a pure function of (seed, logical name, logical index): alike on every layout and machine.

A logical matrix is made of 256 x 256 tiles. Element (i, j) of a tile is the inverse CDF, in float64, of one draw
of Philox keyed by (seed, name) at the counter of (tile, i, j), rounded to fp32. Only rows that are asked for are drawn.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from megatron_lite.layers.query_key import initial_factor
from megatron_lite.model_config import ModelConfig
from megatron_lite.parallel.shard_spec import Piece, ShardSpec, spec_of

TILE = 256


@dataclass(frozen=True)
class Distribution:
    """normal(0, std), uniform in (-bound, bound), or the same constant everywhere."""

    std: float = 0.0
    bound: float = 0.0
    constant: float = 0.0

    @property
    def is_drawn(self) -> bool:
        return self.std > 0 or self.bound > 0

    def of(self, uniform: np.ndarray) -> np.ndarray:
        """float64 draws of it from draws in (0, 1)."""
        if self.bound > 0:
            return (2.0 * uniform - 1.0) * self.bound
        return torch.special.ndtri(torch.from_numpy(uniform)).numpy() * self.std

    def times(self, factor: float) -> Distribution:
        return Distribution(self.std * factor, self.bound * factor, self.constant)


def distribution(name: str, shape: Sequence[int], config: ModelConfig) -> Distribution:
    """A logical parameter's, by its name and its whole shape."""
    init, layers = config.init, config.encoder_layers if name.startswith("encoder.") else config.num_hidden_layers
    if name.endswith("norm.weight"):
        gain = 0.0 if init.zero_residual and name.endswith("output_norm.weight") else 1.0
        return Distribution(constant=gain - 1.0 if config.norm.zero_centred else gain)
    if name.endswith("step_size"):
        return Distribution(constant=config.residual.step(layers))
    if name.endswith((".bias", ".sinks", ".log_temperature")):
        return Distribution(constant=0.0)
    if name.endswith(".cosine_gain"):
        return Distribution(constant=math.sqrt(config.head_size))
    if name.endswith("position_bias.weight"):  # a table: no sum runs over it
        return Distribution(std=init.std)
    if is_vocabulary(name):
        return _of_embedding(config)
    matrix = _of_matrix(shape, config).times(initial_factor(name, config))
    if not name.endswith(("attention.o.weight", "mlp.down.weight")):
        return matrix
    if init.zero_residual and config.norm.placement != "sandwich":  # there the norm's gain is 0, as its gradient at 0 is 1 / sqrt(eps)
        return Distribution(constant=0.0)
    additions = (3 if config.encoder_layers and not name.startswith("encoder.") else 2) * layers  # to the residual stream
    return matrix.times(1 / math.sqrt(additions)) if init.scaled_residual else matrix


def is_vocabulary(name: str) -> bool:
    """Whether it is an embedding or the head: as wide as the model in one dim only, however wide that is."""
    return name.endswith(("embedding.weight", "lm_head.weight"))


def _of_matrix(shape: Sequence[int], config: ModelConfig) -> Distribution:
    if config.init.scheme == "xavier_uniform":
        return Distribution(bound=math.sqrt(6 / (shape[0] + shape[1])))
    if config.init.scheme == "small":
        return Distribution(std=math.sqrt(2 / (5 * config.hidden_size)))
    return Distribution(std=config.init.std / math.sqrt(config.width_multiplier))


def _of_embedding(config: ModelConfig) -> Distribution:
    by_scheme = {
        "normal": config.init.std,
        "small": math.sqrt(2 / (5 * config.hidden_size)),
        "xavier_uniform": 1 / math.sqrt(config.hidden_size),
    }
    return Distribution(std=config.init.embedding_std or by_scheme[config.init.scheme])


def local_init(spec: ShardSpec, config: ModelConfig, seed: int, *, start: int = 0, stop: int | None = None) -> Tensor:
    """The local parameter's initial elements start..stop in row-major order, exact fp32, flat. Padding is 0."""
    stop = math.prod(spec.local_shape) if stop is None else stop
    out = np.zeros(stop - start, dtype=np.float32)
    for piece in spec.pieces:
        first, last = max(start, piece.offset), min(stop, piece.offset + piece.numel)
        if first >= last:
            continue
        what = distribution(piece.name, piece.global_shape, config)
        part = out[first - start : last - start]
        if what.is_drawn:
            _fill(part, piece, what, seed, first - piece.offset)
        else:
            part[:] = what.constant
    return torch.from_numpy(out)


def _fill(out: np.ndarray, piece: Piece, what: Distribution, seed: int, first: int) -> None:
    """out = the piece's elements first..first+len(out), tile by tile."""
    width = piece.shape[1]
    row, last_row = first // width, -(-(first + out.size) // width)
    while row < last_row:
        logical = piece.start[0] + row
        num_rows = min(TILE - logical % TILE, last_row - row)
        band = _band(piece, what, seed, logical, num_rows).reshape(-1)
        begin, end = row * width, (row + num_rows) * width
        low, high = max(begin, first), min(end, first + out.size)
        out[low - first : high - first] = band[low - begin : high - begin]
        row += num_rows


def _band(piece: Piece, what: Distribution, seed: int, row: int, num_rows: int) -> np.ndarray:
    """fp32 [num_rows, width]: logical rows row..row+num_rows, all in one row of tiles, at the piece's columns."""
    first, width = piece.start[1], piece.shape[1]
    band = np.empty((num_rows, width), dtype=np.float32)
    for column in range(first // TILE * TILE, first + width, TILE):
        draws = _tile_rows(piece.name, seed, row // TILE, column // TILE, row % TILE, num_rows)
        low, high = max(column, first), min(column + TILE, first + width)
        band[:, low - first : high - first] = what.of(draws)[:, low - column : high - column]
    return band


def _tile_rows(name: str, seed: int, tile_row: int, tile_column: int, row: int, num_rows: int) -> np.ndarray:
    """float64 [num_rows, TILE] uniform in (0, 1), never either end: rows row..row+num_rows of a tile."""
    key = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:16], "little")
    bits = np.random.Philox(key=key, counter=[row * (TILE // 4), 0, tile_column, tile_row]).random_raw(num_rows * TILE)
    return (((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52).reshape(num_rows, TILE)


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
