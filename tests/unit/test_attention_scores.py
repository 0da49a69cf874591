"""If this fails, scores are of another size, a layer sees more or less of the past than its window, or a bad choice is taken."""

import math
from typing import Any

import pytest
import torch

from data_pipeline.errors import ConfigError
from data_pipeline.schema import validate
from launcher.distributed import describe_attention
from megatron_lite.attention_sizes import why_written_out
from megatron_lite.config import TrainingConfig
from megatron_lite.inference.kv_cache import KVCache
from megatron_lite.layers import kernels, tiled_attention
from megatron_lite.layers.document_kernels import choose_kernel
from megatron_lite.layers.kernels import AttentionMask, Scoring, attention
from megatron_lite.layers.linear import cut_rows
from megatron_lite.layers.query_key import query_key
from megatron_lite.model_config import ModelConfig
from megatron_lite.models.batch import Batch
from megatron_lite.models.build import build_model
from megatron_lite.models.init import local_init, materialise
from megatron_lite.parallel.groups import Axis, ProcessGroups
from megatron_lite.sizes import flops_per_token

TINY: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


def score_spread(head_dim: int, *, input_std: float = 1.0, **how: Any) -> float:
    """Standard deviation of the scores of independent queries and keys whose channels have this standard deviation."""
    config = ModelConfig.model_validate({**TINY, "head_dim": head_dim, "attention": how})
    layer = query_key(config, ProcessGroups.single(), name="layers.0.attention")
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 500, 4, head_dim, generator=generator) * input_std for _ in range(2))
    if layer is not None:
        with torch.no_grad():
            materialise(layer, config, seed=1, device="cpu", dtype=torch.float32)
            q, k = layer.of_queries(q), layer.of_keys(k)
    return float((torch.einsum("bshe,bthe->bhst", q, k) / math.sqrt(head_dim)).std())


HEAD_DIMS = (16, 64, 256, 1024)


def test_unscaled_scores_grow_with_the_root_of_head_dim() -> None:
    """Vaswani et al. 2017, footnote 4: a sum of E products of independent unit variances has variance E."""
    for head_dim in HEAD_DIMS:
        assert score_spread(head_dim, scale=1.0) == pytest.approx(math.sqrt(head_dim), rel=0.03)


@pytest.mark.parametrize("how", [{}, {"scale": "temperature"}, {"scale": "head_temperature"}, {"scale": "cosine"}, {"qk_norm": "rms_norm"}, {"qk_norm": "layer_norm"}], ids=str)  # fmt: skip
def test_every_alternative_keeps_scores_of_one_size(how: dict[str, Any]) -> None:
    """At the beginning; cosine and the norms whatever the size of queries and keys."""
    fixed = "qk_norm" in how or how.get("scale") == "cosine"
    for head_dim in HEAD_DIMS:
        assert score_spread(head_dim, **how) == pytest.approx(1.0, rel=0.05)
        assert score_spread(head_dim, input_std=10.0, **how) == pytest.approx(1.0 if fixed else 100.0, rel=0.05)


@pytest.mark.parametrize("head_dim", [16, 256])
def test_weights_that_hold_the_scale_give_scores_of_the_same_size(head_dim: int) -> None:
    """scale: init draws q and k smaller, by the fourth root of head_dim each; then q k^T needs no division."""
    spread = {}
    for scale in ("init", "sqrt"):
        config = ModelConfig.model_validate({**TINY, "hidden_size": 256, "head_dim": head_dim, "attention": {"scale": scale}})
        spec = cut_rows({f"layers.0.attention.{each}.weight": head_dim for each in "qk"}, 256, Axis("tp"))
        weights = local_init(spec, config, 1).view(2, head_dim, 256)
        x = torch.randn(400, 256, generator=torch.Generator().manual_seed(0))
        scores = (x @ weights[0].T) @ (x @ weights[1].T).T
        spread[scale] = float((scores if scale == "init" else scores / math.sqrt(head_dim)).std())
    assert spread["init"] == pytest.approx(spread["sqrt"], rel=1e-5)


# ----------------------------------------------------------------------------------------------------------------- windows


def heads(number: int, length: int = 400, seed: int = 0) -> torch.Tensor:
    return torch.randn(2, length, number, 16, generator=torch.Generator().manual_seed(seed)).transpose(1, 2)


