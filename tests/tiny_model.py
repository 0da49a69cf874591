"""The shape that tests of equality take where they need no other: GQA, two layers, rows of 16."""

from __future__ import annotations

from typing import Any

TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 16,
}
