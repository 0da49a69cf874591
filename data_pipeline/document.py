"""The one object that steps exchange."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Document:
    """One text. `id` is 32 hex digits by `document_id`; `meta` says where it stood: {"file": name, "record": number from 1};
    under "fields" it has other fields of the record that were asked for."""

    id: str
    text: str
    source: str
    meta: dict[str, Any] = field(default_factory=dict)


def document_id(source: str, name: str, record: int) -> str:
    """32 hex digits of the sha256 over where the text stood: source, file name relative to its root, record number.

    Nothing that a worker, a shard or another file's presence could change goes into it.
    """
    return hashlib.sha256(f"{source}\0{name}\0{record}".encode("utf-8", "surrogateescape")).hexdigest()[:32]


def content_key(text: str, target_at: int | None = None) -> bytes:
    """The first 16 bytes of the sha256 of the text's UTF-8: equal for equal texts, and for no others anyone can find. `target_at`: of a
    pair, the character where its target begins; a line end inside a side doesn't make it equal to a pair that is cut there."""
    whole = text if target_at is None else f"{target_at} {text}"
    return hashlib.sha256(whole.encode("utf-8", "surrogatepass")).digest()[:16]


def utf8_bytes(text: str) -> int:
    """Length in bytes of the text as UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
