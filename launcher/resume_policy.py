"""What may change between two attempts of a run: layout and bookkeeping freely, hyperparameters on record, the model never."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from data_pipeline.errors import ConfigError, DataError, Fault
from launcher.config import RunConfig

if TYPE_CHECKING:  # login nodes ask too, without torch
    from megatron_lite.checkpoint.manifest import RunState

# Prefixes of keys whose change is written to events.jsonl. What neither stands here nor is part of the identity is free.
RECORDED = (
    "training.steps",
    "training.tokens",
    "training.global_batch_size",
    "training.precision",
    "training.loss.",
    "lr_scheduler.",
    "optimizer.",
)
# Of the model section, where weights alone are taken: what they compute at first changes, though their shapes agree.
RECORDED_OF_WEIGHTS = (
    "rope.",
    "position.",
    "attention.",
    "norm.",
    "residual.",
    "mlp.",
    "mup.",
    "rms_norm_eps",
    "layer_norm_eps",
    "embedding_multiplier",
    "logit_scale",
    "final_logit_softcapping",
)


def identity(config: RunConfig, rows_identity: Mapping[str, Any]) -> dict[str, Any]:
    """What a run is, and what it may not become: everything in RunState.identity(), from the config and the opened data."""
    return {
        "model": config.model.model_dump(mode="json"),
        "tokenizer_hash": rows_identity["tokenizer_hash"],
        "data_identity": {
            "sources": rows_identity["sources"],
            "packing": config.data.packing,
            **packing_version(rows_identity["packing_version"]),
            "document_mask": config.data.document_mask,
            **({"source_length": config.training.encoder_length} if config.model.family == "seq2seq" else {}),
        },
        "seed": config.run.seed,
        "sequence_length": config.training.sequence_length,
    }


def packing_version(version: int) -> dict[str, int]:
    """As a run keeps it: nothing stands for 1, since runs were begun before the key was there."""
    return {} if version == 1 else {"packing_version": version}


def require_same_packing(kept: Mapping[str, Any], now: int, *, folder: object) -> None:
    """Raises DataError where this program fills rows otherwise than the one that wrote `kept` (see `packing_version`)."""
    if (before := kept.get("packing_version", 1)) != now:
        raise DataError(
            f"{folder} was trained on rows of packing version {before}, this program makes version {now} of them: other documents in a row. "
            "Use the program that began the run, or choose another run.name (checkpoint.init_from takes the weights along)"
        )


def require_same_run(saved: RunState, wanted: Mapping[str, Any], *, folder: object) -> None:
    """Raises ConfigError for another model, tokenizer, seed or sequence length, else DataError for other data; old and new shown."""
    old = saved.identity()
    pairs: list[tuple[str, Any, Any]] = []
    pairs += [(f"model.{key}", before, after) for key, before, after in _differences(old["model"], wanted["model"])]
    pairs += [("run.seed", old["seed"], wanted["seed"])]
    pairs += [("training.sequence_length", old["sequence_length"], wanted["sequence_length"])]
    old_data, new_data = old["data_identity"], wanted["data_identity"]
    pairs += [(f"data.{key}", old_data[key], new_data[key]) for key in ("packing", "document_mask")]
    pairs += [("training.source_length", old_data.get("source_length"), new_data.get("source_length"))]
    pairs += [("the data's tokenizer", old["tokenizer_hash"][:16], wanted["tokenizer_hash"][:16])]
    fix = f"a run can't change it: put the old value back, or choose another run.name than that of {folder}"
    faults = [Fault(name, after, f"{before!r} as in the run's checkpoint", fix) for name, before, after in pairs if before != after]
    if faults:
        raise ConfigError(faults)
    require_same_packing(old_data, new_data.get("packing_version", 1), folder=folder)
    if old_data["sources"] != new_data["sources"]:
        raise DataError(
            f"the data is not what {folder} was trained on: it had {_sources(old_data['sources'])}, now {_sources(new_data['sources'])}. "
            "Give the run its own data again, or choose another run.name (checkpoint.init_from takes the weights along)"
        )


def require_same_meaning(origin: Mapping[str, Any], wanted: Mapping[str, Any], *, where: object) -> None:
    """For weights alone, by model section and tokenizer hash. Raises ConfigError where `origin`'s, though of the right shapes, are for
    heads cut otherwise or for ids of other tokens; old and new shown. What changes shapes is found in loading."""
    was, will = _heads(origin["model"]), _heads(wanted["model"])
    faults = [
        Fault(f"model.{key}", will[key], f"{was[key]} as in {where}", f"set model.{key}={was[key]}") for key in was if was[key] != will[key]
    ]
    if origin["tokenizer_hash"] != wanted["tokenizer_hash"]:
        fix = "build the data with `tokenizer: {type: pretrained, name_or_path: DIR}`, DIR being the data that the weights were trained on"
        old, new = origin["tokenizer_hash"][:16], wanted["tokenizer_hash"][:16]
        faults.append(Fault("the data's tokenizer", new, f"{old!r} as in {where}: the same id is another token", fix))
    if faults:
        raise ConfigError(faults)


def changed_meaning(origin: Mapping[str, Any], wanted: Mapping[str, Any], *, and_also: tuple[str, ...] = ()) -> list[tuple[str, Any, Any]]:
    """(key, old, new) of what may change for weights alone, as for longer rows, and changes what they compute at first; of the keys
    `and_also` too."""
    pairs = _differences(origin["model"], wanted["model"])
    return [(f"model.{key}", before, after) for key, before, after in pairs if key.startswith((*RECORDED_OF_WEIGHTS, *and_also))]


def other_meaning(key: str, before: object, after: object, *, who: str) -> str:
    """In words, a change that changed_meaning found."""
    return f"the weights were trained with {key} {before!r}, {who} has {after!r}"


def _heads(model: Mapping[str, Any]) -> dict[str, int]:
    heads = int(model["num_attention_heads"])
    return {"num_attention_heads": heads, "num_key_value_heads": int(model["num_key_value_heads"] or heads)}


def recorded_changes(saved: Mapping[str, Any], config: RunConfig) -> list[tuple[str, Any, Any]]:
    """(key, old, new) of what changed since the run's saved config and must be on record."""
    return [change for change in _differences(dict(saved), config.model_dump(mode="json")) if change[0].startswith(RECORDED)]


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any, Any]]:
    found: list[tuple[str, Any, Any]] = []
    for key in dict.fromkeys([*old, *new]):
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            found += _differences(before, after, f"{prefix}{key}.")
        elif before != after:
            found.append((f"{prefix}{key}", before, after))
    return found


def _sources(streams: list[list[dict[str, str]]]) -> str:
    return ", ".join(f"{source['name']} {source['hash'][:12]}" for stream in streams for source in stream) or "nothing"
