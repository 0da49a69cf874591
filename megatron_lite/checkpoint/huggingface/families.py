"""How a model of ours and a Hugging Face folder name the same thing: one table a model family, read in both directions.

What the table doesn't name is refused by name: a key of `model` that differs from its default and that the family has no
counterpart for, or a key of config.json that makes their model another function than ours. No torch here.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from data_pipeline.errors import ConfigError, Fault
from data_pipeline.schema import validate
from megatron_lite.model_config import ModelConfig

REQUIRED = object()
_ABSENT = object()


@dataclass(frozen=True)
class Key:
    """A number that both configs have. Several names of theirs are spellings of different versions, all written, all read."""

    ours: str  # dotted, below `model`
    theirs: tuple[str, ...]  # dotted, in config.json
    default: object = REQUIRED  # what they take where config.json is silent
    computes: bool = True  # it changes what trained weights compute; else only how they are trained or how far they reach


@dataclass(frozen=True)
class Fixed:
    """A key of theirs that must say what we do, where it stands."""

    theirs: str
    allowed: tuple[object, ...]


@dataclass(frozen=True)
class Tensor:
    """The same tensor under both names, of the same layout; `{layer}` is the layer's number. `shape` in letters of `sizes`."""

    ours: str
    theirs: str
    shape: str
    untied: bool = False  # absent where the head is the embedding


@dataclass(frozen=True)
class Family:
    """Everything that is known of one architecture of theirs."""

    architecture: str
    model_type: str
    keys: tuple[Key, ...]
    written: Mapping[str, object]  # what config.json says besides
    fixed: tuple[Fixed, ...]
    training_only: tuple[str, ...]  # keys of ours that they have no place for, and that trained weights don't need
    tensors: tuple[Tensor, ...]
    ignored: str  # a pattern of their tensors that hold nothing learnt
    limits: Callable[[ModelConfig], list[Fault]]  # what their library refuses to build

    def names(self, config: ModelConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
        """(their name, shape) of every logical tensor, in the order of their files."""
        lengths = sizes(config)
        found = {}
        for number, row in _rows(self.tensors, config.num_hidden_layers):
            if not (row.untied and config.tie_word_embeddings):
                shape = tuple(lengths[letter] for letter in row.shape)
                found[row.ours.format(layer=number)] = (row.theirs.format(layer=number), shape)
        return found

    def is_ignored(self, name: str, config: ModelConfig) -> bool:
        """Whether their tensor may stand in a file without being read: constants, and the copy of a tied head."""
        tied = {row.theirs for row in self.tensors if row.untied} if config.tie_word_embeddings else set()
        return name in tied or re.fullmatch(self.ignored, name) is not None


def sizes(config: ModelConfig) -> dict[str, int]:
    """Lengths of dims by letter: V vocabulary, D model, Q all query heads, K all key-value heads, F feed-forward."""
    queries, keys = config.num_attention_heads * config.head_size, config.kv_heads * config.head_size
    return {"V": config.vocabulary, "D": config.hidden_size, "Q": queries, "K": keys, "F": config.intermediate_size}


def _rows(rows: tuple[Tensor, ...], num_layers: int) -> Iterator[tuple[int, Tensor]]:
    """Rows of layers once for each layer, where the first of them stands."""
    layered = [row for row in rows if "{layer}" in row.ours]
    for row in rows:
        if row not in layered:
            yield 0, row
        elif row is layered[0]:
            yield from ((number, each) for number in range(num_layers) for each in layered)


# ------------------------------------------------------------------------------------------------------------ ours to theirs


def to_tree(family: Family, config: ModelConfig) -> dict[str, Any]:
    """config.json without the special ids. Raises ConfigError naming every key that the architecture can't represent."""
    values, defaults = dict(leaves(config.model_dump(mode="json"))), dict(leaves(ModelConfig().model_dump(mode="json")))
    known = {key.ours for key in family.keys} | set(family.training_only)
    faults = [
        Fault(f"model.{name}", value, repr(defaults.get(name)), f"{family.architecture} has no counterpart: it can't be exported")
        for name, value in values.items()
        if name not in known and value != defaults.get(name, _ABSENT)
    ]
    faults += family.limits(config)
    if faults:
        raise ConfigError(faults)
    values |= {"num_key_value_heads": config.kv_heads, "head_dim": config.head_size}
    tree: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type, **copy.deepcopy(dict(family.written))}
    for key in family.keys:
        for theirs in key.theirs:
            _put(tree, theirs, values[key.ours])
    return tree


