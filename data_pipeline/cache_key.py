"""Names for finished work: a hash of everything that it depends on, so that work of other inputs is never taken for it."""

from __future__ import annotations

import hashlib
import json
from typing import Any

# The version of what each stage does. A change that alters a stage's output raises its number, and with it every key after.
STAGE_VERSIONS = {
    "build": 1,
    "read": 1,
    "dedup": 1,
    "tokenizer": 1,
    "encode": 1,
    "packing": 1,
    "filters": 1,
    "decontaminate": 2,
    "lines": 1,
    "substring": 1,
}


def cache_key(stage: str, *parts: Any) -> str:
    """32 hex digits of the sha256 over the stage, its version and the parts (plain values)."""
    text = json.dumps([stage, STAGE_VERSIONS[stage], *parts], sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
