"""Fill in the middle (Bavarian et al. 2022): some documents are cut in three at characters, and their middle put last.

    prefix, suffix, middle (PSM)    PRE prefix SUF suffix MID middle
    suffix first (SPM)              PRE SUF suffix MID prefix middle
PRE, SUF and MID are special tokens. The parts are tokenised one by one. Which documents, where and how is a hash of the
seed and the document's id, so it doesn't depend on workers or shards; held-out documents stay as they are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import Field

from data_pipeline.dataset import Dataset
from data_pipeline.errors import ConfigError, Fault
from data_pipeline.schema import Section, validate
from data_pipeline.tokenizer.encode import Encoder


class FimConfig(Section):
    """Fill in the middle: documents of the training split rearranged so that their middle comes last."""

    rate: float = Field(0.5, gt=0.0, le=1.0)  # of the documents
    spm_rate: float = Field(0.5, ge=0.0, le=1.0)  # of those: suffix first, then prefix and middle in one
    sources: list[str] | None = None  # by name; null: all
    prefix_token: str = "<|fim_prefix|>"  # a special token of the tokenizer, like the two below
    suffix_token: str = "<|fim_suffix|>"  # before the suffix
    middle_token: str = "<|fim_middle|>"  # before what is to be filled in


@dataclass(frozen=True)
class Fim:
    """A FimConfig with the ids of its tokens."""

    rate: float
    spm_rate: float
    seed: int
    prefix_id: int
    suffix_id: int
    middle_id: int

    def cut(self, id: str, num_characters: int) -> tuple[int, int, bool] | None:
        """(where the middle begins, where it ends, suffix first) of a document; None where it stays as it is."""
        digest = hashlib.blake2b(f"fim {self.seed} {id}".encode(), digest_size=32).digest()
        whether, order, one, two = (int.from_bytes(digest[at : at + 8], "little") for at in (0, 8, 16, 24))
        if num_characters == 0 or whether * 2.0**-64 >= self.rate:
            return None
        first, last = sorted((one % (num_characters + 1), two % (num_characters + 1)))
        return first, last, order * 2.0**-64 < self.spm_rate

    def encode_batch(self, encoder: Encoder, texts: Sequence[str], ids: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, rearranged where its document's id says so."""
        cuts = [self.cut(id, len(text)) for id, text in zip(ids, texts)]
        parts: list[str] = []
        for text, cut in zip(texts, cuts):
            parts += [text] if cut is None else [text[: cut[0]], text[cut[0] : cut[1]], text[cut[1] :]]
        encoded = iter(encoder.encode_batch(parts))
        return [next(encoded) if cut is None else self._joined(next(encoded), next(encoded), next(encoded), cut[2]) for cut in cuts]

    def _joined(self, prefix: np.ndarray, middle: np.ndarray, suffix: np.ndarray, suffix_first: bool) -> np.ndarray:
        before, between, last = ([id] for id in (self.prefix_id, self.suffix_id, self.middle_id))
        if suffix_first:
            return np.concatenate([before, between, suffix, last, prefix, middle]).astype(np.int64)
        return np.concatenate([before, prefix, between, suffix, last, middle]).astype(np.int64)


def fim_of(config: FimConfig | None, *, tokenizer_json: str, seed: int) -> Fim | None:
    """With the ids of the tokens. Raises ConfigError where one is no special token of the tokenizer."""
    if config is None:
        return None
    special = {token["content"]: token["id"] for token in json.loads(tokenizer_json)["added_tokens"] if token["special"]}
    keys = ("prefix_token", "suffix_token", "middle_token")
    faults = [
        Fault(
            f"fim.{key}",
            getattr(config, key),
            "a special token of the tokenizer",
            f"it has {', '.join(special)}; see tokenizer.special_tokens",
        )
        for key in keys
        if getattr(config, key) not in special
    ]
    if faults:
        raise ConfigError(faults)
    prefix, suffix, middle = (special[getattr(config, key)] for key in keys)
    return Fim(config.rate, config.spm_rate, seed, prefix_id=prefix, suffix_id=suffix, middle_id=middle)


def text_order(tokens: np.ndarray, fim: Fim) -> np.ndarray | None:
    """The places of a document's tokens in the order of its text, special tokens left out; None where it was not rearranged.

    Where the prefix of an SPM document ends and its middle begins can't be seen in the tokens, and need not be: both are
    whole, one after the other, with the suffix behind them.
    """
    if tokens.size < 3 or tokens[0] != fim.prefix_id:
        return None
    suffix, middle = (int(np.flatnonzero(tokens == id)[0]) for id in (fim.suffix_id, fim.middle_id))
    end = tokens.size
    if suffix == 1:
        return np.concatenate([np.arange(middle + 1, end), np.arange(2, middle)])
    return np.concatenate([np.arange(1, suffix), np.arange(middle + 1, end), np.arange(suffix + 1, middle)])


def fim_of_dataset(dataset: Dataset) -> Fim | None:
    """How a finished dataset was rearranged; None where it was not."""
    asked = dataset.manifest.config.get("fim")
    if asked is None:
        return None
    json_text = dataset.tokenizer_path.read_text(encoding="utf-8")
    return fim_of(validate(FimConfig, asked), tokenizer_json=json_text, seed=dataset.manifest.config["seed"])


def text_tokens(stored: np.ndarray, fim: Fim | None) -> np.ndarray:
    """The tokens of a document's text in its order, of those that are stored: their last is the end of the document. `fim`: of its
    dataset."""
    tokens = stored[:-1]
    order = text_order(tokens, fim) if fim is not None else None
    return tokens if order is None else tokens[order]


def document_text(stored: np.ndarray, encoder: Encoder, fim: Fim | None) -> str:
    """The text of a document of a finished dataset, as it was before it was rearranged. Of a pair: both sides, a line end between."""
    tokens = text_tokens(stored, fim)
    inner = np.flatnonzero(tokens == stored[-1])  # only pairs have an end inside
    if inner.size:
        return "\n".join(encoder.decode(side.tolist()) for side in (tokens[: inner[0]], tokens[inner[0] + 1 :]))
    return encoder.decode(tokens.tolist())