def left_behind(family: Family, config: ModelConfig) -> list[str]:
    """Settings of training that differ from their defaults and don't go along, as `key value`."""
    defaults = dict(leaves(ModelConfig().model_dump(mode="json")))
    values = leaves(config.model_dump(mode="json"))
    return [f"model.{name} {value}" for name, value in values if name in family.training_only and value != defaults[name]]


# ------------------------------------------------------------------------------------------------------------ theirs to ours


def from_tree(families: tuple[Family, ...], tree: Mapping[str, Any], *, where: str) -> tuple[Family, ModelConfig]:
    """The family and the model section of a config.json. Raises ConfigError naming everything that we don't do."""
    family = _family_of(families, tree, where=where)
    faults = [
        Fault(f"{where}: {fixed.theirs}", found, " or ".join(map(repr, fixed.allowed)), "this program has no such layer")
        for fixed in family.fixed
        if (found := _get(tree, fixed.theirs)) is not _ABSENT and not any(_same(found, value) for value in fixed.allowed)
    ]
    values: dict[str, Any] = {}
    for key in family.keys:
        found = {name: value for name in key.theirs if (value := _get(tree, name)) is not _ABSENT and value is not None}
        distinct = list(found.values())
        if any(not _same(value, distinct[0]) for value in distinct):
            faults.append(Fault(f"{where}: {' and '.join(found)}", distinct, "the same value", "two versions of one key disagree"))
        elif distinct or key.default is not REQUIRED:
            _put(values, key.ours, distinct[0] if distinct else key.default)
        else:
            faults.append(Fault(f"{where}: {key.theirs[0]}", None, "a value", "the folder's config.json is incomplete"))
    if faults:
        raise ConfigError(faults)
    return family, validate(ModelConfig, values, prefix=where)


def differences(family: Family, ours: ModelConfig, theirs: ModelConfig, *, where: str) -> list[Fault]:
    """Every key of the run's model section with which weights made for `theirs` would compute something else."""
    one, other = (
        {**dict(leaves(model.model_dump(mode="json"))), "num_key_value_heads": model.kv_heads, "head_dim": model.head_size}
        for model in (ours, theirs)
    )
    return [
        Fault(f"model.{key.ours}", one[key.ours], f"{other[key.ours]!r} as in {where}", f"set model.{key.ours}={_yaml(other[key.ours])}")
        for key in family.keys
        if key.computes and not _same(one[key.ours], other[key.ours])
    ]


def _family_of(families: tuple[Family, ...], tree: Mapping[str, Any], *, where: str) -> Family:
    named = tree.get("architectures") or []
    for family in families:
        if family.architecture in named or (not named and tree.get("model_type") == family.model_type):
            return family
    got = ", ".join(map(str, named)) or tree.get("model_type")
    raise ConfigError([Fault(f"{where}: architectures", got, " or ".join(family.architecture for family in families))])


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything that is no mapping."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _get(tree: Mapping[str, Any], dotted: str) -> Any:
    node: Any = tree
    for part in dotted.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return _ABSENT
        node = node[part]
    return node


def _put(tree: dict[str, Any], dotted: str, value: object) -> None:
    *parents, last = dotted.split(".")
    for part in parents:
        tree = tree.setdefault(part, {})
    tree[last] = value


def _same(one: object, other: object) -> bool:
    """Equal, and not a bool beside a number."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
