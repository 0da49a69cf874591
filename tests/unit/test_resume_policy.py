"""If these fail, a run goes on as another run, or a harmless change is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from data_pipeline.errors import ConfigError, DataError
from data_pipeline.schema import validate
from launcher.checkpointing import Start
from launcher.config import RunConfig
from launcher.mixture import next_phases
from launcher.resume_policy import changed_meaning, identity, recorded_changes, require_same_meaning, require_same_run
from megatron_lite.checkpoint.huggingface.llama import LLAMA
from megatron_lite.checkpoint.manifest import RunState

ROWS = {"sources": [[{"name": "web", "hash": "a" * 64}]], "tokenizer_hash": "t" * 64, "packing_version": 2}


def config_of(**sections: dict[str, Any]) -> RunConfig:
    tree: dict[str, Any] = {"run": {"name": "x"}, "model": {"vocab_size": 300}, "data": {"path": "d"}, "training": {"steps": 10}}
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    return validate(RunConfig, tree)


def state_of(config: RunConfig) -> RunState:
    return RunState(step=4, samples=64, tokens=9000, global_batch_size=16, **identity(config, ROWS))


@pytest.mark.parametrize(
    ("section", "values", "field"),
    [
        ("model", {"hidden_size": 512}, "model.hidden_size"),
        ("model", {"hidden_dropout": 0.1}, "model.hidden_dropout"),
        ("model", {"rope": {"theta": 5e5}}, "model.rope.theta"),
        ("run", {"seed": 1}, "run.seed"),
        ("training", {"sequence_length": 128}, "training.sequence_length"),
        ("data", {"document_mask": False}, "data.document_mask"),
    ],
)
def test_the_identity_is_fixed(section: str, values: dict[str, Any], field: str) -> None:
    """B121: all differences at once, old and new."""
    with pytest.raises(ConfigError) as caught:
        require_same_run(state_of(config_of()), identity(config_of(**{section: values}), ROWS), folder="runs/x")
    assert [fault.field for fault in caught.value.faults] == [field]


def test_a_checkpoint_older_than_a_key_is_of_the_same_run() -> None:
    """What a key's default does is what was done before there was the key."""
    saved, wanted = state_of(config_of()), identity(config_of(), ROWS)
    older = {key: value for key, value in saved.model.items() if key != "position"}
    older["rope"] = {"theta": 10000.0}
    require_same_run(replace(saved, model=older), wanted, folder="runs/x")
    assert changed_meaning(replace(saved, model=older).identity(), wanted) == []
    with pytest.raises(ConfigError, match=r"model\.position\.type: got 'none', wanted 'rope'"):
        require_same_run(replace(saved, model=older), identity(config_of(model={"position": {"type": "none"}}), ROWS), folder="runs/x")


def test_another_tokenizer_is_a_fault_and_other_tokens_are_other_data() -> None:
    with pytest.raises(ConfigError, match="tokenizer"):
        require_same_run(state_of(config_of()), identity(config_of(), {**ROWS, "tokenizer_hash": "u" * 64}), folder="runs/x")
    with pytest.raises(DataError, match="bbbbbbbbbbbb"):
        require_same_run(
            state_of(config_of()), identity(config_of(), {**ROWS, "sources": [[{"name": "web", "hash": "b" * 64}]]}), folder="runs/x"
        )


def test_rows_packed_otherwise_are_other_data() -> None:
    """Invariant 11: a run that an earlier program began never meets another order of rows. What it kept has no version, which is 1."""
    first = identity(config_of(), {**ROWS, "packing_version": 1})
    assert "packing_version" not in first["data_identity"]
    began = RunState(step=4, samples=64, tokens=9000, global_batch_size=16, **first)
    require_same_run(began, identity(config_of(), {**ROWS, "packing_version": 1}), folder="runs/x")
    with pytest.raises(DataError, match=r"packing version 1, this program makes version 2 .*\. Use the program that began the run"):
        require_same_run(began, identity(config_of(), ROWS), folder="runs/x")


# Key -> another value. With the first ones tensors have other names or shapes, which loading finds.
BY_SHAPE = {
    "vocab_size": 301,
    "hidden_size": 512,
    "intermediate_size": 769,
    "num_hidden_layers": 5,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "mlp.bias": True,
}
REFUSED = {"num_attention_heads": 4, "num_key_value_heads": 2}
RECORDED = {"rms_norm_eps": 1e-6, "rope.theta": 5e5, "mlp.activation": "gelu"}


