"""Text that ends at a string, though tokens end elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_lite.inference.given import stops_of


class StopStrings:
    """`feed` takes text as it comes and gives what may be shown; the rest is held back while it may still become a stop string.

    The end is where the first of them is complete, whatever pieces the text comes in; of several that are complete there, the
    longest counts. What stood before it has been shown, nothing of it ever is. A string is one of them; raises ConfigError for an empty one.
    """

    def __init__(self, stops: Sequence[str] | str) -> None:
        self._stops = tuple(dict.fromkeys(stops_of(stops)))
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        held = max((_begun(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """What was held back, where no stop string came."""
        held, self._held = self._held, ""
        return held


def _begun(text: str, stop: str) -> int:
    """Characters at the end of the text with which the stop string begins."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
