"""How a model of ours and a Hugging Face folder name the same thing: one table a model family, read in both directions.

What the table doesn't name is refused by name: a key of `model` that differs from its default and that the family has no
counterpart for, or a key of config.json that makes their model another function than ours. No torch here.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from data_pipeline.errors import ConfigError, Fault
from data_pipeline.schema import validate
from megatron_lite.checkpoint.huggingface.tensors import Place, Tensor, places
from megatron_lite.model_config import ModelConfig

REQUIRED = object()
ABSENT = object()


@dataclass(frozen=True)
class Key:
    """A number or word that both configs have. Several names of theirs are spellings of different versions, all written, all read."""

    ours: str  # dotted, below `model`
    theirs: tuple[str, ...]  # dotted, in config.json
    default: object = REQUIRED  # what they take where config.json is silent; a function of config.json where it depends
    computes: bool = True  # it changes what trained weights compute; else only how they are trained or how far they reach
    words: Mapping[object, tuple[object, ...]] | None = None  # by our word theirs, the first of which is written; null: the same
    nullable: bool = False  # null is a value of theirs, no silence

    def meaning(self, value: object) -> object:
        """Our value of theirs; ABSENT where we have none."""
        if self.words is None:
            return value
        return next((word for word, theirs in self.words.items() if any(_same(value, each) for each in theirs)), ABSENT)


@dataclass(frozen=True)
class Together:
    """Keys of ours that theirs say in some other way. Both functions raise ConfigError for what the other side has no word for."""

    ours: tuple[str, ...]  # dotted; with a dot at the end all that is below
    write: Callable[[ModelConfig], dict[str, Any]]  # to keys of config.json
    read: Callable[[Mapping[str, Any], str], dict[str, object]]  # from config.json, which is at this place, to dotted keys of ours


@dataclass(frozen=True)
class Fixed:
    """A key of theirs that must say what we do, where it stands."""

    theirs: str
    allowed: tuple[object, ...]


@dataclass(frozen=True)
class Family:
    """Everything that is known of one architecture of theirs."""

    architecture: str
    model_type: str
    keys: tuple[Key, ...]
    tensors: tuple[Tensor, ...]
    ignored: str = "^"  # a pattern of their tensors that hold nothing learnt
    copies: str = "^"  # a pattern of their tensors that are the embedding's copies; a tied head is another
    demands: Mapping[str, object] = field(default_factory=dict)  # dotted keys of ours that must be so; others unnamed are as by default
    together: tuple[Together, ...] = ()
    written: Mapping[str, object] = field(default_factory=dict)  # what config.json says besides
    fixed: tuple[Fixed, ...] = ()
    training_only: tuple[str, ...] = ()  # keys of ours that they have no place for, and that trained weights don't need
    unread: tuple[str, ...] = ()  # keys of ours that nothing reads in such a model
    limits: Callable[[ModelConfig], list[Fault]] = lambda _: []  # what else their library refuses to build
    head_as_stored: bool = False  # config.json says that the head is tied whatever it is: a head in the files that is no copy is not
    zeros: str = "^"  # a pattern of their tensors that ours lacks, and that must be all zero
    base: str = ""  # what names of tensors begin with, and do not where their bare model without a head was saved

    @cached_property
    def known(self) -> tuple[str, ...]:
        """Keys of ours that the family says something of, or that are of no matter to it."""
        spoken = [key.ours for key in self.keys] + [ours for group in self.together for ours in group.ours]
        return (*spoken, *self.demands, *self.training_only, *self.unread)

    @cached_property
    def without_effect(self) -> tuple[str, ...]:
        """Keys of ours that don't change what trained weights compute."""
        return (*(key.ours for key in self.keys if not key.computes), *self.training_only, *self.unread)

    def places(self, config: ModelConfig) -> dict[str, Place]:
        """Where every logical tensor lies, in the order of their files."""
        return places(self.tensors, config, values_of(config))

    def named(self, stored: Mapping[str, Any]) -> dict[str, Any]:
        """Tensors of a folder by the table's names, which those of a model that was saved without its head lack the beginning of."""
        bare = self.base and not any(name.startswith(self.base) for name in stored)
        return {f"{self.base}{name}" if bare else name: tensor for name, tensor in stored.items()}

    def is_ignored(self, name: str) -> bool:
        """Whether their tensor may stand in a file without being read."""
        return re.fullmatch(self.ignored, name) is not None

    def is_head(self, name: str) -> bool:
        """Whether their tensor is the head of a model that has one of its own."""
        return any(row.theirs == name for row in self.tensors if row.when == UNTIED)

    def original_of(self, name: str, config: ModelConfig) -> str | None:
        """The tensor that theirs must be a copy of, as a tied head is of the embedding; None where it is no copy."""
        if (config.tie_word_embeddings and self.is_head(name)) or re.fullmatch(self.copies, name):
            return next(row.theirs for row in self.tensors if row.ours == "embedding.weight")
        return None


UNTIED = ("tie_word_embeddings", False)


def names(key: str, patterns: tuple[str, ...]) -> bool:
    """Whether a dotted key is among these, or below one that ends with a dot."""
    return any(key.startswith(pattern) if pattern.endswith(".") else key == pattern for pattern in patterns)


def values_of(config: ModelConfig) -> dict[str, Any]:
    """The model section by dotted key, numbers in the place of those nulls that stand for one."""
    values = dict(leaves(config.model_dump(mode="json"))) | {"num_key_value_heads": config.kv_heads, "head_dim": config.head_size}
    if config.encoder_layers:
        values["encoder.num_hidden_layers"] = config.encoder_layers
    return values


# ------------------------------------------------------------------------------------------------------------ ours to theirs


