"""Positions and attention as strict sections. No torch here."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from data_pipeline.errors import Fault
from data_pipeline.schema import Section, section_faults, unread_faults

_READ_BY_SCALING = {
    "factor": ("linear", "ntk", "yarn", "llama3"),
    "original_max_position_embeddings": ("yarn", "llama3"),
    "low_freq_factor": ("llama3",),
    "high_freq_factor": ("llama3",),
    "beta_fast": ("yarn",),
    "beta_slow": ("yarn",),
    "attention_factor": ("yarn",),
}


class RopeScalingConfig(Section):
    """Slower rotations, to read further than the model was trained to: linear (Chen et al. 2023), ntk (a larger theta, fixed),
    yarn (Peng et al. 2023), llama3 (Llama 3.1). Keys that the type doesn't read must keep their defaults."""

    type: Literal["none", "linear", "ntk", "yarn", "llama3"] = "none"  # which frequencies become slower, and how
    factor: float = Field(1.0, ge=1)  # how many times as far
    original_max_position_embeddings: int | None = Field(None, gt=0)  # yarn, llama3: the length of before, in tokens
    low_freq_factor: float = Field(1.0, gt=0)  # llama3: wavelengths above the old length / this are stretched by the whole factor
    high_freq_factor: float = Field(4.0, gt=0)  # llama3: wavelengths below the old length / this stay as they are
    beta_fast: float = Field(32.0, gt=0)  # yarn: pairs that turn more often than this in the old length stay as they are
    beta_slow: float = Field(1.0, gt=0)  # yarn: pairs that turn less often are stretched by the whole factor
    attention_factor: float | None = Field(None, gt=0)  # yarn: times the length of q and k; null: 0.1 ln(factor) + 1

    @model_validator(mode="after")
    def _of_one_type(self) -> RopeScalingConfig:
        faults = unread_faults(self, self.type, "type", _READ_BY_SCALING)
        if self.type != "none" and self.factor == 1:
            faults.append(Fault("factor", self.factor, f"above 1 with type: {self.type}", "say how many times as far, or use type: none"))
        if self.type in ("yarn", "llama3") and self.original_max_position_embeddings is None:
            fix = "give the max_position_embeddings that the model was trained with"
            faults.append(Fault("original_max_position_embeddings", None, f"a number of tokens with type: {self.type}", fix))
        if self.low_freq_factor >= self.high_freq_factor:
            want = f"below high_freq_factor ({self.high_freq_factor})"
            faults.append(Fault("low_freq_factor", self.low_freq_factor, want, "Llama 3.1 has 1 and 4"))
        if self.beta_slow >= self.beta_fast:
            faults.append(Fault("beta_slow", self.beta_slow, f"below beta_fast ({self.beta_fast})", "the paper has 1 and 32"))
        if faults:
            raise section_faults(faults)
        return self


class RopeConfig(Section):
    """Rotary position embedding (Su et al. 2021): angle of pair i at position p is p * theta^(-2i/head_dim), in fp32."""

    theta: float = Field(10000.0, gt=0)  # the base; larger: slower rotations, for longer sequences
    partial_rotary_factor: float = Field(1.0, gt=0, le=1)  # the share of each head's channels, from the first on, that is rotated
    scaling: RopeScalingConfig = RopeScalingConfig()

    def rotated_size(self, head_size: int) -> int:
        """Channels of a head that are rotated."""
        return int(head_size * self.partial_rotary_factor)


_READ_BY_POSITIONS = {"relative_attention_num_buckets": ("t5",), "relative_attention_max_distance": ("t5",)}


class PositionConfig(Section):
    """How tokens know where they stand. With `data.document_mask` positions count from each document's beginning.

    rope turns queries and keys; sinusoidal (Vaswani et al. 2017) and learned are added to the embeddings; alibi (Press et al. 2022)
    and t5 (Raffel et al. 2020) are added to the scores, by distance. All but learned go on beyond the length of training.
    """

    type: Literal["rope", "sinusoidal", "learned", "alibi", "t5", "none"] = "rope"  # which of them
    relative_attention_num_buckets: int = Field(32, ge=4)  # t5: distances that are told apart, half of them exactly
    relative_attention_max_distance: int = Field(128, gt=1)  # t5: from here on all distances are the same

    @model_validator(mode="after")
    def _of_one_type(self) -> PositionConfig:
        buckets, reach = self.relative_attention_num_buckets, self.relative_attention_max_distance
        faults = unread_faults(self, self.type, "type", _READ_BY_POSITIONS)
        if buckets % 4:
            fix = "an encoder has half of the buckets for what comes after, and half of each half holds single distances"
            faults.append(Fault("relative_attention_num_buckets", buckets, "a multiple of 4", fix))
        elif reach <= buckets // 2:
            want = f"above half of relative_attention_num_buckets ({buckets // 2})"
            faults.append(Fault("relative_attention_max_distance", reach, want, "those are told apart exactly: T5 has 32 buckets and 128"))
        if faults:
            raise section_faults(faults)
        return self


