"""A panel as inline SVG; colours are classes, so that the page's style decides them for light and dark."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from tokennorm.report.curves import COLOURS, Curve, Panel, Point

__all__ = ["draw", "format_tick"]

_WIDTH, _HEIGHT = 560, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 14, 12, 40
# Part of the values, at each end, that may leave the picture: one spike would flatten a curve otherwise.
_TAIL = 0.005


class _Axis:
    """Maps values to places between two pixels."""

    def __init__(self, low: float, high: float, start: float, end: float, *, logarithmic: bool = False) -> None:
        self.logarithmic = logarithmic
        low, high = (math.log10(low), math.log10(high)) if logarithmic else (low, high)
        if high - low <= 1e-9 * max(abs(low), abs(high), 1e-30):
            margin = abs(low) * 0.05 or 0.5
            low, high = low - margin, high + margin
        self.low, self.high, self._start, self._end = low, high, start, end

    def __call__(self, value: float) -> float:
        """The pixel of a value; what is outside is at the edge."""
        if self.logarithmic:
            value = math.log10(value) if value > 0 else self.low
        place = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return self._start + place * (self._end - self._start)

    def ticks(self) -> list[float]:
        """Round values inside, about five of them; of a logarithmic axis decades when there are two or more."""
        if self.logarithmic and math.floor(self.high) - math.ceil(self.low) >= 1:
            stride = max(1, round((self.high - self.low) / 5))
            return [10.0**power for power in range(math.ceil(self.low), math.floor(self.high) + 1, stride)]
        low, high = (10**self.low, 10**self.high) if self.logarithmic else (self.low, self.high)
        rough = (high - low) / 5
        unit = 10 ** math.floor(math.log10(rough))
        stride = next(unit * times for times in (1, 2, 5, 10) if unit * times >= rough)
        return [
            stride * index for index in range(math.ceil(low / stride - 1e-9), math.floor(high / stride + 1e-9) + 1)
        ]


def format_tick(value: float) -> str:
    """Return a short number: ``0.25``, ``1.5k``, ``20M``, ``3e-05``."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.4g}{unit}"
    return f"{value:.4g}"


def draw(panel: Panel) -> str:
    """Return the picture of a panel that has at least one value."""
    points = [point for curve in panel.curves for point in curve.points if point.mean is not None]
    places = [point.x for curve in panel.curves for point in curve.points]
    x = _Axis(min(places), max(places), _LEFT, _WIDTH - _RIGHT)
    low, high, logarithmic = _limits(points, panel)
    y = _Axis(low, high, _HEIGHT - _BOTTOM, _TOP, logarithmic=logarithmic)
    parts = [*_grid(x, y, panel.x_label)]
    # Bands below lines, so that no curve hides behind another's band; more than two of them are a fog.
    bands = [shape for curve in panel.curves if (shape := _band(curve, x, y))]
    parts += bands if len(bands) <= 2 else []
    for curve in panel.curves:
        parts += _line(curve, x, y)
    label = escape(f"{panel.title} against {panel.x_label}")
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _limits(points: Sequence[Point], panel: Panel) -> tuple[float, float, bool]:
    values = sorted(
        value for point in points for value in (point.low, point.mean, point.high) if value is not None
    )
    cut = int(len(values) * _TAIL)
    # A mean is never cut away: only the ends of the bands are.
    means = [point.mean for point in points if point.mean is not None]
    inner = values[cut : len(values) - cut]
    low, high = min(inner[0], _quantile(means, 0.02)), max(inner[-1], _quantile(means, 0.98))
    if panel.logarithmic and low > 0 and high / low > 30:
        return low / 1.2, high * 1.2, True
    margin = 0.05 * (high - low)
    return (0.0 if panel.from_zero and low >= 0 else low - margin), high + margin, False


def _quantile(values: Sequence[float], part: float) -> float:
    return sorted(values)[min(int(part * len(values)), len(values) - 1)]


def _grid(x: _Axis, y: _Axis, x_label: str) -> Iterator[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    for value in y.ticks():
        yield f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
        yield f'<text x="{_LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{format_tick(value)}</text>'
    for value in x.ticks():
        yield f'<line class="axis" x1="{x(value):.1f}" x2="{x(value):.1f}" y1="{bottom}" y2="{bottom + 4}"/>'
        yield f'<text x="{x(value):.1f}" y="{bottom + 17}" text-anchor="middle">{format_tick(value)}</text>'
    yield f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>'
    middle = (_LEFT + right) / 2
    yield f'<text x="{middle}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>'


def _pieces(curve: Curve) -> list[list[Point]]:
    """Runs of points that have a value: a curve is broken where one is missing."""
    pieces: list[list[Point]] = [[]]
    for point in curve.points:
        if point.mean is None:
            pieces.append([])
        else:
            pieces[-1].append(point)
    return [piece for piece in pieces if piece]


def _band(curve: Curve, x: _Axis, y: _Axis) -> str:
    shapes = []
    for piece in _pieces(curve):
        if all(point.low == point.high for point in piece):
            continue
        upper = " ".join(f"{x(p.x):.1f},{y(p.high):.1f}" for p in piece if p.high is not None)
        lower = " ".join(f"{x(p.x):.1f},{y(p.low):.1f}" for p in reversed(piece) if p.low is not None)
        shapes.append(f'<polygon class="band c{curve.colour % COLOURS}" points="{upper} {lower}"/>')
    return "".join(shapes)


def _line(curve: Curve, x: _Axis, y: _Axis) -> Iterator[str]:
    colour = f"c{curve.colour % COLOURS}"
    for piece in _pieces(curve):
        pairs = [(x(point.x), y(point.mean), point) for point in piece if point.mean is not None]
        if len(pairs) > 1:
            style = "line dashed" if curve.style == "dashed" else "line"
            places = " ".join(f"{px:.1f},{py:.1f}" for px, py, _ in pairs)
            yield f'<polyline class="{style} {colour}" points="{places}"/>'
        if curve.style == "dots" or len(pairs) == 1:
            for px, py, point in pairs:
                title = escape(f"{curve.label}: {point.mean:.6g} at {format_tick(point.x)}")
                yield f'<circle class="{colour}" cx="{px:.1f}" cy="{py:.1f}" r="3"><title>{title}</title></circle>'
    for place in curve.missing[:200]:
        title = escape(f"{curve.label}: not a finite number at {format_tick(place)}")
        yield (f'<path class="missing" d="M{x(place) - 4:.1f} {_TOP} h8 l-4 8 z"><title>{title}</title></path>')