@pytest.mark.parametrize("pieces", [None, (37, 300, 63, 399, 1)])
@pytest.mark.parametrize("window", [1, 50, 130, 400])
def test_window_by_tiles_is_the_formulas(window: int, pieces: tuple[int, ...] | None) -> None:
    """Output and gradients, of rows and of documents; a window that ends within a tile, and one that spans several."""
    segments = None if pieces is None else torch.repeat_interleave(torch.arange(5), torch.tensor(pieces)).view(2, -1)
    allowed = kernels._causal(400, 400, torch.device("cpu"), window) if segments is None else kernels._blocks(segments, window)
    found = []
    for mask in (AttentionMask(allowed=allowed), None):
        q, k, v = (heads(number, seed=number).requires_grad_() for number in (4, 2, 2))
        if mask is None:
            out = tiled_attention.tiled_attention(q, k, v, segments, pieces, window=window)
        else:
            out = attention(q, k, v, mask=mask)
        out.square().sum().backward()
        found.append([out.detach(), q.grad, k.grad, v.grad])
    for wanted, ours in zip(*found):
        torch.testing.assert_close(ours, wanted, atol=5e-5, rtol=1e-4)


def test_tiles_before_a_window_are_skipped() -> None:
    tiles = tiled_attention.tiles_of((512,), 512, 128, 100)
    assert [(tile.start, tile.first_key) for tile in tiles] == [(0, 0), (128, 29), (256, 157), (384, 285)]


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("window", [5, 128, 200])
def test_window_by_flex(window: int) -> None:
    """FlexAttention over our list of tiles, with documents: none is missing, none called full that is not."""
    segments = torch.tensor([[0] * 300 + [1] * 100, [0] * 400], dtype=torch.int32)
    q, k, v = heads(4), heads(2, seed=1), heads(2, seed=2)
    fused, plain = (
        attention(q, k, v, mask=AttentionMask.of_segments(segments, kernel=kernel, window=window)) for kernel in ("flex", "blocks")
    )
    torch.testing.assert_close(fused, plain, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("every", [None, 2])
def test_layers_see_their_windows_and_no_more(every: int | None) -> None:
    """B133: two local layers of 4 reach back 6 tokens, also from a cache that grows beyond the window; a global one the whole text."""
    config = ModelConfig.model_validate({**TINY, "init": {"std": 0.2}, "attention": {"sliding_window": 4, "global_every": every}})
    model = build_model(config, ProcessGroups.single(), seed=1)
    ids = torch.arange(12)[None]
    edited = ids.clone()
    edited[0, 2] = 40

    def logits(ids: torch.Tensor, cached: bool) -> torch.Tensor:
        store = KVCache(12) if cached else None
        parts = ids.split([3, *[1] * 9], dim=1) if cached else (ids,)
        places = torch.arange(12)[None].split([part.shape[1] for part in parts], dim=1)
        batches = (Batch(part, part, where, None, torch.zeros(1, dtype=torch.int64)) for part, where in zip(parts, places))
        return torch.cat([model.logits(batch, store=store)[0] for batch in batches])

    for cached in (False, True):
        changed = (logits(ids, cached) != logits(edited, cached)).any(dim=-1)
        assert changed.tolist() == [2 <= place <= (11 if every else 8) for place in range(12)]
    torch.testing.assert_close(logits(ids, True), logits(ids, False), atol=1e-5, rtol=1e-5)


def test_a_windows_flops_are_counted() -> None:
    plain, local, mixed = (
        ModelConfig.model_validate({**TINY, "attention": how})
        for how in ({}, {"sliding_window": 16}, {"sliding_window": 16, "global_every": 2})
    )
    assert flops_per_token(plain, 64) - flops_per_token(local, 64) == 12 * 2 * 32 * (64 - 16)
    assert flops_per_token(plain, 64) - flops_per_token(mixed, 64) == 12 * 32 * (64 - 16)
    assert flops_per_token(local, 8) == flops_per_token(plain, 8)


# ------------------------------------------------------------------------------------------------------ sinks, caps, refusals


def test_a_sink_takes_its_share_to_nothing() -> None:
    """All scores 0 and a sink of 0: n keys and the sink get 1 / (n + 1) each. A very low sink takes nothing."""
    q, k, v = torch.zeros(1, 2, 3, 8), torch.zeros(1, 1, 3, 8), torch.ones(1, 1, 3, 8)
    out = attention(q, k, v, mask=AttentionMask(), scoring=Scoring(sinks=torch.tensor([0.0, -1e9])))
    torch.testing.assert_close(out[0, :, :, 0], torch.tensor([[1 / 2, 2 / 3, 3 / 4], [1.0, 1.0, 1.0]]))


def test_a_cap_bounds_scores() -> None:
    """Gemma 2: scores lie within plus and minus the cap, and small ones stay what they are."""
    q = torch.tensor([1e4, 0.01])[None, None, :, None].expand(1, 1, 2, 1)
    v = torch.tensor([1.0, 0.0])[None, None, :, None]
    out = attention(
        q,
        torch.tensor([1.0, -1.0])[None, None, :, None],
        v,
        mask=AttentionMask(allowed=torch.ones(1, 1, 2, 2, dtype=torch.bool)),
        scoring=Scoring(softcap=2.0),
    )
    assert out.flatten().tolist() == pytest.approx([1 / (1 + math.exp(-4)), 1 / (1 + math.exp(-0.02))], abs=1e-6)


def test_a_kernel_that_can_not_says_so() -> None:
    """On GPUs a bias, a cap or sinks are written out, and the run says why; a window is not."""
    cuda, training = torch.device("cuda"), TrainingConfig(steps=1)

    def of(**keys: Any) -> ModelConfig:
        return ModelConfig.model_validate({**TINY, **keys})

    for model, reason in [
        (of(position={"type": "alibi"}), "position.type: alibi adds a bias to scores"),
        (of(attention={"logit_softcapping": 5.0, "sinks": True}), "attention.logit_softcapping changes scores, attention.sinks take part in the softmax"),
    ]:  # fmt: skip
        choice = choose_kernel("auto", device=cuda, dtype=torch.bfloat16, head_size=64, changed_scores=why_written_out(model, on_cpu=False))
        assert str(choice) == f"blocks (not varlen or flex: {reason})"
        said = describe_attention(model, training, document_mask=True, device=cuda)
        assert said == f"attention by its formula in fp32 ({reason})"
    assert why_written_out(of(attention={"sliding_window": 8, "scale": "cosine", "qk_norm": "none"}), on_cpu=False) == ""
    dropping = of(attention_dropout=0.1)
    assert why_written_out(dropping, on_cpu=True).startswith("attention_dropout drops") and not why_written_out(
        dropping, on_cpu=True, dropout=False
    )
    assert (
        describe_attention(of(position={"type": "alibi"}), training, document_mask=False, device=torch.device("cpu")) == "attention by SDPA"
    )


@pytest.mark.parametrize(
    ("how", "fault"),
    [
        ({"scale": 0.0}, "model.attention.scale: got 0.0, wanted a number above 0, or a name"),
        ({"scale": "sqr"}, "model.attention.scale: got 'sqr'"),
        ({"qk_norm": "rms_norm", "scale": "cosine"}, "model.attention.qk_norm: got 'rms_norm', wanted none with scale: cosine"),
        ({"qk_norm": "layer_norm", "scale": "init"}, "model.attention.qk_norm: got 'layer_norm', wanted none with scale: init"),
        ({"sliding_window": 0}, "model.attention.sliding_window: got 0"),
        ({"global_every": 2}, "model.attention.global_every: got 2, wanted null without sliding_window"),
        ({"global_every": 3, "sliding_window": 8}, "model.attention.global_every: got 3, wanted at most num_hidden_layers (2)"),
        ({"global_every": 1, "sliding_window": 8}, "model.attention.global_every: got 1, wanted greater than or equal to 2"),
        ({"logit_softcapping": 0.0}, "model.attention.logit_softcapping: got 0.0"),
    ],
)  # fmt: skip
def test_what_can_not_be_is_refused(how: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError) as error:
        validate(ModelConfig, {**TINY, "attention": how}, prefix="model")
    assert fault in str(error.value) and len(error.value.faults) == 1, error.value


def test_a_bias_is_the_same_in_float64() -> None:
    """SDPA doesn't convert a narrower bias: scores of float64 would get other numbers, without an error."""
    q, k, v = torch.randn(3, 2, 4, 5, 8, generator=torch.Generator().manual_seed(1))
    mask = AttentionMask(bias=torch.randn(4, 5, 5, generator=torch.Generator().manual_seed(2)))
    wide = attention(q.double(), k.double(), v.double(), mask=mask)
    torch.testing.assert_close(wide.float(), attention(q, k, v, mask=mask))
