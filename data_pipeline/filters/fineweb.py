"""FineWeb's own rules, about lines (Penedo et al. 2024, section 3.6)."""

from __future__ import annotations

from data_pipeline.filters.config import FineWebConfig
from data_pipeline.filters.segments import Segments, duplicates

# Ends of sentences and of quotations in the scripts that have them (Unicode's Sentence_Terminal, and closing quotation marks).
_SENTENCE_ENDS = frozenset(".!?…\"'”’»›。！？｡‼⁇⁈⁉؟۔।॥։።᙮᠃᠉။၊។៕༎؞܀܁܂߹꓿꘎꘏꤯꩝꩞꩟꫰꫱꯫﹒﹖﹗．")


def fineweb(text: Segments, config: FineWebConfig) -> str | None:
    """Why the document goes, or None."""
    lines = text.lines
    if not lines:
        return "empty"
    if sum(line.rstrip()[-1] in _SENTENCE_ENDS for line in lines) < config.min_punctuated_lines * len(lines):
        return "unpunctuated_lines"
    if sum(len(line) <= config.short_line_chars for line in lines) > config.max_short_lines * len(lines):
        return "short_lines"
    newlines = text.text.count("\n")
    if duplicates(lines)[1] > config.max_duplicate_line_chars * (len(text.text) - newlines):
        return "duplicate_line_chars"
    if newlines > config.max_newlines_per_word * text.num_words:
        return "newlines"
    return None
