"""The rules of C4: lines that go, and documents (Raffel et al. 2020, section 2.2)."""

from __future__ import annotations

import re
from itertools import islice

from data_pipeline.filters.config import C4Config
from data_pipeline.filters.segments import Segments

_TERMINAL = (".", "?", "!", '"', "'", "”", "’", "。", "？", "！")
_POLICIES = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
_CITATION = re.compile(r"\[\d*\]|\[edit\]|\[citation needed\]")
_SENTENCE_END = re.compile(r"(?<![.!?])[.!?]+[\"'”’)\]]*(?=\s|$)|[。！？]")


def c4(text: Segments, config: C4Config) -> Segments | str:
    """What stays of the document, the same object if all does; or why it goes. The lines that stay lose white space around them."""
    lowered = text.lowered
    if config.drop_lorem_ipsum and "lorem ipsum" in lowered:
        return "lorem_ipsum"
    if config.drop_curly_bracket and "{" in text.text:
        return "curly_bracket"
    phrases = [phrase for phrase in _POLICIES if phrase in lowered] if config.drop_policy_lines else []
    if config.drop_javascript_lines and "javascript" in lowered:
        phrases.append("javascript")
    kept: list[str] = []
    citations = config.strip_citations and "[" in text.text
    for line in text.lines:
        line = line.strip()
        if config.max_word_chars is not None and len(line) > config.max_word_chars and max(map(len, line.split())) > config.max_word_chars:
            continue
        num_words = len(line.split(None, config.min_words_per_line))  # one more than asked for is enough
        if citations:
            line = _CITATION.sub("", line)
        if config.terminal_punctuation and (not line.endswith(_TERMINAL) or line.endswith("...")):
            continue
        if num_words < config.min_words_per_line:
            continue
        if phrases and any(phrase in line.lower() for phrase in phrases):
            continue
        kept.append(line)
    if not _has_sentences(kept, config.min_sentences):
        return "few_sentences"
    if not kept:
        return "nothing_left"
    joined = "\n".join(kept)
    return text if joined == text.text else Segments(joined)


def _has_sentences(lines: list[str], wanted: int) -> bool:
    """A line has as many sentences as ends of one, and another if it goes on after the last; a line that stays has one."""
    if len(lines) >= wanted:
        return True
    found = 0
    for line in lines:
        last = 0
        for match in islice(_SENTENCE_END.finditer(line), wanted):
            found, last = found + 1, match.end()
        found += last < len(line)
        if found >= wanted:
            return True
    return False
