"""Initial weights and what follows from them with a model's width, as strict sections. No torch here."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from data_pipeline.schema import Section, section_faults, unread_faults


class InitConfig(Section):
    """Initial weights of a matrix; what writes into the residual stream may start smaller (GPT-2) or at 0. Norms start at 1, biases at 0."""

    # normal: normal(0, std); small: normal(0, sqrt(2 / (5 hidden_size))); xavier_uniform: within sqrt(6 / (rows + columns)), as in 2017
    scheme: Literal["normal", "small", "xavier_uniform"] = "normal"  # small: Nguyen and Salazar 2019; xavier: Glorot and Bengio 2010
    std: float = Field(0.02, gt=0)  # of the normal distribution, and of position.type: t5's table in each scheme
    embedding_std: float | None = Field(None, gt=0)  # embeddings and head; null: the scheme's, with xavier_uniform 1 / sqrt(hidden_size)
    scaled_residual: bool = True  # divide what writes into the residual stream by sqrt(2 * layers), beside cross-attention sqrt(3 * layers)
    zero_residual: bool = False  # what writes into the residual stream starts at 0 (sandwich: its norm's gain): a layer changes nothing

    @model_validator(mode="after")
    def _residual(self) -> InitConfig:
        if faults := unread_faults(self, str(self.zero_residual).lower(), "zero_residual", {"scaled_residual": ("false",)}):
            raise section_faults(faults)
        return self


class MupConfig(Section):
    """Maximal update parametrisation (Yang et al. 2022, table 8), for Adam: learning rates tuned at one width hold at others.

    With m = hidden_size / base_hidden_size, matrices inside the layers start at 1 / sqrt(m) of init.std and learn at lr / m, their decay
    lr * weight_decay staying as it is; logits are divided by m; attention scores by head_dim instead of its root. Heads and
    intermediate_size are meant to grow with hidden_size.
    """

    base_hidden_size: int | None = Field(None, gt=0)  # the width that lr and init.std were found at; null: none of this
    base_head_dim: int | None = Field(None, gt=0)  # head_dim there, where scores are as usual; null: this model's
