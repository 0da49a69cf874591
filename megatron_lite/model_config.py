"""What a model is, as strict sections: every variation that a config may name, and what of it can't go together.

Keys follow Hugging Face's names where they exist: what is flat there stays flat, variations nest. No torch here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import Field, field_validator, model_validator

from data_pipeline.errors import Fault
from data_pipeline.schema import Section, section_faults, unread_faults
from megatron_lite.attention_config import AttentionConfig, PositionConfig, RopeConfig, position_faults
from megatron_lite.block_config import MLPConfig, NormConfig, ResidualConfig
from megatron_lite.init_config import InitConfig, MupConfig


class EncoderConfig(Section):
    """family: seq2seq: the encoder, whose blocks are the decoder's without cross-attention and with sight in both directions."""

    num_hidden_layers: int | None = Field(None, gt=0)  # its blocks; null: as many as the decoder's, model.num_hidden_layers
    share_embedding: bool = True  # source and target tokens are looked up in one matrix; false: each side has its own


class ModelConfig(Section):
    """A Transformer; unless said otherwise pre-RMSNorm, RoPE, grouped-query attention, SwiGLU."""

    family: Literal["decoder", "seq2seq"] = "decoder"  # decoder: a text goes on; seq2seq: an encoder reads a source, a decoder writes
    vocab_size: int | Literal["auto"] = "auto"  # auto: the tokenizer's
    hidden_size: int = Field(256, gt=0)  # width of the residual stream
    num_hidden_layers: int = Field(4, gt=0)  # blocks; of an encoder-decoder, those of the decoder
    num_attention_heads: int = Field(8, gt=0)  # query heads
    num_key_value_heads: int | None = Field(None, gt=0)  # null: as many as attention heads
    head_dim: int | None = Field(None, gt=0)  # null: hidden_size / num_attention_heads
    intermediate_size: int = Field(768, gt=0)  # width inside the feed-forward, which has three matrices where gated
    max_position_embeddings: int = Field(2048, gt=0)  # the longest sequence that the model is meant for, in tokens
    tie_word_embeddings: bool = False  # one matrix for the embedding and the output head
    rms_norm_eps: float = Field(1e-5, gt=0)  # added to the mean square in RMSNorm
    layer_norm_eps: float = Field(1e-5, gt=0)  # added to the variance in LayerNorm
    hidden_dropout: float = Field(0.0, ge=0, lt=1)  # on the embedding and on what each block adds to the residual stream
    attention_dropout: float = Field(0.0, ge=0, lt=1)  # on attention weights
    position: PositionConfig = PositionConfig()
    rope: RopeConfig = RopeConfig()
    attention: AttentionConfig = AttentionConfig()
    norm: NormConfig = NormConfig()
    residual: ResidualConfig = ResidualConfig()
    mlp: MLPConfig = MLPConfig()
    embedding_multiplier: float | Literal["sqrt_hidden_size"] = 1.0  # embeddings are looked up times this: 2017's and Gemma's is the root
    logit_scale: float = Field(1.0, gt=0)  # logits are times this
    final_logit_softcapping: float | None = Field(None, gt=0)  # c: logits are c * tanh(logits / c), as Gemma 2 has it
    init: InitConfig = InitConfig()
    mup: MupConfig = MupConfig()
    encoder: EncoderConfig = EncoderConfig()

    @field_validator("embedding_multiplier")
    @classmethod
    def _multiplier(cls, value: float | str) -> float | str:
        if isinstance(value, float) and not 0 < value < float("inf"):
            raise ValueError("a number above 0, or sqrt_hidden_size")
        return value

    @field_validator("vocab_size")
    @classmethod
    def _vocab(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 2:
            raise ValueError("at least 2, or auto")
        return value

    @model_validator(mode="after")
    def _shapes(self) -> ModelConfig:
        faults, heads, kv = [], self.num_attention_heads, self.kv_heads
        if self.head_dim is None and self.hidden_size % heads:
            fix = f"use {nearest_divisors(self.hidden_size, heads)} heads, or set head_dim"
            faults.append(Fault("num_attention_heads", heads, f"a divisor of hidden_size ({self.hidden_size})", fix))
        else:
            faults += position_faults(self.position, self.rope, head_size=self.head_size, hidden_size=self.hidden_size)
        if (every := self.attention.global_every) is not None and every > self.num_hidden_layers:
            want = f"at most num_hidden_layers ({self.num_hidden_layers})"
            faults.append(Fault("attention.global_every", every, want, "use null for no layer that sees everything"))
        if self.attention.sliding_window is not None and self.family == "seq2seq":
            fix = "an encoder sees both sides and cross-attention all of the source: remove it"
            faults.append(Fault("attention.sliding_window", self.attention.sliding_window, "null with family: seq2seq", fix))
        if heads % kv:
            fix = f"use {nearest_divisors(heads, kv)}"
            faults.append(Fault("num_key_value_heads", kv, f"a divisor of num_attention_heads ({heads})", fix))
        if self.family != "seq2seq" and self.encoder != EncoderConfig():
            faults.append(
                Fault("encoder", self.encoder.model_dump(), "nothing with family: decoder, which has none", "set family: seq2seq")
            )
        if self.residual.parallel != "none" and self.norm.placement == "post":
            fix = "use norm.placement pre or sandwich, or residual.parallel none"
            faults.append(Fault("residual.parallel", self.residual.parallel, "none with norm.placement: post", fix))
        elif self.residual.parallel != "none" and self.family == "seq2seq":
            fix = "leave it out: cross-attention reads what attention found"
            faults.append(Fault("residual.parallel", self.residual.parallel, "none with family: seq2seq", fix))
        if self.position.type != "t5":
            unread = unread_faults(self.init, self.init.scheme, "init.scheme", {"std": ("normal", "position.type: t5")})
            faults += [replace(fault, field=f"init.{fault.field}") for fault in unread]
        for kind, key in (("rms_norm", "rms_norm_eps"), ("layer_norm", "layer_norm_eps")):
            if self.attention.qk_norm != kind:
                faults += unread_faults(self, self.norm.type, "norm.type", {key: (kind, f"attention.qk_norm: {kind}")})
        if self.mup.base_hidden_size is not None and self.init.scheme != "normal":
            fix = "use init.scheme normal, whose std mup scales"
            faults.append(Fault("init.scheme", self.init.scheme, "normal with mup, as others follow the width already", fix))
        if self.mup.base_hidden_size is not None and self.embedding_multiplier == "sqrt_hidden_size":
            fix = f"a factor that grows with the width undoes mup: use {self.mup.base_hidden_size**0.5:g}, which it is at base_hidden_size"
            faults.append(Fault("embedding_multiplier", self.embedding_multiplier, "a number with mup", fix))
        if self.init.zero_residual and self.norm.placement == "post":
            fix = "a norm after the sum changes what passes, whatever a branch adds: use norm.placement pre or sandwich, or remove it"
            faults.append(Fault("init.zero_residual", True, "false with norm.placement: post", fix))
        if self.mup.base_head_dim is not None and self.attention.scale not in ("sqrt", "temperature", "head_temperature"):
            fix = "this scale follows no head_dim: leave base_head_dim out"
            faults.append(Fault("mup.base_head_dim", self.mup.base_head_dim, f"null with attention.scale: {self.attention.scale}", fix))
        elif self.mup.base_hidden_size is None and self.mup.base_head_dim is not None:
            faults.append(Fault("mup.base_head_dim", self.mup.base_head_dim, "null without mup.base_hidden_size", "give that too"))
        if faults:
            raise section_faults(faults)
        return self

    @property
    def encoder_layers(self) -> int:
        """Blocks of the encoder; 0 where there is none."""
        if self.family != "seq2seq":
            return 0
        return self.encoder.num_hidden_layers or self.num_hidden_layers

    @property
    def norm_eps(self) -> float:
        """The eps of this model's kind of norm."""
        return self.rms_norm_eps if self.norm.type == "rms_norm" else self.layer_norm_eps

    @property
    def width_multiplier(self) -> float:
        """m of mup; 1 without it."""
        return self.hidden_size / (self.mup.base_hidden_size or self.hidden_size)

    @property
    def embedding_factor(self) -> float:
        """What a looked-up embedding is multiplied by."""
        return self.hidden_size**0.5 if self.embedding_multiplier == "sqrt_hidden_size" else float(self.embedding_multiplier)

    @property
    def logit_factor(self) -> float:
        """What hidden states times the head are multiplied by."""
        return self.logit_scale / self.width_multiplier

    @property
    def has_final_norm(self) -> bool:
        """Whether a norm stands behind the last layer; with post placement the layer ends in one."""
        return self.norm.placement != "post"

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def vocabulary(self) -> int:
        """The vocabulary size as a number; a bug of ours where `auto` was not filled in yet."""
        assert isinstance(self.vocab_size, int), "vocab_size: auto was not resolved"
        return self.vocab_size


def nearest_divisors(number: int, wanted: int) -> str:
    """The divisors of number next to wanted, for an error's remedy: "4 or 8"."""
    divisors = [size for size in range(1, number + 1) if number % size == 0]
    below = max((size for size in divisors if size <= wanted), default=None)
    above = min((size for size in divisors if size >= wanted), default=None)
    return " or ".join(str(size) for size in dict.fromkeys((below, above)) if size is not None)
