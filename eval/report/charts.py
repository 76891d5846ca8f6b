"""Curves as inline SVG with their labels as text, so that they stay legible from phone to wall.

The drawing stretches with the page (``preserveAspectRatio="none"``, strokes that do not scale); axis labels are
ordinary text placed by percentages. Each chart carries its points for the read-out that ``report.js`` shows under
the pointer or the arrow keys; without scripts the chart is complete.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Chart", "Line", "downsample", "draw", "figure", "number", "smooth"]

POINTS = 400  # buckets of a long curve: about one for each pixel column of a phone
_SPAN = 1000.0  # side of the drawing's own coordinates
_LABEL_ROOM = 12.0  # percent of the height that a label takes

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a chart.

    Args:
        points: (x, y) in order of x.
        band: (x, low, high), shown faint behind the line.
        reference: a level to compare with: dashed, named on the chart.
        tone: which colour of the page's palette, from 1.
        dots: mark each point (for curves of few points).
        mark: a point beside the line, in its colour but not joined to it.
        dashed: for palettes that begin anew.
        summary: what the chart's title line says of it, instead of its last value.
    """

    name: str
    points: Sequence[Point]
    band: Sequence[tuple[float, float, float]] = ()
    reference: bool = False
    tone: int = 1
    dots: bool = False
    mark: Point | None = None
    dashed: bool = False
    summary: str | None = None


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A titled chart; ``floor`` and ``ceiling`` are values the y axis has to reach.

    The x axis counts ``x_name``s; with ``x_ticks``, (place, label), it has these places and no others.
    """

    title: str
    lines: Sequence[Line]
    unit: str = ""
    note: str = ""
    floor: float | None = None
    ceiling: float | None = None
    wide: bool = False
    x_name: str = "step"
    x_ticks: Sequence[tuple[float, str]] = ()

    def place(self, x: float) -> str:
        """A place on the x axis as a person says it."""
        return f"{self.x_name} {dict(self.x_ticks).get(x) or number(x)}"


def number(value: float) -> str:
    """A number as a person writes it: thousands set apart, no more digits than carry meaning."""
    size = abs(value)
    if size >= 1e15 or not math.isfinite(value):
        return f"{value:.3g}"
    if size >= 999.5 or value == int(value):
        return f"{value:,.0f}"
    if size >= 0.001:
        digits = max(0, 2 - math.floor(math.log10(size)))
        text = f"{value:.{digits}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    return _scientific(value)


def figure(value: float, unit: str) -> str:
    """A figure with its unit; percentages have the same digits wherever the page tells them."""
    if unit != "%":
        return f"{number(value)}{unit}"
    return f"{value:.2f}%" if 0 < value < 0.995 else f"{value:.1f}%"


def _scientific(value: float) -> str:
    mantissa, exponent = f"{value:.2e}".split("e")
    power = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{mantissa.rstrip('0').rstrip('.')}×10{power}"


def smooth(points: Sequence[Point], window: float) -> list[Point]:
    """Exponential moving average over about ``window`` points, without the pull of the first one."""
    keep = 1 - 1 / max(1.0, window)
    mean = weight = 0.0
    out = []
    for x, y in points:
        mean = keep * mean + (1 - keep) * y
        weight = keep * weight + (1 - keep)
        out.append((x, mean / weight))
    return out


def downsample(points: Sequence[Point], count: int = POINTS) -> list[tuple[float, float, float, float]]:
    """At most ``count`` buckets of neighbouring points as (x, last, low, high): no peak is lost."""
    buckets = min(count, len(points))
    out = []
    for i in range(buckets):
        inside = points[i * len(points) // buckets : (i + 1) * len(points) // buckets]
        values = [y for _, y in inside]
        out.append((inside[-1][0], values[-1], min(values), max(values)))
    return out


def draw(chart: Chart) -> str:
    """The chart as a ``figure``; "" if there is nothing to draw."""
    drawn = [line for line in chart.lines if line.points]
    if not any(not line.reference for line in drawn):
        return ""
    points = [point for line in drawn for point in (*line.points, *((line.mark,) if line.mark else ()))]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    ys += [y for line in drawn for _, low, high in line.band for y in (low, high)]
    ys += [y for y in (chart.floor, chart.ceiling) if y is not None]
    scale = _scale(xs, ys, room=0.02 if any(line.mark for line in drawn) else 0.0)
    y_ticks = _inside(_ticks(scale.y0, scale.y1, 4), scale.y0, scale.y1)
    plain = all(tick == 0 or abs(tick) >= 0.001 for tick in y_ticks)
    inner = [_grid(y_ticks, scale)]
    inner += [_band(line, scale) for line in drawn if line.band]
    inner += [_path(line, scale) for line in drawn]
    labels = [
        f'<span class="yt" style="top:{scale.top(y):.2f}%">{_tick(y, plain)}{escape(chart.unit)}</span>'
        for y in y_ticks
    ]
    labels += _x_labels(chart, scale)
    ends = [scale.top(line.points[-1][1]) for line in drawn if not line.reference]
    labels += [_reference_label(line, scale, ends) for line in drawn if line.reference]
    said = "; ".join(_in_words(line, chart) for line in drawn)
    return (
        f'<figure class="chart{" wide" if chart.wide else ""}">'
        f"<figcaption><b>{escape(chart.title)}</b>{_key(drawn, chart)}</figcaption>"
        f'<div class="plot" tabindex="0" role="img" aria-label="{escape(f"{chart.title}: {said}")}" '
        f'data-chart="{escape(_data(drawn, chart, scale))}">'
        f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" aria-hidden="true">{"".join(inner)}</svg>'
        f"{''.join(labels)}</div></figure>"
    )


@dataclass(frozen=True, kw_only=True)
class _Scale:
    """From values to the drawing's coordinates."""

    x0: float
    x1: float
    y0: float
    y1: float

    def x(self, value: float) -> float:
        return _SPAN * ((value - self.x0) / (self.x1 - self.x0) if self.x1 > self.x0 else 0.5)

    def y(self, value: float) -> float:
        return _SPAN * ((self.y1 - value) / (self.y1 - self.y0) if self.y1 > self.y0 else 0.5)

    def left(self, value: float) -> float:
        return self.x(value) / _SPAN * 100

    def top(self, value: float) -> float:
        return self.y(value) / _SPAN * 100


