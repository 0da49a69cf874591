"""The options that say which rows of a dataset are meant: how long they are and how they are packed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Optional

import typer

from data_pipeline.errors import ConfigError, Fault

Length = Annotated[Optional[int], typer.Option("--sequence-length", "-s", min=1, help="Targets a row.")]  # noqa: UP045
Method = Annotated[Optional[str], typer.Option("--method", help="best_fit or concat; default best_fit.")]  # noqa: UP045
SourceLength = Annotated[Optional[int], typer.Option("--source-length", min=2, help="Of pairs: tokens a row for the encoder.")]  # noqa: UP045
TargetLength = Annotated[Optional[int], typer.Option("--target-length", min=2, help="Of pairs: targets a row.")]  # noqa: UP045
OF_PAIRS = "a row of pairs has --source-length and --target-length, and no method"
NO_PAIRS = "the dataset has no pairs: give --sequence-length"


def refuse(options: Mapping[str, object], why: str) -> None:
    """Options of which nothing would come here, where they were given."""
    if faults := [Fault(name, value, "nothing here", why) for name, value in options.items() if value is not None]:
        raise ConfigError(faults)


def check_pair_shape(source_length: int | None, target_length: int | None) -> tuple[int, int]:
    """Both lengths of a row of pairs. Raises ConfigError where one is missing."""
    if source_length is None or target_length is None:
        raise ConfigError(
            [Fault("--source-length", source_length, "it and --target-length", "the places of a row of pairs on either side")]
        )
    return source_length, target_length


def row_shape(sequence_length: int | None, method: str | None) -> tuple[int, Any]:
    """The length of a row of documents and how they are packed. Raises ConfigError where that is no row."""
    method = method or "best_fit"
    if sequence_length is None:
        raise ConfigError(
            [Fault("--sequence-length", None, "the targets of a row", "or, to trace, give the run's folder in place of the dataset's")]
        )
    if method not in ("best_fit", "concat"):
        raise ConfigError([Fault("--method", method, "best_fit or concat")])
    return sequence_length, method
