"""Which layers see everything and which a window, as config.json has it: a list with a word for each layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from data_pipeline.errors import ConfigError, Fault
from megatron_lite.checkpoint.huggingface.families import Together
from megatron_lite.model_config import ModelConfig

FULL, SLIDING = "full_attention", "sliding_attention"
_KEYS = ("attention.sliding_window", "attention.global_every")


def windows(
    *, default: int | None, silent: Callable[[Mapping[str, Any], int], list[str]], switched: bool = False, listed: bool = True
) -> Together:
    """`default` window and `silent` list of types are theirs where config.json says nothing; `switched`: use_sliding_window says
    whether there is a window at all; not `listed`: all layers are alike."""

    def write(config: ModelConfig) -> dict[str, Any]:
        seen = [config.attention.window_of(layer) for layer in range(config.num_hidden_layers)]
        said: dict[str, Any] = {"sliding_window": config.attention.sliding_window}
        if listed:
            said["layer_types"] = [FULL if window is None else SLIDING for window in seen]
        elif config.attention.global_every is not None:
            fix = "the architecture has the window in all layers or in none"
            raise ConfigError([Fault(f"model.{_KEYS[1]}", config.attention.global_every, "null", fix)])
        if switched:  # and from which layer on, for versions that know no list
            said |= {"use_sliding_window": any(seen), "max_window_layers": 0 if all(seen) else config.num_hidden_layers}
        return said

    def read(tree: Mapping[str, Any], where: str) -> dict[str, object]:
        window = tree.get("sliding_window", default)
        if switched and not tree.get("use_sliding_window", False):
            window = None
        types = list(tree.get("layer_types") or silent(tree, int(tree.get("num_hidden_layers") or 0)))
        if window is None or SLIDING not in types:
            return {_KEYS[0]: None, _KEYS[1]: None}
        for every in (None, *range(2, len(types) + 1)):
            if types == [FULL if every is not None and (layer + 1) % every == 0 else SLIDING for layer in range(len(types))]:
                return {_KEYS[0]: window, _KEYS[1]: every}
        want = f"{SLIDING} in each layer, or {FULL} in each n-th and {SLIDING} in the others"
        raise ConfigError([Fault(f"{where}: layer_types", types, want, "this program has no such order of layers")])

    return Together(_KEYS, write, read)


def everywhere(tree: Mapping[str, Any], num_layers: int) -> list[str]:
    """A window in each layer."""
    return [SLIDING] * num_layers


def from_a_layer_on(tree: Mapping[str, Any], num_layers: int) -> list[str]:
    """A window from max_window_layers on."""
    first = tree.get("max_window_layers", 28)
    return [SLIDING if layer >= first else FULL for layer in range(num_layers)]


def in_turns(tree: Mapping[str, Any], num_layers: int) -> list[str]:
    """A window in the first layer and each second one."""
    return [FULL if layer % 2 else SLIDING for layer in range(num_layers)]
