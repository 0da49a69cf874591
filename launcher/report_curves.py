"""Curves as inline SVG: no script, no font, no file of their own."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

WIDTH, HEIGHT = 560, 270
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 12, 40
MAX_BUCKETS = 400  # of a line; each shows its least and its greatest value, so that no spike is lost
SMOOTH_SHARE = 0.02  # of the points: the time constant of the smoothed line


@dataclass(frozen=True)
class Curve:
    """One series; `thin` is drawn faint with a smoothed line over it, `dots` with a mark at each point."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    kind: Literal["line", "thin", "dots"] = "line"
    colour: int = 0

    def points(self) -> list[tuple[float, float]]:
        """Without what is not finite, which no axis can show."""
        return [(x, y) for x, y in zip(self.xs, self.ys) if math.isfinite(x) and math.isfinite(y)]


@dataclass(frozen=True)
class Axis:
    """A range of values on a range of pixels."""

    low: float
    high: float
    begin: float
    end: float

    def at(self, value: float) -> float:
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)

    def ticks(self, count: int = 5) -> list[float]:
        """Round values inside the range, about `count` of them."""
        step = round_step((self.high - self.low) / count)
        first = math.ceil(self.low / step - 1e-9)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


def round_step(width: float) -> float:
    """The least of 1, 2, 5 times a power of ten that is not below `width`."""
    power = 10.0 ** math.floor(math.log10(width))
    return next((factor * power for factor in (1, 2, 5) if factor * power >= width * (1 - 1e-9)), 10 * power)


def span(values: Sequence[float], *, room: float) -> tuple[float, float]:
    """Least and greatest value with some room around; never empty."""
    low, high = min(values), max(values)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        pad = abs(low) * 0.1 or 1.0
        return low - pad, high + pad
    return low - room * (high - low), high + room * (high - low)


def short(value: float) -> str:
    """1.5k, 20M, 0.003, 1e-05."""
    size = abs(value)
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= limit:
            return f"{value / limit:.4g}{unit}"
    return f"{value:.4g}" if size >= 1e-3 or size == 0 else f"{value:.1e}"


def thin_out(points: Sequence[tuple[float, float]], buckets: int = MAX_BUCKETS) -> list[tuple[float, float]]:
    """At most 2 * buckets points in order: of each bucket the least and the greatest, and the ends."""
    if len(points) <= 2 * buckets:
        return list(points)
    kept = [points[0]]
    for bucket in range(buckets):
        part = points[bucket * len(points) // buckets : (bucket + 1) * len(points) // buckets]
        extremes = {min(range(len(part)), key=lambda n: part[n][1]), max(range(len(part)), key=lambda n: part[n][1])}
        kept += [part[n] for n in sorted(extremes)]
    return [*kept, points[-1]]


def smoothed(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Exponential moving average, corrected for its start (Kingma and Ba 2015)."""
    decay = 1 - 1 / max(1.0, SMOOTH_SHARE * len(points))
    mean, weight, out = 0.0, 0.0, []
    for x, y in points:
        mean, weight = decay * mean + (1 - decay) * y, decay * weight + (1 - decay)
        out.append((x, mean / weight))
    return out


def chart(title: str, curves: Sequence[Curve], *, x_label: str, marks: Sequence[tuple[float, str]] = (), cut: bool = False) -> str:
    """One chart as <figure>; `marks` are vertical lines with a hint. Empty where no curve has a point.

    `cut` lets the few greatest values of a long series leave the chart, which says so: else the first steps' loss would be all of it.
    """
    drawn = [(curve, points) for curve in curves if (points := curve.points())]
    if not drawn:
        return ""
    x_axis = Axis(*span([x for _, points in drawn for x, _ in points], room=0.0), LEFT, WIDTH - RIGHT)
    ys = [y for _, points in drawn for _, y in points]
    ceiling = _ceiling(ys) if cut else math.inf
    kept = [y for y in ys if y <= ceiling]
    y_axis = Axis(*span(kept, room=0.05), HEIGHT - BOTTOM, TOP)
    parts = [*_grid(x_axis, y_axis, x_label)]
    for x, hint in marks:
        if x_axis.low < x < x_axis.high:
            at = f"{x_axis.at(x):.1f}"
            parts.append(
                f'<line class="mark" x1="{at}" x2="{at}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"><title>{html.escape(hint)}</title></line>'
            )
    for curve, points in drawn:
        parts += _curve(curve, points, x_axis, y_axis)
    legend = "".join(f'<span class="key c{curve.colour}">{html.escape(curve.label)}</span>' for curve, _ in drawn if len(drawn) > 1)
    if len(kept) < len(ys):
        legend += f'<span class="note">{len(ys) - len(kept):,} above this, up to {short(max(ys))}</span>'
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">{"".join(parts)}</svg>'
    return f"<figure><figcaption>{html.escape(title)} {legend}</figcaption>{svg}</figure>"


def _ceiling(values: Sequence[float]) -> float:
    """What 99 % of the values stay below, and half of their range more; infinite for a short series."""
    ranked = sorted(values)
    if len(ranked) < 200:
        return math.inf
    low, high = ranked[0], ranked[len(ranked) * 99 // 100]
    return high + 0.5 * (high - low)


def _grid(x_axis: Axis, y_axis: Axis, x_label: str) -> list[str]:
    parts = []
    for value in y_axis.ticks():
        y = f"{y_axis.at(value):.1f}"
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y}" dy=".32em" text-anchor="end">{short(value)}</text>')
    for value in x_axis.ticks(6):
        x = f"{x_axis.at(value):.1f}"
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM + 4}"/>')
        parts.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle">{short(value)}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 4}" text-anchor="middle">{html.escape(x_label)}</text>')
    return parts


def _curve(curve: Curve, points: list[tuple[float, float]], x_axis: Axis, y_axis: Axis) -> list[str]:
    parts = []
    over = smoothed(points) if curve.kind == "thin" and len(points) >= 100 else []
    for style, line in (("faint" if over else "line", points), ("line", over)):
        if len(line) > 1:
            path = " ".join(f"{x_axis.at(x):.1f},{max(y_axis.at(y), 0.0):.1f}" for x, y in thin_out(line))
            parts.append(f'<polyline class="{style} c{curve.colour}" points="{path}"/>')
    if curve.kind == "dots" or len(points) == 1:
        for x, y in points if len(points) <= MAX_BUCKETS else points[-1:]:
            hint = f"{curve.label} {y:.5g} at {short(x)}"
            parts.append(
                f'<circle class="c{curve.colour}" cx="{x_axis.at(x):.1f}" cy="{max(y_axis.at(y), 0.0):.1f}" r="{3 if len(points) < 40 else 1.5}"><title>{html.escape(hint)}</title></circle>'
            )
    return parts
