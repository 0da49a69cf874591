"""Printing that outlives its reader: a closed terminal or a dead launcher's pipe is no reason to lose a run."""

from __future__ import annotations

import codecs
import json
import logging
import os
import sys
from io import TextIOWrapper


def show(text: str, *, error: bool = False) -> None:
    """Print a line, at once. Where nobody reads any more, it goes to this rank's log alone, and so does all that follows."""
    stream = sys.stderr if error else sys.stdout
    try:
        print(text, file=stream, flush=True)
    except OSError:
        logging.info("nobody reads the output any more; from here on it is only in this log: %s", text)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2 if error else 1)


def escape_unprintable() -> None:
    """From here on what standard output's encoding can't spell is printed as JSON escapes it, within JSON the same text still: no
    answer dies of a character."""
    codecs.register_error("megatron_lite_escape", _escaped)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="megatron_lite_escape")


def _escaped(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


def duration(seconds: float) -> str:
    """3 s, 2 m 05 s, 1 h 02 m, 3 d 04 h."""
    whole = int(seconds + 0.5)
    for unit, below, size, part in (("d", "h", 86400, 3600), ("h", "m", 3600, 60), ("m", "s", 60, 1)):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // part:02d} {below}"
    return f"{whole} s"
