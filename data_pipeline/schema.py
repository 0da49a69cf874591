"""Strict config sections: YAML in, typed objects out, every fault named at once.

A config is a tree of `Section`s. Loading is: read YAML, put in the files that sections name, apply `a.b=c`
overrides, resolve `${...}`, then one validation pass. Nothing unknown is ignored and no value is changed silently.
"""

from __future__ import annotations

import copy
import difflib
import re
import types
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from data_pipeline.errors import ConfigError, Fault
from data_pipeline.yaml_text import parse_yaml, read_yaml

S = TypeVar("S", bound="Section")
Location = list[int | str]  # the keys of mappings and numbers of list elements that lead to a value


class Section(BaseModel):
    """One mapping of a config. Unknown keys are faults; values keep the type that YAML gave them (an int may
    stand for a float, nothing else is converted); instances can't be changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def section_faults(faults: Sequence[Fault]) -> PydanticCustomError:
    """To raise in a section's validator: what breaks its rules over several keys, each fault at its own key of the section."""
    return PydanticCustomError("section_faults", "rules over several keys", {"faults": list(faults)})


def unread_faults(section: Section, chosen: str, by: str, read_by: Mapping[str, Sequence[str]]) -> list[Fault]:
    """A fault for each key that differs from its default and that `chosen`, the value of the key `by`, doesn't read; `read_by` has for
    each key the values that do."""
    return [
        Fault(key, value, f"its default ({_in_yaml(default)}) with {by}: {chosen}", f"only {by}: {' or '.join(values)} reads it; remove it")
        for key, values in read_by.items()
        if chosen not in values and (value := getattr(section, key)) != (default := type(section).model_fields[key].default)
    ]


def _in_yaml(value: object) -> str:
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))


# ----------------------------------------------------------------------------------------------- composing

LEFT_OUT = ...  # stands in a composed tree for what could not be read: no value of YAML's, so that no section takes it


def _include_files(tree: dict[str, Any], *, beside: Path, section_names: Iterable[str]) -> list[Fault]:
    """`model: configs/model/125m.yaml` puts the file's mapping there, so that overrides reach its keys."""
    faults = []
    for key in section_names:
        value = tree.get(key)
        if isinstance(value, str) and value.endswith((".yaml", ".yml")):
            candidates = [Path(value), beside / value]
            found = next((path for path in candidates if path.is_file()), None)
            if found is None:
                want = "a mapping, or the path of a YAML file that exists"
                faults.append(Fault(key, tree.pop(key), want, "looked at " + ", ".join(map(str, candidates))))
            else:
                tree[key] = read_yaml(found)
    return faults


def override_name(override: str) -> str:
    """The key `a.b` of `a.b=c`, which may be written as an option, `--a.b=c`."""
    return override.partition("=")[0].strip().removeprefix("--")


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one `a.b=c` in place; the value is read as YAML. Missing mappings on the way are made."""
    _, equals, text = override.partition("=")
    name = override_name(override)
    if not equals or not name or any(not part for part in name.split(".")):
        raise ConfigError([Fault("override", override, "section.key=value", "for example training.steps=100")])
    node = tree
    *parents, last = name.split(".")
    for depth, part in enumerate(parents):
        child = node.setdefault(part, {})
        if child is None:
            child = node[part] = {}
        if not isinstance(child, dict):
            raise ConfigError(
                [Fault(override, child, f"{'.'.join(parents[: depth + 1])} to be a mapping", "override that key as a whole instead")]
            )
        node = child
    node[last] = parse_yaml(text, where=f"override {override!r}") if text else ""


def compose(path: str | Path, overrides: Iterable[str] = (), *, section_names: Iterable[str] = ()) -> tuple[dict[str, Any], list[Fault]]:
    """Read a config file, put in named section files, apply overrides, resolve `${...}`. Nothing is validated yet: the faults
    of composing come back with the tree, for validate() to name beside its own; where a value has one, the tree has LEFT_OUT.
    Raises ConfigError where a file can't be read at all, or has a key or a `${` that nothing can be made of."""
    tree = read_yaml(path)
    faults: list[Fault] = []
    overrides = list(overrides)
    whole = [text for text in overrides if "." not in text.partition("=")[0]]  # model=FILE first, then model.key=value

    def override_all(texts: Iterable[str]) -> None:
        for text in texts:
            try:
                apply_override(tree, text)
            except ConfigError as error:
                faults.extend(error.faults or [Fault("override", text, "a value in YAML", str(error))])

    override_all(whole)
    unread = _include_files(tree, beside=Path(path).resolve().parent, section_names=section_names)
    faults += unread
    override_all(text for text in overrides if text not in whole)
    try:
        config = OmegaConf.create(tree)
    except OmegaConfBaseException as error:
        want = "keys and values that can be read, each ${ closed"
        raise ConfigError([*faults, Fault(error.full_key or str(path), error.value, want, _first_line(error))]) from None
    resolved = {str(key): value for key, value in _resolved(config, "", faults).items()}
    return resolved | {fault.field: LEFT_OUT for fault in unread}, faults


