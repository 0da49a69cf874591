"""GPT-2's printable stand-ins for the 256 bytes, and the tokenizer that is nothing but bytes."""

from __future__ import annotations

import json
from typing import Any

EOD_TOKEN = "<|endoftext|>"


def byte_alphabet() -> list[str]:
    """The character that stands for each byte: itself where it prints in Latin-1, else the next one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def bytes_tokenizer_json() -> str:
    """A `tokenizer.json` whose id is the byte, with the end of document as 256: what a merge-free BPE is."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    end: dict[str, Any] = {
        "id": 256,
        "content": EOD_TOKEN,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    model: dict[str, Any] = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
        "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "vocab": {**{character: byte for byte, character in enumerate(byte_alphabet())}, EOD_TOKEN: 256}, "merges": [],
    }  # fmt: skip
    tree = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [end], "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level, "model": model,
    }  # fmt: skip
    return json.dumps(tree, ensure_ascii=False, indent=1) + "\n"