class AttentionConfig(Section):
    """What becomes of queries, keys and their scores, in this order: qk_norm, rotation, scale, logit_softcapping, bias by distance,
    window, sinks. A scale is a number that scores q.k are multiplied with; sqrt: 1 / sqrt(head_dim); temperature: that over a learned
    number, which begins at 1; head_temperature: one a head; cosine: q and k as unit vectors, and a learned number a head, which begins
    at sqrt(head_dim); init: 1, the initial weights of q and k being smaller by head_dim^(1/4) each.
    """

    scale: Literal["sqrt", "temperature", "head_temperature", "cosine", "init"] | float = "sqrt"  # a name, or the number itself
    qk_norm: Literal["none", "rms_norm", "layer_norm"] = "none"  # of each head's query and key, with a learned gain for each channel
    logit_softcapping: float | None = Field(None, gt=0)  # scores s become c tanh(s / c); null: they stay
    sliding_window: int | None = Field(None, gt=0)  # a token sees itself and those before it, so many in all; null: everything before it
    global_every: int | None = Field(None, ge=2)  # with sliding_window: each so manieth layer sees everything; null: none does
    sinks: bool = False  # a learned score for each head that takes its share of attention to nothing
    qkv_bias: bool = False  # of the query, key and value projections
    o_bias: bool = False  # of the output projection

    @field_validator("scale")
    @classmethod
    def _scale(cls, value: str | float) -> str | float:
        if not isinstance(value, str) and not 0 < value < float("inf"):
            raise ValueError("a number above 0, or a name | sqrt is 1 / sqrt(head_dim)")
        return value

    @model_validator(mode="after")
    def _together(self) -> AttentionConfig:
        faults = []
        if self.global_every is not None and self.sliding_window is None:
            fix = "without a window every layer sees everything: set attention.sliding_window, or remove it"
            faults.append(Fault("global_every", self.global_every, "null without sliding_window", fix))
        if self.qk_norm != "none" and self.scale == "cosine":
            fix = "unit vectors are normalised already: use scale: sqrt or qk_norm: none"
            faults.append(Fault("qk_norm", self.qk_norm, "none with scale: cosine", fix))
        if self.qk_norm != "none" and self.scale == "init":
            fix = "the norm takes away what smaller initial weights are for: use scale: sqrt or qk_norm: none"
            faults.append(Fault("qk_norm", self.qk_norm, "none with scale: init", fix))
        if faults:
            raise section_faults(faults)
        return self

    def window_of(self, layer: int) -> int | None:
        """Tokens that the layer of this number sees of each token's past, itself among them; None: all."""
        return None if self.global_every is not None and (layer + 1) % self.global_every == 0 else self.sliding_window


def position_faults(position: PositionConfig, rope: RopeConfig, *, head_size: int, hidden_size: int) -> list[Fault]:
    """What of the model's shape can't go with its positions; keys are those of the model section."""
    faults: list[Fault] = []
    if position.type == "rope":
        rotated = rope.rotated_size(head_size)
        if rope.partial_rotary_factor == 1 and head_size % 2:
            fix = "choose num_attention_heads or head_dim so that it is even"
            faults.append(Fault("head_dim", head_size, "an even number, for rotary pairs", fix))
        elif rotated % 2 or not rotated:
            want = f"a share of head_dim ({head_size}) that is an even number of channels, not {rotated}"
            near = max(rotated // 2 * 2, 2) / head_size
            faults.append(Fault("rope.partial_rotary_factor", rope.partial_rotary_factor, want, f"use {near:g}"))
        elif rope.scaling.type == "yarn" and rope.theta <= 1:
            faults.append(Fault("rope.theta", rope.theta, "above 1 with rope.scaling.type: yarn", "10000 is usual"))
        elif rope.scaling.type == "ntk" and rotated == 2:
            faults.append(Fault("rope.scaling.type", "ntk", "more than one rotated pair a head", "use linear"))
    else:
        unread = [key for key in RopeConfig.model_fields if getattr(rope, key) != getattr(RopeConfig(), key)]
        fix = "set position.type=rope, or remove it"
        faults += [
            Fault(f"rope.{key}", _plain(getattr(rope, key)), f"its default with position.type: {position.type}", fix) for key in unread
        ]
    if position.type == "sinusoidal" and hidden_size % 2:
        faults.append(Fault("hidden_size", hidden_size, "an even number, for sines and cosines", f"use {hidden_size + 1}"))
    return faults


def _plain(value: object) -> object:
    return value.model_dump() if isinstance(value, Section) else value
