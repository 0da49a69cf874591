"""Curves as inline SVG: no script, no font, no file of their own."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

WIDTH, HEIGHT = 560, 270
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 12, 40
MAX_BUCKETS = 400  # of a line; each shows its least and its greatest value, so that no spike is lost
SMOOTH_SHARE = 0.02  # of the points: the time constant of the smoothed line


@dataclass(frozen=True)
class Curve:
    """One series; `thin` is drawn faint with a smoothed line over it, `dots` with a mark at each point."""

    label: str
    xs: Sequence[float] | np.ndarray
    ys: Sequence[float] | np.ndarray
    kind: Literal["line", "thin", "dots"] = "line"
    colour: int = 0

    def points(self) -> np.ndarray:
        """float64 [points, 2], without what is not finite, which no axis can show."""
        both = np.column_stack([np.asarray(self.xs, dtype=np.float64), np.asarray(self.ys, dtype=np.float64)])
        return both[np.isfinite(both).all(axis=1)]


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


def span(values: np.ndarray, *, room: float) -> tuple[float, float]:
    """Least and greatest value with some room around; never empty."""
    low, high = float(values.min()), float(values.max())
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


def thin_out(points: np.ndarray, buckets: int = MAX_BUCKETS) -> np.ndarray:
    """At most 2 * buckets + 2 points in order: of each bucket the least and the greatest, and the ends."""
    if len(points) <= 2 * buckets:
        return points
    edges = np.arange(buckets + 1) * len(points) // buckets
    kept = {0, len(points) - 1}
    for begin, end in pairwise(edges.tolist()):
        part = points[begin:end, 1]
        kept |= {int(begin + part.argmin()), int(begin + part.argmax())}
    return points[sorted(kept)]


def smoothed(points: np.ndarray, buckets: int = MAX_BUCKETS) -> np.ndarray:
    """Exponential moving average, corrected for its start (Kingma and Ba 2015), of the points or of the means of so many buckets."""
    if len(points) > 2 * buckets:
        edges = np.arange(2 * buckets) * len(points) // (2 * buckets)
        points = np.add.reduceat(points, edges) / np.diff([*edges, len(points)])[:, None]
    decay = 1 - 1 / max(1.0, SMOOTH_SHARE * len(points))
    mean, weight, out = 0.0, 0.0, []
    for x, y in points.tolist():
        mean, weight = decay * mean + (1 - decay) * y, decay * weight + (1 - decay)
        out.append((x, mean / weight))
    return np.array(out)


def chart(title: str, curves: Sequence[Curve], *, x_label: str, marks: Sequence[tuple[float, str]] = (), cut: bool = False) -> str:
    """One chart as <figure>; `marks` are vertical lines with a hint. Empty where no curve has a point.

    `cut` lets the few greatest values of a long series leave the chart, which says so: else the first steps' loss would be all of it.
    """
    drawn = [(curve, points) for curve in curves if len(points := curve.points())]
    if not drawn:
        return ""
    xs, ys = np.concatenate([points for _, points in drawn]).T
    x_axis = Axis(*span(xs, room=0.0), LEFT, WIDTH - RIGHT)
    kept = ys[ys <= _ceiling(ys)] if cut else ys
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
        legend += f'<span class="note">{len(ys) - len(kept):,} above this, up to {short(float(ys.max()))}</span>'
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">{"".join(parts)}</svg>'
    return f"<figure><figcaption>{html.escape(title)} {legend}</figcaption>{svg}</figure>"


def _ceiling(values: np.ndarray) -> float:
    """What 99 % of the values stay below, and half of their range more; infinite for a short series."""
    if len(values) < 200:
        return math.inf
    high = float(np.partition(values, len(values) * 99 // 100)[len(values) * 99 // 100])
    return high + 0.5 * (high - float(values.min()))


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


def _curve(curve: Curve, points: np.ndarray, x_axis: Axis, y_axis: Axis) -> list[str]:
    def place(point: Sequence[float]) -> tuple[float, float]:
        return x_axis.at(point[0]), max(y_axis.at(point[1]), 0.0)  # what is above the chart leaves it through its upper edge

    parts = []
    over = smoothed(points) if curve.kind == "thin" and len(points) >= 100 else points[:0]
    for style, line in (("faint" if len(over) else "line", points), ("line", over)):
        if len(line) > 1:
            path = " ".join("{:.1f},{:.1f}".format(*place(point)) for point in thin_out(line).tolist())
            parts.append(f'<polyline class="{style} c{curve.colour}" points="{path}"/>')
    if curve.kind == "dots" or len(points) == 1:
        radius = 3 if len(points) < 40 else 1.5
        for point in thin_out(points, MAX_BUCKETS // 2).tolist():
            x, y = place(point)
            hint = html.escape(f"{curve.label} {point[1]:.5g} at {short(point[0])}")
            parts.append(f'<circle class="c{curve.colour}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"><title>{hint}</title></circle>')
    return parts
