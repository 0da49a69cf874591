"""Printing that outlives its reader: a closed terminal or a dead launcher's pipe is no reason to lose a run."""

from __future__ import annotations

import logging
import os
import sys


def show(text: str, *, error: bool = False) -> None:
    """Print a line, at once. Where nobody reads any more, it goes to this rank's log alone, and so does all that follows."""
    stream = sys.stderr if error else sys.stdout
    try:
        print(text, file=stream, flush=True)
    except OSError:
        logging.info("nobody reads the output any more; from here on it is only in this log: %s", text)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2 if error else 1)
