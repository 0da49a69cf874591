"""What the rest of the pipeline needs to know of a tokenizer, read from its `tokenizer.json`."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.errors import ConfigError, DataError, Fault
from data_pipeline.shards import Vocabulary
from data_pipeline.tokenizer.byte_level import byte_alphabet

_USUAL_EODS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")


@dataclass(frozen=True)
class TokenizerFacts:
    """The text of `tokenizer.json` as it goes into the dataset, and what follows from it."""

    json_text: str
    type: str
    vocabulary: Vocabulary
    eod_token: str
    bos_token: str | None
    token_bytes: np.ndarray  # uint16[vocabulary]: UTF-8 bytes that each id stands for, 0 for special ones
    trained_on: dict[str, Any] | None = None  # the sample of a larger corpus

    def to_manifest(self) -> dict[str, Any]:
        digest = hashlib.sha256(self.token_bytes.tobytes()).hexdigest()
        facts = {"type": self.type, "eod_token": self.eod_token, "bos_token": self.bos_token, "token_bytes_hash": digest}
        return facts if self.trained_on is None else {**facts, "trained_on": self.trained_on}

    def config_json(self) -> str:
        """`tokenizer_config.json`, which lets `transformers.AutoTokenizer` load the folder."""
        tree = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": self.eod_token,
            "bos_token": self.bos_token or self.eod_token,
            "clean_up_tokenization_spaces": False,
            "model_max_length": int(1e30),
        }
        return json.dumps(tree, indent=1, ensure_ascii=False) + "\n"


def facts_of(
    json_text: str,
    *,
    type: str,
    eod_token: str | None = None,
    bos_token: str | None = None,
    where: str = "tokenizer.json",
    trained_on: dict[str, Any] | None = None,
) -> TokenizerFacts:
    """Read a tokenizer's facts. Raises DataError if it isn't one or has no id to end documents with."""
    try:
        tree = json.loads(json_text)
        vocabulary, added = _ids(tree)
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{where} is not a tokenizer.json of the `tokenizers` library ({error}). Give the file that tokenizer.save() writes."
        ) from None
    eod_token = _chosen_eod(eod_token, {**vocabulary, **added}, where=where)
    ids = {**vocabulary, **added}
    if bos_token is not None and bos_token not in ids:
        raise ConfigError([Fault("tokenizer.bos_token", bos_token, f"a token of {where}", "leave it out if the tokenizer has none")])
    bos_id = None if bos_token is None or ids[bos_token] == ids[eod_token] else ids[bos_token]
    size = max(ids.values()) + 1
    digest = hashlib.sha256(json_text.encode()).hexdigest()
    return TokenizerFacts(
        json_text=json_text,
        type=type,
        vocabulary=Vocabulary(size=size, eod_id=ids[eod_token], bos_id=bos_id, tokenizer_hash=digest),
        eod_token=eod_token,
        bos_token=None if bos_id is None else bos_token,
        token_bytes=_token_bytes(tree, vocabulary, added, size=size, never={ids[eod_token], *([bos_id] if bos_id is not None else [])}),
        trained_on=trained_on,
    )


def prepared(json_text: str, *, where: str) -> str:
    """The same tokenizer without what would change how data is encoded: dropout, truncation, padding."""
    try:
        tree = json.loads(json_text)
        changes = [key for key in ("truncation", "padding") if tree[key] is not None]
        dropout = tree["model"].get("dropout")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{where} is not a tokenizer.json of the `tokenizers` library ({error}).") from None
    if not changes and not dropout:
        return json_text
    for key in changes:
        tree[key] = None
    if dropout:
        tree["model"]["dropout"] = None
    return json.dumps(tree, ensure_ascii=False, indent=1) + "\n"


def read_pretrained(name_or_path: str) -> tuple[str, dict[str, str | None]]:
    """(text of tokenizer.json, the eos and bos tokens that the files beside it name)."""
    path = Path(name_or_path).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            [
                Fault(
                    "tokenizer.name_or_path",
                    name_or_path,
                    "the path of a tokenizer.json, or of a folder with one",
                    "download it first: `hf download NAME tokenizer.json tokenizer_config.json --local-dir DIR`",
                )
            ]
        )
    named: dict[str, str | None] = {}
    beside = file.with_name("tokenizer_config.json")
    if beside.is_file():
        tree = json.loads(beside.read_text(encoding="utf-8"))
        for key in ("eos_token", "bos_token"):
            value = tree.get(key)
            named[key] = value.get("content") if isinstance(value, dict) else value
    return file.read_text(encoding="utf-8"), named


def _ids(tree: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """(model's tokens, added tokens) by text."""
    model = tree["model"]["vocab"]
    vocabulary = {piece: number for number, (piece, _) in enumerate(model)} if isinstance(model, list) else dict(model)  # a list: unigram
    return vocabulary, {token["content"]: token["id"] for token in tree["added_tokens"]}


def _chosen_eod(asked: str | None, ids: dict[str, int], *, where: str) -> str:
    if asked is not None:
        if asked not in ids:
            raise ConfigError([Fault("tokenizer.eod_token", asked, f"a token of {where}", "look at its added_tokens")])
        return asked
    for token in _USUAL_EODS:
        if token in ids:
            return token
    raise ConfigError([Fault("tokenizer.eod_token", None, f"the token of {where} that ends a document", "name it: its files don't")])


def _token_bytes(tree: dict[str, Any], vocabulary: dict[str, int], added: dict[str, int], *, size: int, never: set[int]) -> np.ndarray:
    table = np.zeros(size, dtype=np.int64)
    byte_level = '"ByteLevel"' in json.dumps(tree.get("decoder"))
    stands_for_byte = set(byte_alphabet())
    for token, number in vocabulary.items():
        if byte_level and all(character in stands_for_byte for character in token):
            table[number] = len(token)  # one character stands for one byte
        elif len(token) == 6 and token.startswith("<0x"):
            table[number] = 1
        else:
            table[number] = len(token.replace("\u2581", " ").encode())
    for described in tree["added_tokens"]:
        table[described["id"]] = 0 if described["special"] else len(described["content"].encode())
    for number in never:
        table[number] = 0
    return np.minimum(table, 0xFFFF).astype(np.uint16)
