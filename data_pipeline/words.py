"""What a word is, in one place: a run of letters, digits and underscores (`\\w`) of the lower-cased text."""

from __future__ import annotations

import functools
import re

import numpy as np

_WORD = re.compile(r"\w+")
_LAST_ASSIGNED = 0x40000  # no code point above is a word character


def words(text: str) -> list[str]:
    """The words in order."""
    return _WORD.findall(text.lower())


def code_points(text: str) -> np.ndarray:
    """uint32 code points of the lower-cased text, read-only: `words(text)` are their runs within `word_table()`."""
    lowered = text.lower()
    if lowered.isascii():
        return np.frombuffer(lowered.encode("ascii"), dtype=np.uint8).astype(np.uint32)
    return np.frombuffer(lowered.encode("utf-32-le", "surrogatepass"), dtype=np.dtype("<u4"))


@functools.cache
def word_table() -> np.ndarray:
    """bool[0x110000]: whether the code point is part of a word."""
    table = np.zeros(0x110000, dtype=np.bool_)
    for match in _WORD.finditer("".join(map(chr, range(_LAST_ASSIGNED)))):
        table[match.start() : match.end()] = True
    table.flags.writeable = False
    return table
