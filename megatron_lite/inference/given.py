"""What a caller gave as texts and counts, checked before a model sees it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real

from data_pipeline.errors import ConfigError, Fault

_AS_TEXT = "text that UTF-8 can spell"
_FIX = "decode its bytes by the encoding that they have"


def is_text(value: object) -> bool:
    """A string that UTF-8 can spell: Python's may have half of a surrogate pair, which is also what it makes of bytes that are no UTF-8."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def text_faults(texts: Mapping[str, object]) -> list[Fault]:
    """Of those that are no text, by name."""
    return [Fault(name, value, _AS_TEXT, _FIX if isinstance(value, str) else "") for name, value in texts.items() if not is_text(value)]


def is_count(value: object, least: float) -> bool:
    """A whole number from `least`; numpy's are numbers too."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def is_within(value: object, low: float, high: float) -> bool:
    """A finite number from `low` to `high`."""
    return isinstance(value, Real) and not isinstance(value, bool) and low <= float(value) <= high and math.isfinite(value)


def count_faults(name: str, value: object, *, least: int) -> list[Fault]:
    return [] if is_count(value, least) else [Fault(name, value, f"a count from {least}")]


def texts_of(given: Sequence[str] | str, name: str) -> list[str]:
    """Several texts; a string is one. Raises ConfigError naming each that is no text."""
    if not isinstance(given, str | Sequence):
        raise ConfigError([Fault(f"{name}s", given, "a text, or a list of them")])
    texts = [given] if isinstance(given, str) else list(given)
    refuse(text_faults({f"{name} {row}": text for row, text in enumerate(texts)}))
    return texts


def stops_of(given: Sequence[str] | str) -> list[str]:
    """Stop strings; a string is one. Raises ConfigError for what is none."""
    if not isinstance(given, str | Sequence):
        raise ConfigError([Fault("stop", given, "a string, or a list of them")])
    stops = [given] if isinstance(given, str) else list(given)
    empty = [Fault("stop", "", "a string that is not empty")] if "" in stops else []
    refuse(empty + [fault for stop in stops for fault in text_faults({"stop": stop})])
    return stops


def refuse(faults: Sequence[Fault]) -> None:
    """Raises ConfigError where there are any."""
    if faults:
        raise ConfigError(faults)