def _resolved(node: DictConfig | ListConfig, field: str, faults: list[Fault], above: tuple[object, ...] = ()) -> Any:
    """The plain tree below `node`, each `${...}` replaced by what it stands for, a fault and LEFT_OUT where that is nothing or one
    of the mappings and lists around it, which `above` holds."""
    above = (*above, node)
    plain: dict[Any, Any] = {}
    keys: Iterable[Any] = node if isinstance(node, DictConfig) else range(len(node))
    for key in keys:
        name = f"{field}.{key}" if field else str(key)
        try:  # OmegaConf takes `???` for a value that is to come; here it is text
            value, what = "???" if OmegaConf.is_missing(node, key) else node[key], "it stands for what it stands in"
        except OmegaConfBaseException as error:
            value, what = LEFT_OUT, _first_line(error)
        if value is LEFT_OUT or any(value is each for each in above):
            got = OmegaConf.to_container(node, resolve=False)
            want = "a reference to another key of this config, as section.key"
            faults.append(Fault(name, got[key], want, what))  # type: ignore[index,call-overload]
            plain[key] = LEFT_OUT
        else:
            plain[key] = _resolved(value, name, faults, above) if isinstance(value, DictConfig | ListConfig) else value
    return plain if isinstance(node, DictConfig) else list(plain.values())


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


# ---------------------------------------------------------------------------------------------- validating


def validate(section: type[S], tree: Mapping[str, Any], *, prefix: str = "", composing: Sequence[Fault] = ()) -> S:
    """Build the section from the tree; raises ConfigError with every fault, each with the nearest valid key or the rule, those
    that came up in composing the tree first."""
    built = _build(section, tree, prefix=prefix)
    if isinstance(built, section) and not composing:
        return built
    raise ConfigError([*composing, *(built if isinstance(built, list) else [])])


def mended(section: type[S], tree: object) -> tuple[S | None, set[str]]:
    """The section with the default of each key whose value is wrong, and the names of those keys; None where there is no
    telling. For rules across sections, which hold what the keys that they read hold, though other keys are wrong."""
    if not isinstance(tree, Mapping):
        return None, set()
    known, wrong = dict(tree), set[str]()
    for _ in range(3):  # a key that doesn't exist or is no value; then rules over several keys
        try:
            return section.model_validate(known), wrong
        except ValidationError as error:
            locations = []
            for item in error.errors():
                location = _location(item)
                own = [fault.field for fault in item["ctx"]["faults"]] if item["type"] == "section_faults" else []
                locations += [[*location, name] for name in own] or [location] * bool(location)
                if item["type"] == "extra_forbidden":
                    wrong |= _meant(section, location)
            wrong |= {str(location[-1]) for location in locations}
            known = _without(known, locations)
    return None, wrong


def names_any(fault: Fault, keys: Set[str]) -> bool:
    """Whether the fault's text has one of the keys as a word."""
    return not keys.isdisjoint(re.findall(r"\w+", str(fault)))


def is_left_out(value: object) -> bool:
    """Whether the value, or an element of it, could not be read: composing has its fault."""
    return value is LEFT_OUT or (isinstance(value, list) and LEFT_OUT in value)


def _build(section: type[S], tree: Mapping[str, Any], *, prefix: str = "", unsure: Sequence[Location] = ()) -> list[Fault] | S:
    """The section, or all its faults. Keys that don't exist or could not be read are taken out after a first look, so that they
    don't keep pydantic from the rules that it checks in the end, over several keys. Rules that may have read a default in the
    place of such a key are passed over: those of the section that an unread key is in, and what names the key that was meant."""
    try:
        return section.model_validate(dict(tree))
    except ValidationError as error:
        faults, items = faults_of(section, error, prefix=prefix, unsure=unsure), error.errors()
    unknown = [_location(item) for item in items if item["type"] == "extra_forbidden"]
    unread = [_location(item) for item in items if is_left_out(item["input"])]
    unread = [location for location in unread if not any(isinstance(part, int) for part in location)]  # lists keep their elements
    if not unknown and not unread:
        return faults
    unsure = [*unsure, *unread, *(location[:-1] for location in unread)]
    others = _build(section, _without(tree, [*unknown, *unread]), prefix=prefix, unsure=unsure)
    named, meant = {fault.field for fault in faults}, set[str]().union(*(_meant(section, location) for location in unknown))
    rules = others if isinstance(others, list) else []
    return [*faults, *(fault for fault in rules if fault.field not in named and not names_any(fault, meant))]


