"""Shares of a document's characters (NeMo Curator's heuristics)."""

from __future__ import annotations

import re

from data_pipeline.filters.config import RatiosConfig
from data_pipeline.filters.segments import DIGIT, SPACE, SYMBOL, Segments

_URL = re.compile(r"(?:https?://|www\.)\S+")


def ratios(text: Segments, config: RatiosConfig) -> str | None:
    """Why the document goes, or None."""
    for kind, most, reason in (
        (SYMBOL, config.max_symbols, "symbols"),
        (DIGIT, config.max_digits, "digits"),
        (SPACE, config.max_white_space, "white_space"),
    ):
        if most < 1 and text.share(kind) > most:
            return reason
    if config.max_urls < 1 and ("://" in text.text or "www." in text.text):
        chars = sum(match.end() - match.start() for match in _URL.finditer(text.lowered))
        if chars > config.max_urls * len(text.text):
            return "urls"
    return None
