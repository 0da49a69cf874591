"""A request to stop: kept as a flag that the training loop reads at every step, whoever it came from."""

from __future__ import annotations

import signal
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


class StopFlag:
    """`requested` once a signal came or the launcher died. Further requests change nothing: a save is never cut short."""

    def __init__(self) -> None:
        self.reason = ""

    @property
    def requested(self) -> bool:
        return bool(self.reason)

    def request(self, reason: str) -> None:
        self.reason = self.reason or reason

    def listen(self) -> None:
        """Take SIGNALS as requests, in this process's main thread; SIGHUP, too, unless nohup has it ignored."""
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.request(signal.Signals(number).name)
