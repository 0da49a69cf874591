"""Texts that a command is to go on from or to score: from the command line, a file, or standard input."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_pipeline.errors import ConfigError, DataError, Fault
from megatron_lite.inference.given import is_text

if TYPE_CHECKING:
    from megatron_lite.parallel.groups import Axis

Record = Mapping[str, Any]
BYTE_ORDER_MARK = "\ufeff"  # what some editors put before a text, and is none of it


def read_texts(file: Path, *, field: str, keep_blank: bool) -> list[Record]:
    """One text a line, blank ones too where they are kept; of `.jsonl`, or of standard input that begins with an object, all objects with
    `field`, whose other keys come out again beside the answer. `-` is standard input. Raises DataError naming the line."""
    is_standard = str(file) == "-"
    name, encoding = ("standard input", sys.stdin.encoding) if is_standard else (str(file), "utf-8")
    try:
        text = _standard_input().read() if is_standard else file.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise DataError(f"{name} can't be read: {error}") from None
    text = text.removeprefix(BYTE_ORDER_MARK)
    lines = list(enumerate(text.removesuffix("\n").split("\n") if text else [], 1))
    for number, line in lines:
        if not is_text(line):
            raise DataError(f"{name}, line {number}: no text in {encoding} ({line!r})")
    if file.suffix != ".jsonl" and not (is_standard and text.lstrip().startswith("{")):
        return [{field: line.removesuffix("\r")} for _, line in lines if keep_blank or line.strip()]
    return [_record(line, field, f"{name}, line {number}") for number, line in lines if line.strip()]


def read_standard_input(world: Axis, *, field: str, keep_blank: bool) -> list[Record]:
    """The texts that the first rank reads, on every rank. Raises its DataError on every rank, so that none waits for the others. Collective."""
    from megatron_lite.checkpoint.agree import broadcast_json  # loads torch

    told: dict[str, Any] = {}
    if world.rank == 0:
        try:
            told = {"records": read_texts(Path("-"), field=field, keep_blank=keep_blank)}
        except DataError as error:
            told = {"error": str(error)}
    told = broadcast_json(told, world)
    if "error" in told:
        raise DataError(told["error"])
    records: list[Record] = told["records"]
    return records


def typed_lines() -> Iterator[str]:
    """Lines of standard input as they come, without their ends; bytes that are no UTF-8 are what is no text."""
    stream, first = _standard_input(), True
    while line := stream.readline():
        yield line.removeprefix(BYTE_ORDER_MARK if first else "").removesuffix("\n")
        first = False


def _standard_input() -> Any:
    """With bytes that don't belong to its encoding as surrogates, by which their line is found."""
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    return sys.stdin


def _record(line: str, field: str, where: str) -> Record:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: no JSON ({error})") from None
    if not isinstance(record, dict) or not is_text(record.get(field)):
        raise DataError(f'{where}: not an object with a text under "{field}"')
    if not is_text(record.get("prompt", "")):
        raise DataError(f'{where}: what is under "prompt" is no text')
    return record


def require_one_source(given: Mapping[str, bool]) -> None:
    """Raises ConfigError where texts come from several places."""
    named = [name for name, there in given.items() if there]
    if len(named) > 1:
        raise ConfigError([Fault(" and ".join(named), "both", f"one of {', '.join(given)}")])


def in_batches(records: Sequence[Record], size: int) -> list[Sequence[Record]]:
    return [records[first : first + size] for first in range(0, len(records), size)]
