"""If these fail, a layer that can't be is built as another one, or one that can be is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from data_pipeline.errors import ConfigError
from data_pipeline.schema import validate
from launcher.config import LoggingConfig
from megatron_lite.config import LossConfig, TrainingConfig
from megatron_lite.model_config import ModelConfig
from tests.paths import ROOT

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"norm": {"bias": True}}, r"model\.norm\.bias: got True, wanted false with type: rms_norm, which has none"),
    (
        {"norm": {"placement": "post"}, "residual": {"parallel": "one_norm"}},
        r"model\.residual\.parallel: .* none with norm\.placement: post",
    ),
    ({"family": "seq2seq", "residual": {"parallel": "two_norms"}}, r"model\.residual\.parallel: .* none with family: seq2seq"),
    ({"residual": {"step_size": 0.0}}, r"model\.residual\.step_size: .* above 0, or inverse_sqrt_layers"),
    ({"residual": {"step_size": "sqrt"}}, r"model\.residual\.step_size"),
    ({"mlp": {"activation": "swiglu"}}, r"model\.mlp\.activation: got 'swiglu'"),
    ({"mlp": {"gate": False}}, r"model\.mlp\.gate.*did you mean mlp\.gated\?"),
    ({"embedding_multiplier": -1.0}, r"model\.embedding_multiplier: .* above 0, or sqrt_hidden_size"),
    ({"init": {"scheme": "small"}, "mup": {"base_hidden_size": 64}}, r"model\.init\.scheme: got 'small', wanted normal with mup"),
    (
        {"init": {"scheme": "xavier_uniform", "std": 0.1}},
        r"model\.init\.std: got 0\.1, wanted its default \(0\.02\) with init\.scheme: xavier_uniform.* normal or position\.type: t5 reads it",
    ),
    (
        {"init": {"zero_residual": True, "scaled_residual": False}},
        r"model\.init\.scaled_residual: got False, wanted its default \(true\) with zero_residual: true.*only zero_residual: false reads it",
    ),
    (
        {"mup": {"base_hidden_size": 64}, "embedding_multiplier": "sqrt_hidden_size"},
        r"model\.embedding_multiplier: got 'sqrt_hidden_size', wanted a number with mup.*use 8, which it is at base_hidden_size",
    ),
    (
        {"init": {"zero_residual": True}, "norm": {"placement": "post"}},
        r"model\.init\.zero_residual: got True, wanted false with norm\.placement: post",
    ),
    (
        {"norm": {"type": "layer_norm"}, "rms_norm_eps": 1e-6},
        r"model\.rms_norm_eps: got 1e-06, wanted its default \(1e-05\) with norm\.type: layer_norm.*rms_norm or attention\.qk_norm: rms_norm reads it",
    ),
    ({"attention": {"qk_norm": "rms_norm"}, "layer_norm_eps": 1e-6}, r"model\.layer_norm_eps: .* \(1e-05\) with norm\.type: rms_norm"),
    ({"mup": {"base_head_dim": 16}}, r"model\.mup\.base_head_dim: got 16, wanted null without mup\.base_hidden_size"),
]


@pytest.mark.parametrize(("values", "said"), REFUSED, ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_what_can_not_be_is_refused_by_one_fault(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        validate(ModelConfig, values, prefix="model")
    assert len(caught.value.faults) == 1


@pytest.mark.parametrize(
    ("chosen", "unread"),
    [({"scheme": "small"}, {"std": 0.02}), ({"zero_residual": True}, {"scaled_residual": True})],
    ids=["std", "scaled"],
)
def test_a_default_that_is_not_read_may_be_said(chosen: dict[str, Any], unread: dict[str, Any]) -> None:
    assert validate(ModelConfig, {"init": chosen | unread}) == validate(ModelConfig, {"init": chosen})


def test_what_one_other_key_reads_may_be_said() -> None:
    """std is read by T5's table, and the other norm's eps by a norm of queries and keys."""
    for other in ("rms_norm", "layer_norm"):
        kind, key = "layer_norm" if other == "rms_norm" else "rms_norm", f"{other}_eps"
        found = validate(ModelConfig, {"norm": {"type": kind}, "attention": {"qk_norm": other}, key: 1e-6})
        assert getattr(found, key) == 1e-6
    assert validate(ModelConfig, {"init": {"scheme": "small", "std": 0.1}, "position": {"type": "t5"}}).init.std == 0.1


def test_shares_and_intervals_have_their_limits() -> None:
    for kind, values in ((LossConfig, {"label_smoothing": 1.0}), (LossConfig, {"z_loss": -1e-4})):
        with pytest.raises(ConfigError):
            validate(kind, values)
    with pytest.raises(ConfigError, match=r"statistics_interval_steps: got 25, wanted a multiple of .* \(10\).* use 30"):
        validate(LoggingConfig, {"interval_steps": 10, "statistics_interval_steps": 25})
    assert validate(LoggingConfig, {"interval_steps": 10, "statistics_interval_steps": 50}).statistics_interval_steps == 50


def test_what_the_docs_show_can_be_built() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "layers.md").read_text(), re.DOTALL)
    assert len(blocks) >= 6
    sections = {"model": ModelConfig, "training": TrainingConfig, "logging": LoggingConfig}
    for block in blocks:
        for name, values in yaml.safe_load(block).items():
            assert validate(sections[name], values) != sections[name](**({"steps": 1} if name == "training" else {}))


def test_numbers_that_follow_from_the_shape() -> None:
    config = ModelConfig(hidden_size=256, num_hidden_layers=16, residual={"step_size": "inverse_sqrt_layers"}, logit_scale=3.0)
    assert config.residual.step(config.num_hidden_layers) == 0.25
    assert (config.embedding_factor, config.logit_factor, config.width_multiplier) == (1.0, 3.0, 1.0)
    assert ModelConfig(hidden_size=256, embedding_multiplier="sqrt_hidden_size").embedding_factor == 16.0
    wide = ModelConfig(hidden_size=256, embedding_multiplier=16.0, logit_scale=3.0, mup={"base_hidden_size": 64})
    assert (wide.embedding_factor, wide.logit_factor, wide.width_multiplier) == (16.0, 0.75, 4.0)
