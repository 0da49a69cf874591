"""If this fails, tokens stand elsewhere than the published formulas say, or a longer text gets nonsense without a word."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from data_pipeline.errors import ConfigError
from data_pipeline.schema import validate
from megatron_lite.attention_config import RopeConfig
from megatron_lite.inference.kv_cache import KVCache
from megatron_lite.layers.position_bias import alibi_slopes, t5_buckets
from megatron_lite.layers.position_embedding import SinusoidalPositions
from megatron_lite.layers.positions import Rotation, attention_factor, frequencies, rotate, rotation
from megatron_lite.model_config import ModelConfig
from megatron_lite.models.batch import Batch
from megatron_lite.models.build import build_model
from megatron_lite.models.decoder import Decoder
from megatron_lite.parallel.groups import ProcessGroups

SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 4096},
    "yarn, its own factor": {"factor": 8.0, "original_max_position_embeddings": 512, "attention_factor": 1.5, "beta_fast": 16.0},
    "llama3": {"factor": 8.0, "original_max_position_embeddings": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


def rope(name: str, theta: float = 500000.0, share: float = 1.0) -> RopeConfig:
    scaling = {"type": name.partition(",")[0], **SCALINGS.get(name, {})}
    return validate(RopeConfig, {"theta": theta, "partial_rotary_factor": share, "scaling": scaling})


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_frequencies_are_those_of_transformers(name: str, share: float) -> None:
    """A checkpoint of another length would be read at other angles: transformers' ROPE_INIT_FUNCTIONS give the same fp32 numbers."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    ours = rope(name, share=share)
    parameters = {"rope_type": ours.scaling.type, "rope_theta": ours.theta, "partial_rotary_factor": share, **SCALINGS[name]}
    theirs = LlamaConfig(hidden_size=512, num_attention_heads=4, max_position_embeddings=32768, rope_parameters=parameters)
    expected, factor = ROPE_INIT_FUNCTIONS[ours.scaling.type](theirs, torch.device("cpu"))
    torch.testing.assert_close(frequencies(128, ours), expected, rtol=1e-6, atol=0)
    assert attention_factor(ours.scaling) == pytest.approx(factor)


def test_ntk_is_a_larger_theta() -> None:
    """theta * factor^(R/(R - 2)): the slowest pair turns factor times slower, as under linear, the fastest as before; what
    transformers' "dynamic" has where its length gives the same theta."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    plain, scaled = (frequencies(64, validate(RopeConfig, {"scaling": each})) for each in ({}, {"type": "ntk", "factor": 4.0}))
    assert scaled[0] == plain[0] and plain[-1] / scaled[-1] == pytest.approx(4.0, rel=1e-5)
    parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    theirs = LlamaConfig(hidden_size=64, num_attention_heads=1, max_position_embeddings=1000, rope_parameters=parameters)
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](theirs, torch.device("cpu"), seq_len=1750)  # 4 * 1.75 - 3 = 4
    torch.testing.assert_close(scaled, expected, rtol=1e-6, atol=0)


def test_yarn_lengthens_queries_and_keys() -> None:
    """Peng et al. 2023, equation 22: scores at factor 4 are (0.1 ln 4 + 1)^2 = 1.296 times as large; and the gradient is exact."""
    by = rotation(torch.tensor([[5]]), 16, rope("yarn"))
    x = torch.randn(1, 1, 2, 16, generator=torch.Generator().manual_seed(0))
    assert float(rotate(x, by).norm() / x.norm()) == pytest.approx(0.1 * math.log(4) + 1, rel=1e-5)
    exact = x.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: rotate(x, Rotation(by.cos.double(), by.sin.double())), (exact,))


def test_part_of_each_head_is_turned() -> None:
    """GPT-NeoX's rotary_pct: the first channels turn as a head of that size would, the others pass through."""
    config, where = rope("none", share=0.25), torch.tensor([[3, 7]])
    x = torch.randn(1, 2, 2, 32, generator=torch.Generator().manual_seed(0))
    turned = rotate(x, rotation(where, 32, config))
    assert torch.equal(turned[..., 8:], x[..., 8:])
    assert torch.equal(turned[..., :8], rotate(x[..., :8].contiguous(), rotation(where, 8, rope("none"))))


def test_sinusoids_are_the_papers() -> None:
    """Vaswani et al. 2017, section 3.5: PE(p, 2i) = sin(p / 10000^(2i/D)), PE(p, 2i + 1) = cos of it; sines first here, as in Marian."""
    from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

    places = [0, 1, 2, 100, 511]
    found = SinusoidalPositions(64)(torch.tensor([places]))[0]
    for row, place in zip(found, places):
        for i in range(32):
            assert row[i].item() == pytest.approx(math.sin(place / 10000 ** (2 * i / 64)), abs=5e-5)
            assert row[32 + i].item() == pytest.approx(math.cos(place / 10000 ** (2 * i / 64)), abs=5e-5)
    theirs = MarianSinusoidalPositionalEmbedding(512, 64)
    torch.testing.assert_close(found, theirs.create_weight()[places].float(), atol=5e-5, rtol=0)