def _without(tree: Mapping[str, Any], locations: Iterable[Location]) -> dict[str, Any]:
    """A copy of the tree without the keys at the locations."""
    known = copy.deepcopy(dict(tree))
    for location in sorted(locations, key=len, reverse=True):  # what is in a mapping before the mapping
        node: Any = known
        for part in location[:-1]:
            node = node[part]
        if isinstance(node, dict):
            node.pop(location[-1], None)
        elif isinstance(node, list) and isinstance(location[-1], int):  # the others keep their places
            node[location[-1]] = None
    return known


def faults_of(section: type[Section], error: ValidationError, *, prefix: str = "", unsure: Sequence[Location] = ()) -> list[Fault]:
    """pydantic's errors as Faults, once for each field; none for what is LEFT_OUT, nor at the locations that are unsure."""
    faults: dict[str, Fault] = {}
    for item in error.errors():
        location = _location(item)
        if is_left_out(item["input"]) or location in unsure:
            continue
        path = [prefix] * bool(prefix) + [str(part) for part in location]
        field = ".".join(path) or section.__name__
        if item["type"] == "section_faults":
            named = [replace(own, field=".".join([*path, own.field])) for own in item["ctx"]["faults"]]
            faults |= {own.field: own for own in named}
            continue
        if item["type"] == "extra_forbidden":
            fault = Fault(field, _shown(item["input"]), "no such key", _nearest(section, location))
        elif item["type"] == "missing":
            fault = Fault(field, None, "a value", "this key has no default")
        elif item["type"] == "value_error":
            want, _, fix = str(item["ctx"]["error"]).partition(" | ")
            fault = Fault(field, _shown(item["input"]), want, fix)
        else:
            want = item["msg"].removeprefix("Input should be ")
            fault = Fault(field, _shown(item["input"]), want[:1].lower() + want[1:])
        if field in faults and faults[field].want != fault.want:
            joined = faults[field]
            fault = Fault(field, joined.got, f"{joined.want} or {fault.want}", joined.fix or fault.fix)
        faults[field] = fault
    return list(faults.values())


def _location(item: ErrorDetails) -> Location:
    """pydantic's location without the names of union members; of a key too many or too few, the last part is that key."""
    keys = {len(item["loc"]) - 1} if item["type"] in ("extra_forbidden", "missing") else set()
    return [part for at, part in enumerate(item["loc"]) if at in keys or isinstance(part, int) or not _is_branch(part)]


def _is_branch(part: str) -> bool:
    """Union members appear in pydantic's locations by type name; they are no keys of ours."""
    return (
        part in {"int", "float", "str", "bool", "none"}
        or part.startswith(("literal[", "list[", "constrained", "function-", "tuple[", "dict[", "union["))
        or part[:1].isupper()
    )


def _shown(value: object) -> object:
    return f"a mapping with {', '.join(map(str, value))}" if isinstance(value, Mapping) else value


def _meant(section: type[Section], location: Location) -> set[str]:
    """The valid key that the unknown one at `location` is nearest to, if any is near."""
    return set(difflib.get_close_matches(str(location[-1]), _keys_at(section, location[:-1]), n=1, cutoff=0.5))


def _nearest(section: type[Section], location: Location) -> str:
    for close in _meant(section, location):
        return f"did you mean {'.'.join([*map(str, location[:-1]), close])}?"
    keys = _keys_at(section, location[:-1])
    return f"valid keys: {', '.join(sorted(keys))}" if keys else "remove it"


def _keys_at(section: type[Section], location: Location) -> list[str]:
    node: Any = section
    for part in location:
        if isinstance(part, int):
            continue
        field = node.model_fields.get(part) if _is_section(node) else None
        node = _section_in(field.annotation) if field is not None else None
    return list(node.model_fields) if _is_section(node) else []


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _section_in(annotation: Any) -> Any:
    """The Section inside Optional[...], unions and containers, if there is one."""
    if _is_section(annotation):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType, list, tuple, dict) or get_args(annotation):
        return next((found for part in get_args(annotation) if (found := _section_in(part)) is not None), None)
    return None
