"""The exceptions that a user can meet, one exit code each. Our own bugs are `assert`s, never these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class MegatronLiteError(Exception):
    """Base of all: the message is written for the user, so no traceback is shown with it."""

    exit_code = 1


@dataclass(frozen=True)
class Fault:
    """One thing wrong with a config: which field, what stood there, what may stand there, what to do."""

    field: str
    got: object
    want: str
    fix: str = ""

    def __str__(self) -> str:
        line = f"{self.field}: got {self.got!r}, wanted {self.want}"
        return f"{line}. {self.fix}" if self.fix else line


class ConfigError(MegatronLiteError):
    """Bad config or usage; carries every fault found, not the first."""

    exit_code = 2

    def __init__(self, faults: Sequence[Fault] | str) -> None:
        self.faults: tuple[Fault, ...] = () if isinstance(faults, str) else tuple(faults)
        if isinstance(faults, str):
            message = faults
        elif len(self.faults) == 1:
            message = str(self.faults[0])
        else:
            message = f"{len(self.faults)} faults:\n" + "\n".join(f"  {fault}" for fault in self.faults)
        super().__init__(message)


class DataError(MegatronLiteError):
    """Input text, shards or a data identity that can't be used."""

    exit_code = 3


class CheckpointError(MegatronLiteError):
    """No usable checkpoint: damaged, incomplete, or of another model."""

    exit_code = 4


class HangError(MegatronLiteError):
    """A rank made no progress for longer than the watchdog allows."""

    exit_code = 5


class NonFiniteError(MegatronLiteError):
    """The loss or the gradient norm is not finite; no weight was touched."""

    exit_code = 6


class RunInUseError(MegatronLiteError):
    """Another live job holds the run folder."""

    exit_code = 7


class StopRequested(MegatronLiteError):
    """Stopped on request after saving: start the same command again to go on."""

    exit_code = 75
