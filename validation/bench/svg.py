"""Line charts as SVG text: few lines, no dependency, the same bytes for the same numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from poros_cli.report.scale import ticks

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 190, 40, 50
COLOURS = ("#0b6e4f", "#7bc8a4", "#c8553d", "#3d5a98", "#8e6c8a", "#777777")


@dataclass(frozen=True, slots=True)
class Line:
    """One series; ``steps`` draws a staircase, for a best-so-far."""

    name: str
    points: Sequence[tuple[float, float]]
    steps: bool = False
    dashed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A chart of several lines; ``log_x`` spaces ticks by powers of two."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    log_x: bool = False


def draw(chart: Chart) -> str:
    """Return the chart as an SVG document."""
    scale = _Scale(chart)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 22, chart.title, anchor="start", size=15),
        *_axes(chart, scale),
    ]
    for index, line in enumerate(chart.lines):
        colour = COLOURS[index % len(COLOURS)]
        parts += _series(line, scale, colour)
        y = TOP + 14 + 20 * index
        x = WIDTH - RIGHT + 12
        parts.append(_path(f"M{x} {y - 4}h22", colour, dashed=line.dashed))
        parts.append(_text(x + 28, y, line.name, anchor="start"))
    return "\n".join([*parts, "</svg>"]) + "\n"


class _Scale:
    """From values to pixels."""

    def __init__(self, chart: Chart) -> None:
        points = [point for line in chart.lines for point in line.points]
        self.log_x = chart.log_x
        xs, ys = [x for x, _ in points], [y for _, y in points]
        self.x_ticks = _powers(min(xs), max(xs)) if chart.log_x else ticks(0.0, max(xs))
        self.y_ticks = ticks(0.0, max(ys))
        self._first, self._last = self._place(self.x_ticks[0]), self._place(self.x_ticks[-1])

    def _place(self, x: float) -> float:
        return math.log2(x) if self.log_x else x

    def x(self, value: float) -> float:
        share = (self._place(value) - self._first) / ((self._last - self._first) or 1)
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        return round(HEIGHT - BOTTOM - value / self.y_ticks[-1] * (HEIGHT - TOP - BOTTOM), 1)


def _powers(least: float, largest: float) -> list[float]:
    return [2.0**power for power in range(math.floor(math.log2(least)), math.ceil(math.log2(largest)) + 1)]


def _axes(chart: Chart, scale: _Scale) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for value in scale.y_ticks:
        parts.append(_path(f"M{LEFT} {scale.y(value)}H{right}", "#dddddd"))
        parts.append(_text(LEFT - 8, scale.y(value) + 4, f"{value:g}", anchor="end"))
    for value in scale.x_ticks:
        parts.append(_path(f"M{scale.x(value)} {bottom}v5", "#333333"))
        parts.append(_text(scale.x(value), bottom + 20, f"{value:g}"))
    parts.append(_path(f"M{LEFT} {TOP}V{bottom}H{right}", "#333333"))
    parts.append(_text((LEFT + right) / 2, HEIGHT - 10, chart.x_label))
    middle = (TOP + bottom) / 2
    parts.append(
        f'<text x="18" y="{middle:g}" text-anchor="middle" transform="rotate(-90 18 {middle:g})">'
        f"{escape(chart.y_label)}</text>"
    )
    return parts


def _series(line: Line, scale: _Scale, colour: str) -> list[str]:
    path = ""
    for x, y in line.points:
        if path and line.steps:
            path += f"H{scale.x(x)}V{scale.y(y)}"
        else:
            path += f"{'L' if path else 'M'}{scale.x(x)} {scale.y(y)}"
    dots = [f'<circle cx="{scale.x(x)}" cy="{scale.y(y)}" r="3" fill="{colour}"/>' for x, y in line.points]
    return [_path(path, colour, dashed=line.dashed, width=2), *dots]


def _path(path: str, colour: str, *, dashed: bool = False, width: int = 1) -> str:
    dash = ' stroke-dasharray="6 4"' if dashed else ""
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dash}/>'


def _text(x: float, y: float, text: str, *, anchor: str = "middle", size: int = 12) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'