@pytest.mark.parametrize("heads", [1, 4, 6, 12, 16])
def test_alibi_slopes_are_blooms(heads: int) -> None:
    """Press et al. 2022, section 3: for 8 heads 1/2, 1/4 ... 1/256; for a number that is no power of two as the authors' code."""
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    theirs = build_alibi_tensor(torch.ones(1, 3), heads, torch.float32)  # [H, 1, 3]: slope * key's place
    torch.testing.assert_close(alibi_slopes(heads), theirs[:, 0, 1], rtol=1e-6, atol=0)
    assert alibi_slopes(8).tolist() == [2.0**-n for n in range(1, 9)]


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("buckets", "reach"), [(32, 128), (8, 20)])
def test_buckets_are_t5s(buckets: int, reach: int, bidirectional: bool) -> None:
    """Raffel et al. 2020, section 2.1, for distances on both sides, beyond max_distance too; theirs are key minus query."""
    from transformers.models.t5.modeling_t5 import T5Attention

    distances = torch.arange(-300, 301)
    theirs = T5Attention._relative_position_bucket(-distances, bidirectional=bidirectional, num_buckets=buckets, max_distance=reach)
    assert torch.equal(t5_buckets(distances, buckets, reach, bidirectional=bidirectional), theirs)


# ------------------------------------------------------------------------------------------------- beyond what was trained

TINY = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}


def build(**position: Any) -> Decoder:
    config = ModelConfig.model_validate({**TINY, "max_position_embeddings": 8, "position": position})
    return build_model(config, ProcessGroups.single(), seed=1)


def text_of(length: int, starts: list[int] | None = None) -> Batch:
    ids = np.random.default_rng(0).integers(0, 61, (1, length))
    return Batch.from_rows(ids, ids, [starts or [0]], [0], document_mask=True)


@pytest.mark.parametrize("kind", ["rope", "sinusoidal", "alibi", "t5", "none"])
def test_longer_texts_get_an_answer(kind: str) -> None:
    """Beyond max_position_embeddings, which only says how far the model was meant to read; the beginning reads as before."""
    model, short = build(type=kind), text_of(8)
    long = Batch.from_rows(np.tile(short.inputs, 3), np.tile(short.inputs, 3), [[0]], [0], document_mask=True)
    torch.testing.assert_close(model.logits(long)[:, :8], model.logits(short), atol=1e-5, rtol=0)


def test_learned_positions_end_where_their_table_ends() -> None:
    """In a forward and in decoding; a row of short documents may be longer."""
    model = build(type="learned")
    assert torch.isfinite(model.logits(text_of(24, [0, 8, 16]))).all()
    message = r"sequence length: got '?9 tokens'?, wanted at most model.max_position_embeddings \(8\) with position.type: learned"
    for batch in (text_of(9), text_of(24, [0, 9, 16])):
        with pytest.raises(ConfigError, match=message):
            model.logits(batch)
    cache = KVCache(16)
    model.logits(text_of(8), store=cache)
    late = Batch(torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64), torch.tensor([[8]]), None, torch.zeros(1))
    with pytest.raises(ConfigError, match=message):
        model.logits(late, store=cache)


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        ({"position": {"type": "alibi", "relative_attention_num_buckets": 16}}, "model.position.relative_attention_num_buckets: got 16, wanted its default (32) with type: alibi"),
        ({"position": {"type": "t5", "relative_attention_num_buckets": 6}}, "model.position.relative_attention_num_buckets: got 6, wanted a multiple of 4"),
        ({"position": {"type": "t5", "relative_attention_max_distance": 16}}, "wanted above half of relative_attention_num_buckets (16)"),
        ({"position": {"type": "none"}, "rope": {"theta": 5e5}}, "model.rope.theta: got 500000.0, wanted its default with position.type: none"),
        ({"position": {"type": "none"}, "rope": {"scaling": {"type": "linear", "factor": 2.0}}}, "model.rope.scaling: got"),
        ({"position": {"type": "sinusoidal"}, "hidden_size": 33, "head_dim": 8}, "model.hidden_size: got 33, wanted an even number"),
        ({"position": {"type": "none"}, "head_dim": 7}, ""),
        ({"head_dim": 7}, "model.head_dim: got 7, wanted an even number, for rotary pairs"),
        ({"rope": {"partial_rotary_factor": 0.4}}, "model.rope.partial_rotary_factor: got 0.4, wanted a share of head_dim (8) that is an even number of channels, not 3. use 0.25"),
        ({"rope": {"scaling": {"type": "linear"}}}, "model.rope.scaling.factor: got 1.0, wanted above 1 with type: linear"),
        ({"rope": {"scaling": {"factor": 2.0}}}, "model.rope.scaling.factor: got 2.0, wanted its default (1.0) with type: none"),
        ({"rope": {"scaling": {"type": "linear", "factor": 2.0, "beta_fast": 8.0}}}, "model.rope.scaling.beta_fast: got 8.0, wanted its default (32.0) with type: linear"),
        ({"rope": {"scaling": {"type": "yarn", "factor": 2.0}}}, "model.rope.scaling.original_max_position_embeddings: got None, wanted a number of tokens with type: yarn"),
        ({"rope": {"scaling": {"type": "llama3", "factor": 2.0, "original_max_position_embeddings": 8, "high_freq_factor": 1.0}}}, "model.rope.scaling.low_freq_factor: got 1.0, wanted below high_freq_factor (1.0)"),
        ({"rope": {"theta": 1.0, "scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8}}}, "model.rope.theta: got 1.0, wanted above 1 with rope.scaling.type: yarn"),
        ({"rope": {"partial_rotary_factor": 0.25, "scaling": {"type": "ntk", "factor": 2.0}}}, "model.rope.scaling.type: got 'ntk', wanted more than one rotated pair a head"),
    ],
)  # fmt: skip
def test_what_can_not_be_is_refused(keys: dict[str, Any], fault: str) -> None:
    """One clear fault, at the key that is wrong; the last word on a key that nothing reads."""
    if not fault:
        validate(ModelConfig, {**TINY, **keys}, prefix="model")
        return
    with pytest.raises(ConfigError) as error:
        validate(ModelConfig, {**TINY, **keys}, prefix="model")
    assert fault in str(error.value) and len(error.value.faults) == 1, error.value