def to_tree(family: Family, config: ModelConfig) -> dict[str, Any]:
    """config.json without the special ids. Raises ConfigError naming every key that the architecture can't represent."""
    faults = obstacles(family, config)
    if faults:
        raise ConfigError(faults)
    values = values_of(config)
    tree: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type, **copy.deepcopy(dict(family.written))}
    for key in family.keys:
        for theirs in key.theirs:
            _put(tree, theirs, values[key.ours] if key.words is None else key.words[values[key.ours]][0])
    for group in family.together:
        tree |= group.write(config)
    return tree


def obstacles(family: Family, config: ModelConfig) -> list[Fault]:
    """Everything of this model that the architecture has no counterpart for."""
    values, defaults = values_of(config), _defaults(config)
    fix = f"{family.architecture} has no counterpart: it can't be exported"
    faults = [
        Fault(f"model.{name}", value, repr(defaults.get(name)), fix)
        for name, value in values.items()
        if not names(name, family.known) and value != defaults.get(name, ABSENT)
    ]
    faults += [
        Fault(f"model.{name}", values[name], repr(wanted), f"{family.architecture} has nothing else: it can't be exported")
        for name, wanted in family.demands.items()
        if not _same(values[name], wanted)
    ]
    faults += [
        Fault(f"model.{key.ours}", values[key.ours], " or ".join(map(repr, key.words)), fix)
        for key in family.keys
        if key.words is not None and values[key.ours] not in key.words
    ]
    if faults:
        return faults
    for group in family.together:
        try:
            group.write(config)
        except ConfigError as error:
            faults += error.faults
    return faults + family.limits(config)


def _defaults(config: ModelConfig) -> dict[str, Any]:
    """By dotted key; of nulls that stand for a number, that of this model."""
    size, heads, layers = config.hidden_size, config.num_attention_heads, config.num_hidden_layers
    head = {"head_dim": size // heads} if size % heads == 0 else {}
    resolved = {"num_key_value_heads": heads, "encoder.num_hidden_layers": layers if config.encoder_layers else None, **head}
    return {**dict(leaves(ModelConfig().model_dump(mode="json"))), **resolved}


def left_behind(family: Family, config: ModelConfig) -> list[str]:
    """Settings of training that differ from their defaults and don't go along, as `key value`."""
    defaults = dict(leaves(ModelConfig().model_dump(mode="json")))
    values = leaves(config.model_dump(mode="json"))
    return [f"model.{name} {value}" for name, value in values if names(name, family.training_only) and value != defaults[name]]


# ------------------------------------------------------------------------------------------------------------ theirs to ours


def from_tree(families: tuple[Family, ...], tree: Mapping[str, Any], *, where: str) -> tuple[Family, ModelConfig]:
    """The family and the model section of a config.json. Raises ConfigError naming everything that we don't do."""
    family = _family_of(families, tree, where=where)
    faults = [
        Fault(f"{where}: {fixed.theirs}", found, " or ".join(map(repr, fixed.allowed)), "this program has no such layer")
        for fixed in family.fixed
        if (found := get(tree, fixed.theirs)) is not ABSENT and not any(_same(found, value) for value in fixed.allowed)
    ]
    values: dict[str, Any] = {}
    for name, value in family.demands.items():
        _put(values, name, value)
    for key in family.keys:
        value, fault = _read(key, tree, where)
        faults += [fault] if fault else []
        _put(values, key.ours, value)
    for group in family.together:
        try:
            for name, value in group.read(tree, where).items():
                _put(values, name, value)
        except ConfigError as error:
            faults += error.faults
    if faults:
        raise ConfigError(faults)
    return family, validate(ModelConfig, values, prefix=where)


def _read(key: Key, tree: Mapping[str, Any], where: str) -> tuple[Any, Fault | None]:
    """Our value of a key, and what is wrong with theirs."""
    found = {name: value for name in key.theirs if (value := get(tree, name)) is not ABSENT and (key.nullable or value is not None)}
    if not found:
        found = {key.theirs[0]: key.default(tree) if callable(key.default) else key.default}
    if REQUIRED in found.values():
        return None, Fault(f"{where}: {key.theirs[0]}", None, "a value", "the folder's config.json is incomplete")
    ours = {name: key.meaning(value) for name, value in found.items()}
    for name, value in ours.items():
        if value is ABSENT:
            known = " or ".join(repr(word) for theirs in (key.words or {}).values() for word in theirs)
            return None, Fault(f"{where}: {name}", found[name], known, "this program has no such layer")
    first = next(iter(ours.values()))
    if any(not _same(value, first) for value in ours.values()):
        fix = "this program has one for all of them"
        return None, Fault(f"{where}: {' and '.join(found)}", list(found.values()), "the same value", fix)
    return first, None


def changed(family: Family, ours: ModelConfig, theirs: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """{key: (theirs, ours)} for every dotted key with which weights made for `theirs` would compute something else in `ours`."""
    one, other = values_of(ours), values_of(theirs)
    return {
        name: (other.get(name), one.get(name))
        for name in dict.fromkeys([*one, *other])
        if not names(name, family.without_effect) and not _same(one.get(name), other.get(name))
    }


def differences(family: Family, ours: ModelConfig, theirs: ModelConfig, *, where: str) -> list[Fault]:
    """A fault for each of these keys."""
    return [
        Fault(f"model.{name}", after, f"{before!r} as in {where}", f"set model.{name}={_yaml(before)}")
        for name, (before, after) in changed(family, ours, theirs).items()
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


def get(tree: Mapping[str, Any], dotted: str) -> Any:
    """The value of a dotted key, or ABSENT."""
    node: Any = tree
    for part in dotted.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return ABSENT
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
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
