"""Cutting very long texts where it can't change a token, so that no text costs more than linear time and memory.

Both pre-tokenisers begin a new piece at a newline's far side and before a space between letters; a cut there leaves every
token as it was. A text without such a place for a whole megabyte is cut anyway: its bytes still come back exactly, only a
merge across the cut is lost.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

PIECE_CHARACTERS = 1 << 20
_SEARCHED = 1 << 16  # how far back a safe place is looked for
_SAFE = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])|(?<=\S\n)(?=\S)")

MAX_RUN = 1024
_LONG_RUN = re.compile(rf"\S{{{MAX_RUN + 1},}}|\s{{{MAX_RUN + 1},}}")


def pieces(text: str, *, limit: int = PIECE_CHARACTERS) -> Iterator[str]:
    """The text in pieces of at most `limit` characters, cut at the last safe place before it where there is one."""
    start = 0
    while len(text) - start > limit:
        end = start + limit
        # one character beyond the window is in view on both sides, since the rule looks at neighbours
        low = max(start + 1, end - _SEARCHED)
        window = text[low - 2 if low >= 2 else 0 : end + 2]
        offset = low - 2 if low >= 2 else 0
        safe = [match.start() + offset for match in _SAFE.finditer(window) if low <= match.start() + offset <= end]
        cut = safe[-1] if safe else end
        yield text[start:cut]
        start = cut
    yield text[start:]


def training_pieces(text: str) -> Iterator[str]:
    """The text with runs of more than MAX_RUN characters without (or of only) white space cut up: training costs the
    length of a pre-token for each merge in it, so one run of a megabyte would cost more than the rest of a corpus."""
    start = 0
    for match in _LONG_RUN.finditer(text):
        for cut in range(match.start(), match.end(), MAX_RUN):
            if cut > start:
                yield text[start:cut]
                start = cut
    yield text[start:]
