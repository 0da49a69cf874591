"""Strict config sections: YAML in, typed objects out, every fault named at once.

A config is a tree of `Section`s. Loading is: read YAML, put in the files that sections name, apply `a.b=c`
overrides, resolve `${...}`, then one validation pass. Nothing unknown is ignored and no value is changed silently.
"""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, ValidationError

from data_pipeline.errors import ConfigError, Fault

S = TypeVar("S", bound="Section")


class Section(BaseModel):
    """One mapping of a config. Unknown keys are faults; values keep the type that YAML gave them (an int may
    stand for a float, nothing else is converted); instances can't be changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


# ---------------------------------------------------------------------------------------------------- YAML


class _Loader(yaml.SafeLoader):
    """YAML 1.2 scalars: 3e-4 is a number, `off` and `no` are words, and a key given twice is an error."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":bool", ":float", ":int", ":timestamp"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_FLOAT = (
    r"^[-+]?(?:(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.(?:inf|Inf|INF))$|^\.(?:nan|NaN|NAN)$"
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:[0-9][0-9_]*|0x[0-9a-fA-F]+)$"), list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(_FLOAT), list("-+0123456789."))


def _mapping_once(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    out: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if key in out:
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
        out[key] = loader.construct_object(value_node, deep=True)
    return out


def _int_1_2(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node)).replace("_", "")
    return int(text, 16) if "0x" in text else int(text)  # 010 is ten, not eight


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping_once)
_Loader.add_constructor("tag:yaml.org,2002:int", _int_1_2)


def parse_yaml(text: str, *, where: str) -> Any:
    """The value that `text` spells; `where` names it in the error."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not valid YAML: {error}") from None


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in the file; an empty file is an empty mapping."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError([Fault("config", str(path), "a readable YAML file", f"{error.strerror}; check the path")]) from None
    except UnicodeDecodeError as error:
        raise ConfigError([Fault("config", str(path), "UTF-8 text", f"byte {error.start} is not; save the file as UTF-8")]) from None
    tree = parse_yaml(text, where=str(path))
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError([Fault(str(path), type(tree).__name__, "a mapping of sections", "start the file with `key: value` lines")])
    return tree


# ----------------------------------------------------------------------------------------------- composing


def _include_files(tree: dict[str, Any], *, beside: Path, section_names: Iterable[str]) -> None:
    """`model: configs/model/125m.yaml` puts the file's mapping there, so that overrides reach its keys."""
    for key in section_names:
        value = tree.get(key)
        if isinstance(value, str) and value.endswith((".yaml", ".yml")):
            candidates = [Path(value), beside / value]
            found = next((path for path in candidates if path.is_file()), None)
            if found is None:
                raise ConfigError(
                    [Fault(key, value, "a mapping, or the path of a YAML file that exists", "looked at " + ", ".join(map(str, candidates)))]
                )
            tree[key] = read_yaml(found)


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one `a.b=c` in place; the value is read as YAML. Missing mappings on the way are made."""
    name, equals, text = override.partition("=")
    name = name.strip().removeprefix("--")
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


def compose(path: str | Path, overrides: Iterable[str] = (), *, section_names: Iterable[str] = ()) -> dict[str, Any]:
    """Read a config file, put in named section files, apply overrides, resolve `${...}`; nothing is validated yet."""
    tree = read_yaml(path)
    overrides = list(overrides)
    whole = [text for text in overrides if "." not in text.partition("=")[0]]  # model=FILE first, then model.key=value
    for override in whole:
        apply_override(tree, override)
    _include_files(tree, beside=Path(path).resolve().parent, section_names=section_names)
    for override in overrides:
        if override not in whole:
            apply_override(tree, override)
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(tree), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: a ${{...}} reference can't be resolved: {error}") from None
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


# ---------------------------------------------------------------------------------------------- validating


def validate(section: type[S], tree: Mapping[str, Any], *, prefix: str = "") -> S:
    """Build the section from the tree; raises ConfigError with every fault, each with the nearest valid key or the rule."""
    try:
        return section.model_validate(dict(tree))
    except ValidationError as error:
        raise ConfigError(faults_of(section, error, prefix=prefix)) from None


def faults_of(section: type[Section], error: ValidationError, *, prefix: str = "") -> list[Fault]:
    """pydantic's errors as Faults, once for each field."""
    faults: dict[str, Fault] = {}
    for item in error.errors():
        location = [part for part in item["loc"] if isinstance(part, int) or not _is_branch(part)]
        field = ".".join(str(part) for part in location) or section.__name__
        field = f"{prefix}.{field}" if prefix else field
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


def _is_branch(part: str) -> bool:
    """Union members appear in pydantic's locations by type name; they are no keys of ours."""
    return (
        part in {"int", "float", "str", "bool", "none"}
        or part.startswith(("literal[", "list[", "constrained", "function-", "tuple[", "dict[", "union["))
        or part[:1].isupper()
    )


def _shown(value: object) -> object:
    return f"a mapping with {', '.join(map(str, value))}" if isinstance(value, Mapping) else value


def _nearest(section: type[Section], location: list[int | str]) -> str:
    keys = _keys_at(section, location[:-1])
    close = difflib.get_close_matches(str(location[-1]), keys, n=1, cutoff=0.5)
    if close:
        return f"did you mean {'.'.join([*map(str, location[:-1]), close[0]])}?"
    return f"valid keys: {', '.join(sorted(keys))}" if keys else "remove it"


def _keys_at(section: type[Section], location: list[int | str]) -> list[str]:
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
