"""Rotary positions as config.json has them: flat and in rope_scaling in transformers 4, in rope_parameters in transformers 5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from data_pipeline.errors import ConfigError, Fault
from megatron_lite.attention_config import RopeScalingConfig
from megatron_lite.checkpoint.huggingface.families import Fixed, Together
from megatron_lite.model_config import ModelConfig

_OF_TYPE = {
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}
_TYPES = ("rope_type", "type")  # spellings of different versions
_HARMLESS: dict[str, tuple[object, ...]] = {"mscale": (None, 0), "mscale_all_dim": (None, 0), "truncate": (None, True)}  # as ours is


def _write(config: ModelConfig) -> dict[str, Any]:
    rope, scaling = config.rope, config.rope.scaling
    if scaling.type == "ntk":
        size = rope.rotated_size(config.head_size)
        theta = rope.theta * scaling.factor ** (size / (size - 2))
        fix = f"a config.json has no such word; rope.theta={theta!r} without scaling is the same"
        raise ConfigError([Fault("model.rope.scaling.type", "ntk", "none, linear, yarn or llama3", fix)])
    if scaling.type == "none":
        return {"rope_theta": rope.theta, "rope_scaling": None, "rope_parameters": {"rope_theta": rope.theta, "rope_type": "default"}}
    values = {key: value for key in _OF_TYPE[scaling.type] if (value := getattr(scaling, key)) is not None}
    said = {"rope_type": scaling.type, **values}
    return {"rope_theta": rope.theta, "rope_scaling": said, "rope_parameters": {"rope_theta": rope.theta, **said}}


def _read(tree: Mapping[str, Any], where: str) -> dict[str, object]:
    """Either spelling, or both where they agree."""
    found: dict[str, Any] = {}
    faults = []
    flat = {"rope_theta": tree.get("rope_theta")}
    for key, said in (("rope_theta", flat), ("rope_scaling", tree.get("rope_scaling")), ("rope_parameters", tree.get("rope_parameters"))):
        for name, value in (said or {}).items():
            name = "rope_type" if name in _TYPES else name
            if value is not None and found.setdefault(name, value) != value:
                got, fix = [found[name], value], "two versions of one key disagree"
                faults.append(Fault(f"{where}: {name} and {key}.{name}", got, "the same value", fix))
    kind, theta = found.pop("rope_type", "default"), found.pop("rope_theta", 10000.0)
    found.pop("partial_rotary_factor", None)  # each family says whether it has that
    known: tuple[str, ...] = ()
    if kind in _OF_TYPE:
        known = _OF_TYPE[kind]
    elif kind != "default":
        fix = "this program has no such layer"
        faults.append(Fault(f"{where}: rope_type", kind, " or ".join(map(repr, ("default", *_OF_TYPE))), fix))
    values = {key: found[key] for key in known if key in found}
    faults += [
        Fault(
            f"{where}: rope_parameters.{key}", value, "nothing", f"with rope_type: {kind} this program knows {', '.join(known) or 'none'}"
        )
        for key, value in found.items()
        if key not in values and kind in _OF_TYPE and value not in _HARMLESS.get(key, ())
    ]
    if faults:
        raise ConfigError(faults)
    scaling = {"type": "none" if kind == "default" else kind, **values}
    defaults = {key: RopeScalingConfig.model_fields[key].default for key in known if key not in values}
    return {"rope.theta": theta} | {f"rope.scaling.{key}": value for key, value in {**defaults, **scaling}.items()}


ROPE = Together(("rope.theta", "rope.scaling."), _write, _read)
WHOLE_HEADS = tuple(Fixed(key, (None, 1.0)) for key in ("partial_rotary_factor", "rope_parameters.partial_rotary_factor"))
