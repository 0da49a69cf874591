"""What a layer is made of beside its attention, as strict sections: norms, how branches join the residual stream, the MLP.

No torch here.
"""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator, model_validator

from data_pipeline.errors import Fault
from data_pipeline.schema import Section, section_faults


class NormConfig(Section):
    """Norms (Ba et al. 2016; Zhang and Sennrich 2019), and where they stand around a branch f of a layer."""

    type: Literal["rms_norm", "layer_norm"] = "rms_norm"  # layer_norm takes the mean away first, with layer_norm_eps for rms_norm_eps
    placement: Literal["pre", "post", "sandwich"] = "pre"  # x + f(norm(x)); norm(x + f(x)) as in 2017; x + norm(f(norm(x))) as Gemma 2
    bias: bool = False  # layer_norm's own
    zero_centred: bool = False  # the gain is 1 + weight, the weight starting at 0, as Gemma has it

    @model_validator(mode="after")
    def _bias(self) -> NormConfig:
        if self.bias and self.type == "rms_norm":
            raise section_faults(
                [Fault("bias", True, "false with type: rms_norm, which has none", "use type: layer_norm, or leave it out")]
            )
        return self


class ResidualConfig(Section):
    """How what a branch f gives joins the stream: x + h f(x), h being a step of an Euler method with depth as time."""

    parallel: Literal["none", "two_norms", "one_norm"] = "none"  # attention and MLP read the same x: as GPT-NeoX; one_norm as GPT-J
    step_size: float | Literal["inverse_sqrt_layers"] = 1.0  # h; inverse_sqrt_layers: 1 / sqrt(num_hidden_layers)
    learned_step_size: Literal["none", "layer", "branch"] = "none"  # h is learned, from step_size on: one a layer, or one a branch

    @field_validator("step_size")
    @classmethod
    def _step(cls, value: float | str) -> float | str:
        if isinstance(value, float) and not 0 < value < float("inf"):
            raise ValueError("a number above 0, or inverse_sqrt_layers")
        return value

    def step(self, num_layers: int) -> float:
        """h in a stack of so many layers; where it is learned, what it starts from."""
        return num_layers**-0.5 if self.step_size == "inverse_sqrt_layers" else float(self.step_size)


class MLPConfig(Section):
    """The feed-forward: down(act(gate(x)) * up(x)) where gated (Shazeer 2020: SwiGLU with silu, GEGLU with gelu), else down(act(up(x)))."""

    activation: Literal["silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2"] = "silu"  # names as hidden_act's; relu2: relu squared
    gated: bool = True  # three matrices; false: two, as in 2017 and GPT-2
    bias: bool = False  # one beside each matrix
