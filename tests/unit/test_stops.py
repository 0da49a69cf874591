"""If these fail, a stop string is shown, missed, or takes text before it along."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest

from data_pipeline.errors import ConfigError
from megatron_lite.inference.stops import StopStrings


def cuts(text: str) -> Iterator[list[str]]:
    """Every way to cut a text into pieces."""
    for places in itertools.product((False, True), repeat=len(text) - 1):
        pieces, first = [], 0
        for place, cut in enumerate(places, 1):
            if cut:
                pieces.append(text[first:place])
                first = place
        yield [*pieces, text[first:]]


def shown(pieces: Sequence[str], stops: Sequence[str]) -> tuple[str, bool]:
    watch, text = StopStrings(stops), ""
    for piece in pieces:
        text += watch.feed(piece)
        assert not any(stop in text for stop in stops)
        if watch.stopped:
            return text, True
    return text + watch.finish(), False


@pytest.mark.parametrize(
    ("text", "stops", "want"),
    [
        ("one two", ["two"], ("one ", True)),
        ("ababac", ["abac"], ("ab", True)),  # what began as the stop string was not: it begins again inside
        ("xxabcd", ["bcd", "c"], ("xxab", True)),  # the first to be complete
        ("xxabcd", ["bc", "c"], ("xxa", True)),  # the longest of those
        ("aab", ["b", "aab"], ("", True)),
        ("nearly sto", ["stop", "st!"], ("nearly sto", False)),
        ("é🙂漢", ["🙂"], ("é", True)),
        ("plain", [], ("plain", False)),
    ],
)
def test_the_same_end_for_every_cut(text: str, stops: Sequence[str], want: tuple[str, bool]) -> None:
    """Whatever pieces the text comes in, the same is shown, and no part of the stop string ever."""
    assert {shown(pieces, stops) for pieces in cuts(text)} == {want}


def test_what_cannot_become_a_stop_is_shown_at_once() -> None:
    """Only so much is held back as may still become a stop string, and nothing comes after the end."""
    watch = StopStrings(["\n\n", "END"])
    assert [watch.feed(piece) for piece in ("a\n", "b", "E", "N", "x", "\n", "\n", "more")] == ["a", "\nb", "", "", "ENx", "", "", ""]
    assert watch.stopped and watch.finish() == ""
    with pytest.raises(ConfigError, match="stop: got ''"):
        StopStrings(["a", ""])
