"""Line charts as SVG that takes its colours from the page and is as wide as its column."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from poros_cli.report.scale import Point, drawable, thin, ticks

__all__ = ["Chart", "Series", "draw"]

# About a phone's width: what is 11 units high is 11 pixels high there, and no smaller elsewhere.
WIDTH, HEIGHT = 350, 190
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 8, 22
# Of a line with more points than this, the points are not marked.
MAX_MARKS = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One line; its colour is the page's class ``name``.

    Attributes:
        name: for the legend.
        colour: CSS class that sets ``color``.
        points: (step, value), ascending.
        dashed: for what was predicted or allowed.
        combine: makes one value of several where there are too many points.
    """

    name: str
    colour: str
    points: Sequence[Point]
    dashed: bool = False
    combine: Callable[[Sequence[float]], float] = statistics.fmean


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A drawn chart.

    Attributes:
        title: above it.
        svg: the picture.
        legend: (CSS class, name, dashed) per line.
        note: below it.
    """

    title: str
    svg: Markup
    legend: tuple[tuple[str, str, bool], ...]
    note: str


def draw(
    title: str,
    series: Sequence[Series],
    *,
    label: Callable[[float], str],
    note: str = "",
    from_zero: bool = False,
) -> Chart | None:
    """Return the chart, or None where no line has a point.

    Args:
        series: lines of values over steps; empty ones are left out.
        label: writes a tick of the vertical axis.
        from_zero: the vertical axis begins at zero.
    """
    shown = [(line, drawable(line.points)) for line in series]
    missing = sum(len(line.points) - len(points) for line, points in shown)
    shown = [(line, points) for line, points in shown if points]
    if not shown:
        return None
    ys = [y for _, points in shown for _, y in points]
    xs = [x for _, points in shown for x, _ in points]
    levels = ticks(0.0 if from_zero else min(ys), max(ys), 4)
    left, right = min(xs), max(xs)

    def across(x: float) -> float:
        share = (x - left) / (right - left) if right > left else 0.5
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def down(y: float) -> float:
        share = (y - levels[0]) / (levels[-1] - levels[0])
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)

    parts = []
    for y in levels:
        parts.append(f'<path class="grid" d="M{LEFT} {down(y)}H{WIDTH - RIGHT}"/>')
        parts.append(_text(LEFT - 6, down(y) + 4, label(y), "end"))
    for x in [x for x in ticks(left, right, 4) if left <= x <= right and x == int(x)]:
        parts.append(_text(across(x), HEIGHT - 6, f"{x:.0f}", "end" if x == right > left else "middle"))
    parts.append(_text(LEFT - 6, HEIGHT - 6, "step", "end"))
    together = 1
    for line, points in shown:
        fewer, size = thin(points, line.combine)
        together = max(together, size)
        places = [(across(x), down(y)) for x, y in fewer]
        path = "L".join(f"{x} {y}" for x, y in places)
        if len(places) == 1 and line.dashed:  # a level, over a single step
            path = f"{LEFT} {places[0][1]}H{WIDTH - RIGHT}"
        dash = ' stroke-dasharray="5 4"' if line.dashed else ""
        parts.append(f'<path class="line {line.colour}" d="M{path}"{dash}/>')
        if len(places) <= MAX_MARKS and not line.dashed:
            parts += [f'<circle class="{line.colour}" cx="{x}" cy="{y}" r="2.2"/>' for x, y in places]
    notes = [note] if note else []
    notes += [f"Each point stands for {together} steps."] if together > 1 else []
    notes += [f"{missing} values are not finite and left out."] if missing else []
    svg = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)} over steps">'
        + "".join(parts)
        + "</svg>"
    )
    return Chart(
        title=title,
        svg=Markup(svg),
        legend=tuple((line.colour, line.name, line.dashed) for line, _ in shown),
        note=" ".join(notes),
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
