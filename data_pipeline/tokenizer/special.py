"""Special tokens at the ids that a config states; what is learned takes the ids that are left, in its own order."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from data_pipeline.config import TokenizerConfig
from data_pipeline.tokenizer.byte_level import EOD_TOKEN


def special_ids(config: TokenizerConfig) -> dict[str, int]:
    """Id of each special token by its text; the end of document, where it isn't stated, gets the lowest id that is free."""
    stated = dict(config.special_tokens or {})
    end = config.eod_token or EOD_TOKEN
    if end not in stated:
        stated[end] = next(id for id in range(len(stated) + 1) if id not in stated.values())
    return stated


def arranged(specials: Mapping[str, int], learned: Sequence[str]) -> list[str]:
    """All tokens by id; ids between the last learned one and a special one are filled with tokens that nothing makes."""
    by_id = {id: token for token, id in specials.items()}
    size = max(len(learned) + len(specials), max(by_id) + 1)
    rest = iter(learned)
    return [by_id[id] if id in by_id else next(rest, f"<|unused_{id}|>") for id in range(size)]


def added_tokens(specials: Mapping[str, int]) -> list[dict[str, Any]]:
    """As `tokenizer.json` lists them."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return [{"id": id, "content": token, **plain} for token, id in sorted(specials.items(), key=lambda item: item[1])]


def with_specials(json_text: str, specials: Mapping[str, int]) -> str:
    """A trained BPE, whose only special token is the end of document, with these at their ids."""
    tree = json.loads(json_text)
    learned = sorted((id, token) for token, id in tree["model"]["vocab"].items() if token != EOD_TOKEN)
    tree["model"]["vocab"] = {token: id for id, token in enumerate(arranged(specials, [token for _, token in learned]))}
    tree["added_tokens"] = added_tokens(specials)
    return json.dumps(tree, ensure_ascii=False, indent=2) + "\n"