def _scale(xs: Sequence[float], ys: Sequence[float], *, room: float = 0.0) -> _Scale:
    low, high = min(ys), max(ys)
    if high - low <= max(1e-9 * max(abs(low), abs(high)), 1e-15):  # a level line gets room on both sides
        pad = max(abs(high) * 0.05, 1e-6)
        low, high = low - pad, high + pad
    return _Scale(x0=min(xs) - room * (max(xs) - min(xs)), x1=max(xs), y0=low, y1=high)


def _ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers that enclose low … high, about ``count`` steps."""
    rough = (high - low) / count
    power: float = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.10g}") for i in range(first, last + 1)]


def _inside(ticks: Sequence[float], low: float, high: float) -> list[float]:
    room = 1e-9 * (high - low)
    return [tick for tick in ticks if low - room <= tick <= high + room]


def _whole_ticks(low: float, high: float) -> list[float]:
    """Ticks for the axis of steps."""
    if high <= low:
        return [low]
    return [x for x in _inside(_ticks(low, high, 4), low, high) if x == int(x)] or [low]


def _tick(value: float, plain: bool) -> str:
    return escape(number(value) if plain or value == 0 else _scientific(value))


def _points(points: Sequence[Point], scale: _Scale) -> str:
    return " ".join(f"{scale.x(x):.1f},{scale.y(y):.1f}" for x, y in points)


def _grid(ticks: Sequence[float], scale: _Scale) -> str:
    lines = "".join(f"M0 {scale.y(y):.1f}H1000" for y in ticks)
    return f'<path class="grid" d="{lines}"/><path class="axis" d="M0 1000H1000"/>'


def _band(line: Line, scale: _Scale) -> str:
    edge = [(x, high) for x, _, high in line.band] + [(x, low) for x, low, _ in reversed(line.band)]
    return f'<polygon class="band t{line.tone}" points="{_points(edge, scale)}"/>'


def _path(line: Line, scale: _Scale) -> str:
    points = list(line.points)
    if line.reference and points[0][1] == points[-1][1]:  # a level reaches from side to side
        points = [(scale.x0, points[0][1]), *points, (scale.x1, points[-1][1])]
    kind = "reference" if line.reference else f"line t{line.tone}{' dashed' if line.dashed else ''}"
    out = f'<polyline class="{kind}" points="{_points(points, scale)}"/>'
    if line.dots and len(points) <= 60:
        marks = "".join(f"M{scale.x(x):.1f} {scale.y(y):.1f}h0" for x, y in points)
        out += f'<path class="dots t{line.tone}" d="{marks}"/>'
    if line.mark:
        spot = f"M{scale.x(line.mark[0]):.1f} {scale.y(line.mark[1]):.1f}h0"
        out += f'<path class="mark t{line.tone}" d="{spot}"/><path class="hole" d="{spot}"/>'
    return out


def _x_labels(chart: Chart, scale: _Scale) -> list[str]:
    ticks = list(chart.x_ticks) or [(x, number(x)) for x in _whole_ticks(scale.x0, scale.x1)]
    ticks = [(x, label) for x, label in ticks if scale.x0 <= x <= scale.x1]
    labels = []
    for i, (x, label) in enumerate(ticks):
        left = scale.left(x)
        side = " first" if left < 6 else " last" if left > 90 else ""
        unit = f" {chart.x_name}s" if i == len(ticks) - 1 and not chart.x_ticks else ""
        labels.append(f'<span class="xt{side}" style="left:{left:.2f}%">{escape(label)}{escape(unit)}</span>')
    return labels


def _reference_label(line: Line, scale: _Scale, ends: Sequence[float]) -> str:
    """The name of a level at its right end, on the side where no other line ends close by."""
    top = scale.top(line.points[-1][1])
    crowded = any(top - _LABEL_ROOM < end <= top for end in ends)
    under = top < _LABEL_ROOM or (crowded and top < 100 - _LABEL_ROOM)
    side = " under" if under else ""
    return f'<span class="rt{side}" style="top:{top:.2f}%">{escape(line.name)}</span>'


def _key(lines: Sequence[Line], chart: Chart) -> str:
    shown = [line for line in lines if not line.reference]
    items = []
    for line in shown:
        value = escape(line.summary or figure(line.points[-1][1], chart.unit))
        kind = f"t{line.tone}{' dashed' if line.dashed else ''}"
        name = f'<i class="{kind}"></i>{escape(line.name)} ' if len(shown) > 1 else ""
        items.append(f'<span class="key">{name}<b>{value}</b></span>')
    note = f'<span class="note">{escape(chart.note)}</span>' if chart.note else ""
    return "".join(items) + note


def _in_words(line: Line, chart: Chart) -> str:
    (x0, y0), (x1, y1) = line.points[0], line.points[-1]
    if line.reference:
        return f"{line.name} at {figure(y1, chart.unit)}"
    start, end = figure(y0, chart.unit), figure(y1, chart.unit)
    return f"{line.name} from {start} at {chart.place(x0)} to {end} at {chart.place(x1)}"


def _data(lines: Sequence[Line], chart: Chart, scale: _Scale) -> str:
    value = {
        "unit": chart.unit,
        "name": chart.x_name,
        "ticks": {f"{x:.10g}": label for x, label in chart.x_ticks},
        "x": [scale.x0, scale.x1],
        "y": [scale.y0, scale.y1],
        "lines": [
            {
                "name": line.name,
                "tone": 0 if line.reference else line.tone,
                "x": [float(f"{x:.10g}") for x, _ in points],
                "y": [float(f"{y:.4g}") for _, y in points],
            }
            for line in lines
            for points in [[line.mark, *line.points] if line.mark else line.points]
        ],
    }
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
