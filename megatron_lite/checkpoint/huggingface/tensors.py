"""Where each logical tensor of a model lies among the tensors of a Hugging Face folder. No torch here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

from megatron_lite.model_config import ModelConfig

ENCODER = "encoder.layers."


@dataclass(frozen=True)
class Tensor:
    """The same tensor under both names; `{layer}` is the layer's number. `shape` is ours, in letters of `sizes`."""

    ours: str
    theirs: str
    shape: str
    transposed: bool = False  # theirs is [in, out]
    fused: str = ""  # theirs holds several of ours, the rows of one after those of the other: their letters
    part: int = 0  # which of those this one is
    when: tuple[str, object] | None = None  # a key of ours and the value with which there is such a tensor


@dataclass(frozen=True)
class Place:
    """Of a tensor of ours: where it lies in theirs, whose rows and columns are exchanged where `transposed`."""

    theirs: str
    stored_shape: tuple[int, ...]  # of theirs, as a file has it
    shape: tuple[int, ...]
    first_row: int = 0
    transposed: bool = False


def with_bias(ours: str, theirs: str, shape: str, *, transposed: bool = False) -> tuple[Tensor, Tensor]:
    """A weight and the bias of its rows."""
    return (
        Tensor(f"{ours}.weight", f"{theirs}.weight", shape, transposed=transposed),
        Tensor(f"{ours}.bias", f"{theirs}.bias", shape[0]),
    )


def sizes(config: ModelConfig) -> dict[str, int]:
    """Lengths of dims by letter: V vocabulary, D model, Q all query heads, K all key-value heads, F feed-forward, H heads, E a head,
    P positions, B buckets of distances."""
    heads, size = config.num_attention_heads, config.head_size
    lengths = {"V": config.vocabulary, "D": config.hidden_size, "Q": heads * size, "K": config.kv_heads * size}
    lengths |= {"F": config.intermediate_size, "H": heads, "E": size, "P": config.max_position_embeddings}
    return lengths | {"B": config.position.relative_attention_num_buckets}


def places(rows: tuple[Tensor, ...], config: ModelConfig, values: Mapping[str, object]) -> dict[str, Place]:
    """Of every logical tensor, in the order of their files. `values` are the model's by dotted key."""
    lengths = sizes(config)
    found = {}
    for number, row in _each_layer(rows, config):
        if row.when is None or values[row.when[0]] == row.when[1]:
            found[row.ours.format(layer=number)] = _place(row, number, lengths)
    return found


def _place(row: Tensor, layer: int, lengths: Mapping[str, int]) -> Place:
    shape = tuple(lengths[letter] for letter in row.shape)
    stored, first = shape, 0
    if row.fused:
        rows = [lengths[letter] for letter in row.fused]
        stored, first = (sum(rows), *shape[1:]), sum(rows[: row.part])
    return Place(row.theirs.format(layer=layer), stored[::-1] if row.transposed else stored, shape, first, row.transposed)


def _each_layer(rows: tuple[Tensor, ...], config: ModelConfig) -> Iterator[tuple[int, Tensor]]:
    """Rows of a stack's layers once for each layer, where the first of them stands."""

    def stack(row: Tensor) -> int:
        if "{layer}" not in row.ours:
            return 0
        return config.encoder_layers if row.ours.startswith(ENCODER) else config.num_hidden_layers

    for (num_layers, _), group in groupby(rows, lambda row: (stack(row), row.ours.startswith(ENCODER))):
        together = list(group)
        yield from ((number, row) for number in range(num_layers or 1) for row in together)
