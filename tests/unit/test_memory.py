"""If this fails, `mlite plan` promises memory that a run doesn't keep to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from megatron_lite.activations import rank_shape, saved_by_layer, saved_by_loss, saved_outside_layers
from megatron_lite.activations_seq2seq import Sides, saved_by_layers, saved_outside
from megatron_lite.config import ParallelConfig, TrainingConfig
from megatron_lite.layers import tiled_attention
from megatron_lite.memory import Buckets, memory
from megatron_lite.model_config import ModelConfig
from megatron_lite.models.batch import Batch, DropoutKey
from megatron_lite.models.build import build_model
from megatron_lite.models.decoder import ForwardOptions
from megatron_lite.parallel.groups import Axis, ProcessGroups
from megatron_lite.sizes import largest_local_parameter, num_local_parameters

MODEL = {"vocab_size": 80, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96}
LENGTH, ROWS = 32, 2


@pytest.fixture(autouse=True)
def few_threads() -> Iterator[None]:
    """The plan is of few threads: with many, attention takes another way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def kept_by_autograd(config: ModelConfig, training: TrainingConfig, *, pieces: int = 1, groups: ProcessGroups | None = None) -> int:
    """Bytes of every storage that a forward leaves for its backward, parameters apart."""
    dtype = torch.bfloat16 if training.precision == "bf16" else torch.float32
    length = training.sequence_length
    model = build_model(config, groups or ProcessGroups.single(), seed=0, dtype=dtype, options=ForwardOptions.of(training))
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    ids = np.random.default_rng(0).integers(0, config.vocabulary, (ROWS, length))
    starts = [list(range(0, length, length // pieces))] * ROWS
    batch = Batch.from_rows(ids, ids, starts, range(ROWS), document_mask=True)
    if config.family == "seq2seq":
        batch = batch.with_source(ids[:, : training.encoder_length], [[0, 9]] * ROWS)
    kept: dict[int, int] = {}
    alive = []  # storages must not be freed and their addresses used again while we count

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    dropout = config.hidden_dropout + config.attention_dropout > 0
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss, _ = model(batch, DropoutKey(0, 1) if dropout else None)
    assert loss.requires_grad
    return sum(kept.values())


def planned_activations(
    config: ModelConfig, training: TrainingConfig, *, pieces: bool = False, parallel: ParallelConfig | None = None
) -> int:
    shape = rank_shape(config, training, parallel or ParallelConfig(), micro_batch_size=ROWS, pieces=pieces)
    outside = saved_outside_layers(shape)
    if outside["bias of scores"] and (config.position.type == "t5" or training.activation_checkpointing != "none"):
        outside["bias of scores"] -= (
            4 * config.num_attention_heads * training.sequence_length**2
        )  # it is there, but autograd has no need of it
    if training.activation_checkpointing == "full":
        del outside["rotation"]  # held by the checkpoints, not by autograd
    layers = config.num_hidden_layers * sum(saved_by_layer(shape, training.activation_checkpointing).values())
    return layers + sum(outside.values()) + sum(saved_by_loss(shape).values())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("extra", "length"),
    [
        ({}, LENGTH),
        ({"num_key_value_heads": 1}, 512),  # long enough for attention tile by tile
        ({"hidden_dropout": 0.1}, LENGTH),
        ({"attention_dropout": 0.1, "num_key_value_heads": 2}, LENGTH),
        ({"position": {"type": "learned"}}, LENGTH),
        ({"position": {"type": "none"}, "num_key_value_heads": 1}, 512),
        ({"position": {"type": "sinusoidal"}, "attention_dropout": 0.1, "num_key_value_heads": 2}, LENGTH),
        ({"rope": {"partial_rotary_factor": 0.25}, "num_key_value_heads": 1}, 512),
        ({"position": {"type": "alibi"}}, LENGTH),
        ({"position": {"type": "t5"}, "attention": {"qk_norm": "rms_norm", "scale": "head_temperature"}}, LENGTH),
        ({"attention": {"sinks": True, "logit_softcapping": 3.0, "qkv_bias": True, "o_bias": True}}, LENGTH),
        ({"attention": {"sliding_window": 5, "qk_norm": "layer_norm"}}, LENGTH),
        ({"attention": {"sliding_window": 50, "scale": "cosine"}, "num_key_value_heads": 1}, 512),
    ],
)
def test_activations_are_those_that_autograd_keeps(precision: Any, checkpointing: Any, extra: dict[str, Any], length: int) -> None:
    """If this fails, a layer keeps other tensors than megatron_lite/activations.py lists: correct the list there."""
    config = ModelConfig(**{**MODEL, **extra})
    training = TrainingConfig(steps=1, sequence_length=length, precision=precision, activation_checkpointing=checkpointing)
    assert planned_activations(config, training) == pytest.approx(kept_by_autograd(config, training), rel=0.02)


VARIATIONS: list[dict[str, Any]] = [
    {"position": {"type": "t5"}, "attention": {"sinks": True, "scale": "cosine", "qkv_bias": True, "o_bias": True}},
    {"position": {"type": "learned"}, "attention": {"qk_norm": "rms_norm", "scale": "temperature"}},
    {"norm": {"type": "layer_norm", "bias": True, "placement": "post"}, "mlp": {"activation": "relu", "gated": False, "bias": True}},
    {"norm": {"placement": "sandwich", "zero_centred": True}, "mlp": {"activation": "gelu_pytorch_tanh"}, "hidden_dropout": 0.1},
    {"norm": {"type": "layer_norm", "zero_centred": True}, "residual": {"parallel": "one_norm"}, "mlp": {"activation": "relu2"}},
    {"residual": {"parallel": "two_norms", "learned_step_size": "branch"}, "mlp": {"activation": "gelu", "gated": False}},
    {"residual": {"step_size": "inverse_sqrt_layers"}, "mlp": {"activation": "relu2", "gated": False}},
]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("extra", VARIATIONS, ids=str)
def test_activations_of_variations(precision: Any, extra: dict[str, Any]) -> None:
    config, training = ModelConfig(**{**MODEL, **extra}), TrainingConfig(steps=1, sequence_length=LENGTH, precision=precision)
    assert planned_activations(config, training) == pytest.approx(kept_by_autograd(config, training), rel=0.02)


@pytest.mark.parametrize(
    ("precision", "checkpointing", "extra"),
    [
        ("fp32", "none", {"hidden_dropout": 0.1, "num_key_value_heads": 1}),
        ("bf16", "none", {"norm": {"type": "layer_norm", "bias": True, "placement": "post"}, "position": {"type": "sinusoidal"}}),
        ("bf16", "none", {"attention_dropout": 0.1}),
        ("fp32", "selective", {"attention_dropout": 0.1}),
        ("bf16", "full", {"hidden_dropout": 0.1}),
    ],
)
def test_activations_of_an_encoder_decoder(precision: Any, checkpointing: Any, extra: dict[str, Any]) -> None:
    """If this fails, correct megatron_lite/activations_seq2seq.py."""
    config = ModelConfig(**{**MODEL, "family": "seq2seq", "encoder": {"num_hidden_layers": 2}, **extra})
    training = TrainingConfig(
        steps=1, sequence_length=LENGTH, source_length=24, precision=precision, activation_checkpointing=checkpointing
    )
    sides = Sides.of(rank_shape(config, training, ParallelConfig(), micro_batch_size=ROWS), 24)
    outside = saved_outside(sides)
    if checkpointing == "full":  # these are held by the checkpoints, not by autograd
        outside = {name: count for name, count in outside.items() if not name.startswith(("rotation", "memory", "masks"))}
    planned = saved_by_layers(sides, checkpointing) + sum(outside.values()) + sum(saved_by_loss(sides.target).values())
    assert planned == pytest.approx(kept_by_autograd(config, training, pieces=4), rel=0.02)


def test_tiles_are_the_kernels() -> None:
    """If this fails, the plan takes another way through attention than a run does."""
    parallel, seen = ParallelConfig(zero_stage=0), set()
    for heads, kv_heads in ((4, 4), (4, 2), (6, 2), (8, 1)):
        for length in (32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048):
            config = ModelConfig(**{**MODEL, "hidden_size": 16 * heads, "num_attention_heads": heads, "num_key_value_heads": kv_heads})
            training = TrainingConfig(steps=1, sequence_length=length)
            q, k = torch.empty(1, heads, length, 16), torch.empty(1, kv_heads, length, 16)
            tiled = rank_shape(config, training, parallel, micro_batch_size=1).tiled
            assert tiled == tiled_attention.serves(q, k), (heads, kv_heads, length)
            seen.add(tiled)
    assert seen == {False, True}


@pytest.mark.parametrize("length", [LENGTH, 512])
def test_rows_of_documents(length: int) -> None:
    """If this fails, rows of many documents need another amount of memory than the plan says."""
    config, training = ModelConfig(**MODEL), TrainingConfig(steps=1, sequence_length=length)
    assert planned_activations(config, training, pieces=True) == pytest.approx(kept_by_autograd(config, training, pieces=4), rel=0.02)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("extra", [{}, {"tie_word_embeddings": True, "vocab_size": 83}, {"num_key_value_heads": 1}, *VARIATIONS], ids=str)
def test_local_parameters_are_the_models(tp: int, extra: dict[str, Any]) -> None:
    """If this fails, a rank holds more or fewer parameters than planned; exact, on every tp rank."""
    config = ModelConfig(**{**MODEL, **extra})
    for rank in range(tp):
        groups = dataclasses.replace(ProcessGroups.single(), tp=Axis("tp", tp, rank))
        if tp > config.kv_heads:
            groups = with_shared_heads(groups, tp // config.kv_heads)
        sizes = [parameter.numel() for parameter in build_model(config, groups, seed=0, materialise=False).parameters()]
        assert (num_local_parameters(config, tp), largest_local_parameter(config, tp)) == (sum(sizes), max(sizes))


def with_shared_heads(groups: ProcessGroups, size: int) -> ProcessGroups:
    """Groups in which `size` tp ranks share a KV head; nothing is communicated."""
    found = dataclasses.replace(groups)
    object.__setattr__(found, "subgroup", lambda axis, wanted: Axis(axis, size, groups.tp.rank % size))
    return found


@pytest.mark.parametrize(
    ("engine", "precision", "stage", "bytes_a_parameter"),
    [
        ("torch", "fp32", 0, (4, 4, 8)),
        ("torch", "bf16", 0, (2, 4, 12)),
        ("deepspeed", "fp32", 0, (4, 4, 8)),
        ("deepspeed", "fp32", 1, (4, 4, 3)),  # over dp = 4: masters and moments are sharded
        ("deepspeed", "bf16", 1, (2, 4, 3)),
        ("deepspeed", "fp32", 2, (4, 1, 3)),
        ("deepspeed", "bf16", 2, (2, 1, 3)),
        ("deepspeed", "fp32", 3, (1, 1, 3)),
        ("deepspeed", "bf16", 3, (0.5, 1, 3)),
    ],
)
def test_bytes_a_parameter_by_stage(engine: Any, precision: Any, stage: Any, bytes_a_parameter: tuple[float, float, float]) -> None:
    """weights, gradients or their sums, masters and moments at the loss of a later micro-batch; as DeepSpeed 0.19 allocates."""
    config = ModelConfig(**MODEL)
    training = TrainingConfig(steps=1, sequence_length=LENGTH, engine=engine, precision=precision, global_batch_size=16)
    parts = memory(config, training, ParallelConfig(zero_stage=stage), dp=4, micro_batch_size=1).moments["loss"]
    found = (parts["weights"], parts["gradients"] + parts["accumulators"], parts["optimizer"])
    assert found == tuple(round(each * num_local_parameters(config, 1)) for each in bytes_a_parameter)


def test_what_a_knob_promises_it_keeps() -> None:
    """If this fails, advice to save memory by one of these would be wrong."""
    config = ModelConfig(**MODEL)

    def peak(dp: int = 1, micro: int = 4, live: int = Buckets.stage3_live, **keys: Any) -> int:
        parallel = ParallelConfig(**{key: keys.pop(key) for key in ("tp", "zero_stage", "sequence_parallel") if key in keys})
        training = TrainingConfig(**{"steps": 1, "sequence_length": LENGTH, "global_batch_size": 32, **keys})
        return memory(config, training, parallel, dp=dp, micro_batch_size=micro, buckets=Buckets(stage3_live=live), on_cpu=False).peak_bytes

    assert peak(micro=2) < peak()
    assert peak(activation_checkpointing="full") < peak(activation_checkpointing="selective") < peak()
    assert peak(precision="bf16") < peak()
    assert peak(tp=2, sequence_parallel=True) < peak(tp=2) < peak()
    assert peak(dp=4, zero_stage=2) < peak(dp=4, zero_stage=1) < peak(dp=1, zero_stage=1)
    assert peak(dp=4, zero_stage=3, live=0) < peak(dp=4, zero_stage=3)
