"""YAML 1.2 text to plain values and back."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml

from data_pipeline.errors import ConfigError, Fault


class _Loader(yaml.SafeLoader):
    """YAML 1.2 scalars: 3e-4 is a number, `off` and `no` are words, and a key given twice is an error."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":bool", ":float", ":int", ":timestamp"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_INT = r"^[-+]?(?:[0-9][0-9_]*|0x[0-9a-fA-F]+)$"
_FLOAT = (
    r"^[-+]?(?:(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.(?:inf|Inf|INF))$|^\.(?:nan|NaN|NAN)$"
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(_INT), list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(_FLOAT), list("-+0123456789."))


def _mapping_once(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    out: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, Hashable):
            raise yaml.constructor.ConstructorError(None, None, f"a {type(key).__name__} can't be a key", key_node.start_mark)
        if key in out:
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
        out[key] = loader.construct_object(value_node, deep=True)
    return out


def _int_1_2(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node)).replace("_", "")
    return int(text, 16) if "0x" in text else int(text)  # 010 is ten, not eight


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping_once)
_Loader.add_constructor("tag:yaml.org,2002:int", _int_1_2)


class _Dumper(yaml.SafeDumper):
    """PyYAML's, which quotes what YAML 1.1 would read as something else than text; _Loader reads 08 and 1e-4 as numbers too."""


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    folded = "\x85\u2028\u2029"  # line ends of Unicode: PyYAML reads them as spaces unless they are escaped
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if any(end in text for end in folded) else None)


_Dumper.add_representer(str, _text)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(_INT), list("-+0123456789"))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(_FLOAT), list("-+0123456789."))


def dump_yaml(tree: Mapping[str, Any]) -> str:
    """The mapping as YAML, keys in their order, which read_yaml reads back as it was."""
    return yaml.dump(dict(tree), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


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