def test_weights_alone_keep_their_meaning() -> None:
    """Of the keys that decide what weights compute, none slips through where shapes agree: refused, or on record. Nor do other tokens."""
    assert {"rope.theta", *(key.ours for key in LLAMA.keys if key.computes)} == {*BY_SHAPE, *REFUSED, *RECORDED}
    before = config_of(model={"num_key_value_heads": 4})
    origin = state_of(before).identity()

    def other(values: dict[str, Any], **rows: Any) -> dict[str, Any]:
        return identity(config_of(model={"num_key_value_heads": 4, **values}), {**ROWS, **rows})

    with pytest.raises(ConfigError, match=r"got 4, wanted 8 as in runs/a.*\n.*got 2, wanted 4 as in runs/a.*\n.*'tttttttttttttttt' as in"):
        require_same_meaning(origin, other(REFUSED, tokenizer_hash="u" * 64), where="runs/a")
    recorded = other({"rms_norm_eps": 1e-6, "rope": {"theta": 5e5}})
    require_same_meaning(origin, recorded, where="runs/a")
    assert changed_meaning(origin, recorded) == [("model.rms_norm_eps", 1e-5, 1e-6), ("model.rope.theta", 10000.0, 5e5)]
    same = other(
        {"hidden_dropout": 0.1, "max_position_embeddings": 4096, "init": {"std": 0.01}}, sources=[[{"name": "b", "hash": "b" * 64}]]
    )
    require_same_meaning(origin, same, where="runs/a")
    assert changed_meaning(origin, same) == []
    assert changed_meaning(origin, same, and_also=("max_position_embeddings",)) == [("model.max_position_embeddings", 2048, 4096)]
    require_same_meaning(state_of(config_of()).identity(), other({"num_key_value_heads": 8}), where="runs/a")  # null is as many as heads


FREE: list[tuple[str, dict[str, Any]]] = [
    ("parallel", {"tp": 2, "zero_stage": 3, "sequence_parallel": True}),
    ("training", {"micro_batch_size": 2, "activation_checkpointing": "full", "engine": "torch"}),
    ("deepspeed", {"zero_optimization": {"reduce_bucket_size": 5}}),
    ("logging", {"interval_steps": 5}),
    ("checkpoint", {"interval_steps": 5, "keep_last": 9}),
    ("evaluation", {"interval_steps": 5}),
    ("data", {"path": "moved"}),
]


@pytest.mark.parametrize(("section", "values"), FREE)
def test_layout_and_bookkeeping_are_free(section: str, values: dict[str, Any]) -> None:
    """Neither refused nor on record."""
    before, after = config_of(), config_of(**{section: values})
    require_same_run(state_of(before), identity(after, ROWS), folder="runs/x")
    assert recorded_changes(before.model_dump(mode="json"), after) == []


@pytest.mark.parametrize(
    ("section", "values", "changes"),
    [
        ("training", {"steps": 20}, [("training.steps", 10, 20)]),
        ("training", {"global_batch_size": 32}, [("training.global_batch_size", 16, 32)]),
        ("optimizer", {"lr": 1e-4, "betas": [0.9, 0.99]}, [("optimizer.lr", 1e-3, 1e-4), ("optimizer.betas", [0.9, 0.95], [0.9, 0.99])]),
        ("lr_scheduler", {"name": "linear"}, [("lr_scheduler.name", "cosine", "linear")]),
    ],
)
def test_hyperparameters_may_change_on_record(section: str, values: dict[str, Any], changes: list[Any]) -> None:
    before, after = config_of(), config_of(**{section: values})
    require_same_run(state_of(before), identity(after, ROWS), folder="runs/x")
    assert recorded_changes(before.model_dump(mode="json"), after) == changes


def test_new_weights_are_a_new_phase_from_the_next_sample() -> None:
    first = next_phases([], [1.0, 3.0], samples=0)
    assert first == [{"from_sample": 0, "weights": [1.0, 3.0]}]
    assert next_phases(first, [2.0, 6.0], samples=64) == first  # the same shares
    second = next_phases(first, [1.0, 1.0], samples=64)
    assert second == [*first, {"from_sample": 64, "weights": [1.0, 1.0]}]
    assert next_phases(second, [5.0, 1.0], samples=64) == [*first, {"from_sample": 64, "weights": [5.0, 1.0]}]


def test_a_budget_of_tokens_counts_what_was_consumed() -> None:
    """Also when the batch size changed half-way."""
    config = config_of(training={"steps": None, "tokens": 100_000, "sequence_length": 100, "global_batch_size": 10})
    state = state_of(config)
    assert Start().total_steps(config) == 100
    assert Start(state=replace(state, step=40, samples=400)).total_steps(config) == 100
    larger = config_of(training={"steps": None, "tokens": 100_000, "sequence_length": 100, "global_batch_size": 20})
    assert Start(state=replace(state, step=40, samples=400)).total_steps(larger) == 70
