"""docs/config-reference.md, written from the sections themselves: `python -m tests.config_reference` puts it there.

A key's explanation is the comment beside its field, so that there is one place to keep true.
"""

from __future__ import annotations

import inspect
import io
import tokenize
import types
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from data_pipeline.config import DataConfig
from data_pipeline.schema import Section
from launcher.config import RunConfig
from launcher.slurm.cluster import ClusterConfig
from tests.paths import ROOT

PAGE = ROOT / "docs" / "config-reference.md"
HEAD = """# Every config key

<!-- Written by `python -m tests.config_reference` from the sections in launcher/config.py, megatron_lite/config.py,
megatron_lite/model_config.py, data_pipeline/config.py and launcher/slurm/cluster.py; a test holds it fresh. -->

Any key can be overridden on the command line, `section.key=value`, the value read as YAML 1.2: `3e-4` is a number, `off` a word.
`${run.name}` refers to another key. `model`, and any other section, may be the path of a YAML file. An unknown key is refused with
the nearest valid one. What may change between two attempts of a run: [first-model.md](first-model.md#change-something-and-go-on).

"""
CLUSTER = """## A cluster config

`configs/cluster/NAME.yaml`, chosen by `cluster=NAME`; on the command line `cluster.key=value`. [slurm.md](slurm.md) explains them.

"""


def reference() -> str:
    return (
        f"{HEAD}## A run config\n\n{_sections(RunConfig, '')}## A data config\n\n{_sections(DataConfig, '')}{CLUSTER}{_sections(ClusterConfig, '')}".rstrip()
        + "\n"
    )


def _sections(section: type[Section], prefix: str) -> str:
    """A table for the plain keys of a section, then its sections, each under its own heading."""
    rows, below = [], []
    comments = field_comments(section)
    for name, field in section.model_fields.items():
        inner = section_in(field.annotation)
        key = f"{prefix}{name}"
        if inner is not None:
            is_list = "list" in str(get_origin(field.annotation)) or any(get_origin(part) is list for part in get_args(field.annotation))
            below.append((f"{key}[]" if is_list else key, inner, comments.get(name, "")))
        else:
            rows.append(f"| `{key}` | {values(field)} | {default(field)} | {comments.get(name, '')} |")
    text = "| key | values | default | |\n|---|---|---|---|\n" + "\n".join(rows) + "\n\n" if rows else ""
    for key, inner, comment in below:
        said = " ".join(
            filter(None, [(inspect.getdoc(inner) or "").replace("\n\n", " ").replace("\n", " "), f"({comment})" if comment else ""])
        )
        text += f"### {key}\n\n{said}\n\n" + _sections(inner, f"{key}.")
    return text


def field_comments(section: type[Section]) -> dict[str, str]:
    """Field -> the comment on the line that it begins on or ends on."""
    source = inspect.getsource(section)
    found: dict[str, str] = {}
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            name = lines[token.start[0] - 1].split(":")[0].strip()
            if name in section.model_fields and not token.string.startswith("# noqa"):
                found[name] = token.string.lstrip("# ").replace("|", "or").replace("`", "")
    return found


def section_in(annotation: Any) -> type[Section] | None:
    """The Section inside an annotation, if there is one."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((found for part in get_args(annotation) if (found := section_in(part)) is not None), None)


def values(field: FieldInfo) -> str:
    """What may stand there, with its limits."""
    limits = [
        f"{word} {LARGE.get(getattr(item, name), getattr(item, name))}"
        for item in field.metadata
        for name, word in LIMITS.items()
        if getattr(item, name, None) is not None
    ]
    return ", ".join([_named(field.annotation), *limits])


LARGE = {2**63: "2^63"}
LIMITS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def _named(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(f"`{part}`" for part in parts)
    if origin in (Union, types.UnionType):
        return " or ".join(_named(part) for part in parts)
    if origin in (list, tuple):
        return f"list of {_named(parts[0])}"
    if origin is dict:
        return "mapping"
    return {int: "integer", float: "number", str: "text", bool: "`true` or `false`", type(None): "`null`"}.get(annotation, str(annotation))


def default(field: FieldInfo) -> str:
    if field.is_required():
        return "must be given"
    value = field.get_default(call_default_factory=True)
    assert value is not PydanticUndefined
    if value is None or isinstance(value, bool):
        return f"`{str(value).lower().replace('none', 'null')}`"
    return "empty" if value in ("", {}, []) else f"`{list(value) if isinstance(value, tuple) else value}`"


if __name__ == "__main__":
    PAGE.write_text(reference())
