"""Texts that a command is to go on from or to score: from the command line, a file, or standard input."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data_pipeline.errors import ConfigError, DataError, Fault

Record = Mapping[str, Any]


def read_texts(file: Path, *, field: str) -> list[Record]:
    """One text a line, blank ones too; of `.jsonl`, or where the first line is an object, objects with `field`, whose other keys
    come out again beside the answer, and blank lines are nothing. `-` is standard input. Raises DataError naming the line."""
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} can't be read: {error}") from None
    lines = text.removesuffix("\n").split("\n") if text else []
    if file.suffix != ".jsonl" and not (str(file) == "-" and text.lstrip().startswith("{")):
        return [{field: line.removesuffix("\r")} for line in lines]
    return [_record(line, field, f"{file}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]


def not_blank(records: Sequence[Record], field: str) -> list[Record]:
    """Those whose text has something in it: a blank line of a file is no prompt, and nothing to score."""
    return [record for record in records if record[field].strip()]


def _record(line: str, field: str, where: str) -> Record:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: no JSON ({error})") from None
    if not isinstance(record, dict) or not _is_text(record.get(field)):
        raise DataError(f'{where}: not an object with a text under "{field}"')
    if not _is_text(record.get("prompt", "")):
        raise DataError(f'{where}: what is under "prompt" is no text')
    return record


def _is_text(value: object) -> bool:
    """A string that UTF-8 can spell: JSON may have half of a surrogate pair."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def require_one_source(given: Mapping[str, bool]) -> None:
    """Raises ConfigError where texts come from several places."""
    named = [name for name, there in given.items() if there]
    if len(named) > 1:
        raise ConfigError([Fault(" and ".join(named), "both", f"one of {', '.join(given)}")])


def in_batches(records: Sequence[Record], size: int) -> list[Sequence[Record]]:
    return [records[first : first + size] for first in range(0, len(records), size)]
