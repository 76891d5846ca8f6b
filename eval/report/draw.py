"""Curves as inline SVG with their labels as text, so that they stay legible from phone to wall.

The drawing stretches with the page (``preserveAspectRatio="none"``, strokes that do not scale); axis labels are
ordinary text placed by percentages. Each chart carries its points for the read-out that ``report.js`` shows under
the pointer or the arrow keys; without scripts the chart is complete.
"""

import base64
import binascii
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from pathlib import Path

from clipkit.errors import DataError
from eval.results.records import Example, Matrix, Picture, Query, Snapshot

__all__ = [
    "Bar",
    "Chart",
    "ChartLine",
    "Dot",
    "PictureBook",
    "Section",
    "difference_bars",
    "downsample",
    "draw",
    "example_card",
    "examples",
    "figure",
    "matrices",
    "number",
    "page",
    "queries",
    "ranked_bars",
    "scatter",
    "scrolling",
    "signed",
    "smooth",
    "write_page",
]

POINTS = 400  # buckets of a long curve: about one for each pixel column of a phone
_SPAN = 1000.0  # side of the drawing's own coordinates
_LABEL_ROOM = 12.0  # percent of the height that a label takes

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class ChartLine:
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
    lines: Sequence[ChartLine]
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


def _band(line: ChartLine, scale: _Scale) -> str:
    edge = [(x, high) for x, _, high in line.band] + [(x, low) for x, low, _ in reversed(line.band)]
    return f'<polygon class="band t{line.tone}" points="{_points(edge, scale)}"/>'


def _path(line: ChartLine, scale: _Scale) -> str:
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


def _reference_label(line: ChartLine, scale: _Scale, ends: Sequence[float]) -> str:
    """The name of a level at its right end, on the side where no other line ends close by."""
    top = scale.top(line.points[-1][1])
    crowded = any(top - _LABEL_ROOM < end <= top for end in ends)
    under = top < _LABEL_ROOM or (crowded and top < 100 - _LABEL_ROOM)
    side = " under" if under else ""
    return f'<span class="rt{side}" style="top:{top:.2f}%">{escape(line.name)}</span>'


def _key(lines: Sequence[ChartLine], chart: Chart) -> str:
    shown = [line for line in lines if not line.reference]
    items = []
    for line in shown:
        value = escape(line.summary or figure(line.points[-1][1], chart.unit))
        kind = f"t{line.tone}{' dashed' if line.dashed else ''}"
        name = f'<i class="{kind}"></i>{escape(line.name)} ' if len(shown) > 1 else ""
        items.append(f'<span class="key">{name}<b>{value}</b></span>')
    note = f'<span class="note">{escape(chart.note)}</span>' if chart.note else ""
    return "".join(items) + note


def _in_words(line: ChartLine, chart: Chart) -> str:
    (x0, y0), (x1, y1) = line.points[0], line.points[-1]
    if line.reference:
        return f"{line.name} at {figure(y1, chart.unit)}"
    start, end = figure(y0, chart.unit), figure(y1, chart.unit)
    return f"{line.name} from {start} at {chart.place(x0)} to {end} at {chart.place(x1)}"


def _data(lines: Sequence[ChartLine], chart: Chart, scale: _Scale) -> str:
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


# --------------------------------------------------------------------------------------------------------------
# Bars and dots in plain HTML: models by score, differences by dataset, score against cost.

_LABEL = (4.5, 7.0)  # room of a dot's number in percent of the width and height
_SIDES = (
    (1.0, 0.0),
    (-1.0, 0.0),
    (0.0, -1.0),
    (0.0, 1.0),
    (1.0, -1.0),
    (-1.0, -1.0),
    (1.0, 1.0),
    (-1.0, 1.0),
)


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A named value; ``note`` is told with it, ``muted`` for one that is there to compare with."""

    name: str
    value: float
    note: str = ""
    muted: bool = False


@dataclass(frozen=True, kw_only=True)
class Dot:
    """A named point; ``x`` above 0."""

    name: str
    x: float
    y: float
    tone: int = 1


def ranked_bars(title: str, bars: Sequence[Bar], *, note: str = "") -> str:
    """Shares in 0 … 1 as bars, the greatest first; "" if there is none."""
    if not bars:
        return ""
    rows = "".join(
        f'<li{" class=muted" if bar.muted else ""}><span class="name" title="{escape(bar.name)}">{escape(bar.name)}'
        f"{_small(bar.note)}</span>"
        f'<span class="track"><i style="width:{100 * min(1.0, max(0.0, bar.value)):.2f}%"></i></span>'
        f'<span class="v">{100 * bar.value:.1f}</span></li>'
        for bar in sorted(bars, key=lambda bar: -bar.value)
    )
    return f'<figure class="bars">{_caption(title, note)}<ol>{rows}</ol></figure>'


def difference_bars(title: str, bars: Sequence[Bar], *, limits: tuple[float, float], note: str = "") -> str:
    """Differences in -1 … 1 on both sides of a line at 0, the greatest first; "" if there is none.

    ``limits`` are the least and greatest value of all figures that are to have one scale.
    """
    if not bars:
        return ""
    low, high = min(0.0, limits[0]), max(0.0, limits[1])
    span = (high - low) or 1.0
    rows = []
    for bar in sorted(bars, key=lambda bar: -bar.value):
        left, width = 100 * (min(0.0, bar.value) - low) / span, 100 * abs(bar.value) / span
        side = "up" if bar.value >= 0 else "down"
        rows.append(
            f'<li class="{side}"><span class="name" title="{escape(bar.name)}">{escape(bar.name)}{_small(bar.note)}'
            f'</span><span class="track"><i style="left:{left:.2f}%;width:{width:.2f}%"></i></span>'
            f'<span class="v">{signed(bar.value)}</span></li>'
        )
    zero = 100 * abs(low) / span
    return (
        f'<figure class="bars diffs" style="--zero:{zero:.2f}%">{_caption(title, note)}'
        f"<ol>{''.join(rows)}</ol></figure>"
    )


def signed(share: float) -> str:
    """A difference of shares in points, with its sign."""
    return f"{100 * share:+.1f}".replace("-", "−").replace("+0.0", "0.0").replace("−0.0", "0.0")


def scatter(title: str, dots: Sequence[Dot], *, x_unit: str, note: str = "") -> str:
    """Shares in 0 … 1 against x on a logarithmic scale, the best up to each x joined; "" if there is no dot."""
    if not dots:
        return ""
    logs = [math.log10(dot.x) for dot in dots]
    left, right = min(logs) - 0.12, max(logs) + 0.12
    best, worst = max(dot.y for dot in dots), min(dot.y for dot in dots)
    step = 0.05 if best - worst < 0.3 else 0.1
    bottom = max(0.0, math.floor(worst / step - 0.2) * step)
    top = min(1.0, math.ceil(best / step + 0.2) * step)

    def place(dot: Dot) -> tuple[float, float]:
        return 100 * (math.log10(dot.x) - left) / (right - left), 100 * (top - dot.y) / (top - bottom)

    order = sorted(dots, key=lambda dot: (dot.x, -dot.y))
    places = [place(dot) for dot in order]
    marks = []
    for i, (dot, (x, y), (lx, ly)) in enumerate(
        zip(order, places, _label_places(places), strict=True), start=1
    ):
        marks.append(
            f'<i class="dot t{dot.tone}" style="left:{x:.2f}%;top:{y:.2f}%" '
            f'title="{escape(_dot_text(dot, x_unit))}"></i>'
            f'<b class="nr" style="left:{lx:.2f}%;top:{ly:.2f}%" aria-hidden="true">{i}</b>'
        )
    lines = round((top - bottom) / step)
    levels = [(bottom + i * step, 100 - 100 * i / lines) for i in range(lines + 1)]
    grid = "".join(f"M0 {10 * y:.1f}H1000" for _, y in levels)
    drawing = (
        f'<path class="grid" d="{grid}"/><polyline class="reference" points="{_best_so_far(order, places)}"/>'
    )
    labels = "".join(
        f'<span class="yt" style="top:{y:.2f}%">{100 * value:.0f}%</span>' for value, y in levels
    )
    labels += "".join(
        f'<span class="xt" style="left:{100 * (math.log10(x) - left) / (right - left):.2f}%">{number(x)}</span>'
        for x in _log_ticks(10**left, 10**right)
    )
    key = "".join(
        f'<li><i class="t{dot.tone}"></i><span class="name">{escape(dot.name)}</span>'
        f"<span>{number(dot.x)} {escape(x_unit.split()[0])}</span><b>{100 * dot.y:.1f}</b></li>"
        for dot in order
    )
    said = "; ".join(_dot_text(dot, x_unit) for dot in order)
    return (
        f'<figure class="chart wide scatter">{_caption(title, note)}'
        f'<div class="plot" role="img" aria-label="{escape(f"{title}: {said}")}">'
        f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" aria-hidden="true">{drawing}</svg>'
        f'{labels}<span class="xu">{escape(x_unit)}</span>{"".join(marks)}</div>'
        f'<ol class="numbered">{key}</ol></figure>'
    )


def _dot_text(dot: Dot, unit: str) -> str:
    return f"{dot.name}, {number(dot.x)} {unit}, {100 * dot.y:.1f}%"


def _caption(title: str, note: str) -> str:
    said = f'<span class="note">{escape(note)}</span>' if note else ""
    return f"<figcaption><b>{escape(title)}</b>{said}</figcaption>"


def _small(note: str) -> str:
    return f" <small>{escape(note)}</small>" if note else ""


def _best_so_far(order: Sequence[Dot], places: Sequence[tuple[float, float]]) -> str:
    points, best = [], -math.inf
    for dot, (x, y) in zip(order, places, strict=True):
        if dot.y > best:
            points.append(f"{10 * x:.1f},{10 * y:.1f}")
            best = dot.y
    return " ".join(points)


def _label_places(places: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Beside each dot, on the first side where neither a dot nor another number stands."""
    taken = list(places)
    out = []
    for x, y in places:
        sides = [(x + dx * _LABEL[0] * 0.75, y + dy * _LABEL[1]) for dx, dy in _SIDES]
        free = (
            one
            for one in sides
            if 1 <= one[0] <= 99 and 2 <= one[1] <= 98 and not _crowded(one, taken, (x, y))
        )
        chosen = next(free, sides[0])
        taken.append(chosen)
        out.append(chosen)
    return out


def _crowded(
    spot: tuple[float, float], taken: Sequence[tuple[float, float]], own: tuple[float, float]
) -> bool:
    return any(
        abs(spot[0] - x) < _LABEL[0] * 0.7 and abs(spot[1] - y) < _LABEL[1] * 0.9
        for x, y in taken
        if (x, y) != own
    )


def _log_ticks(low: float, high: float) -> list[float]:
    """Round numbers within low … high: powers of ten, with more between them where these are few."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
        ticks = [factor * 10.0**exponent for exponent in exponents for factor in factors]
        inside = [tick for tick in ticks if low <= tick <= high]
        if len(inside) >= 3:
            break
    return inside


# --------------------------------------------------------------------------------------------------------------
# The parts of the report that show pictures: example predictions, similarity matrices, nearest pictures.
#
# Each distinct picture is in the page once, as a rule of its style sheet, however often it is shown.

_PNG = b"\x89PNG\r\n\x1a\n"
_BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")
_TINY = 16  # pixels; a picture up to this size is shown with its pixels, not blurred
_SHOWN_LABELS = 5
_LEAST_RANGE = (
    0.2  # of cosines over the shades: before a model has learned, its noise shall not look like more
)


class PictureBook:
    """The distinct pictures of a page."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._tiny: set[str] = set()

    def show(self, pictures: Mapping[str, Picture], name: str, *, more: str = "") -> str:
        """A picture as an element; ``more`` is added to its alternative text. A missing one is an empty frame."""
        picture = pictures.get(name)
        alt = escape(f"{picture.alt if picture else 'missing picture'}{more}")
        if picture is None or not self._add(picture.png):
            return f'<i class="pic none" role="img" aria-label="{alt}" title="{alt}"></i>'
        tiny = " tiny" if picture.png in self._tiny else ""
        kind = f"pic p{self._numbers[picture.png]}{tiny}"
        return f'<i class="{kind}" role="img" aria-label="{alt}" title="{alt}"></i>'

    def _add(self, png: str) -> bool:
        """Whether this is a PNG in base64 and nothing else: it goes into a style sheet as it is."""
        if png in self._numbers:
            return True
        if not _BASE64.fullmatch(png):
            return False
        try:
            data = base64.b64decode(png, validate=True)
        except binascii.Error:
            return False
        if len(data) < 24 or not data.startswith(_PNG):
            return False
        sides = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
        if max(sides) <= _TINY:
            self._tiny.add(png)
        self._numbers[png] = len(self._numbers)
        return True

    @property
    def size(self) -> int:
        """How many letters its pictures make."""
        return sum(map(len, self._numbers))

    def style(self) -> str:
        """The rules that carry the pictures."""
        return "\n".join(
            f".p{i}{{background-image:url(data:image/png;base64,{png})}}" for png, i in self._numbers.items()
        )


def examples(snapshots: Sequence[Snapshot], book: PictureBook) -> str:
    """Predictions of the last snapshot, each with its rank through the snapshots before."""
    last = snapshots[-1]
    cards = [
        example_card(one, last.classes, last.pictures, book, ranks=_ranks(one.picture, snapshots))
        for one in last.examples
    ]
    return f'<div class="examples">{"".join(cards)}</div>' if cards else ""


def _ranks(picture: str, snapshots: Sequence[Snapshot]) -> list[tuple[int, int]]:
    return [
        (snapshot.step, one.rank)
        for snapshot in snapshots
        for one in snapshot.examples
        if one.picture == picture and one.rank is not None
    ]


def example_card(
    one: Example,
    classes: int,
    pictures: Mapping[str, Picture],
    book: PictureBook,
    *,
    ranks: Sequence[tuple[int, int]] = (),
    cosines: bool = False,
) -> str:
    """A picture with its likeliest labels and the true one's rank.

    Args:
        one: the example.
        classes: how many labels there are.
        pictures: by their names.
        book: of the page.
        ranks: (step, rank) of a training.
        cosines: whether labels are captions, and their numbers similarities rather than probabilities.
    """
    told, whose = (_cosine, "a caption of the picture") if cosines else (_percent_text, "the true label")
    rows = [
        _bar(guess.label, guess.probability, whose if guess.right else "", told)
        for guess in one.guesses[:_SHOWN_LABELS]
    ]
    if one.truth is not None and one.probability is not None and not any(g.right for g in one.guesses):
        last = _bar(one.truth, one.probability, whose, told)
        rows.append(f'<li class="gap" aria-hidden="true">⋯</li>{last}')
    rank = ""
    if one.rank is not None:
        rank = f'<span class="rank">rank <b>{number(one.rank)}</b> of {number(classes)}</span>'
    history = ""
    if len(ranks) > 1:
        steps = "".join(
            f'<span title="step {number(step)}"{" class=best" if value == 1 else ""}>{value}</span>'
            for step, value in ranks
        )
        history = f'<p class="history">ranks {steps}</p>'
    return (
        f'<article class="example"><header>{book.show(pictures, one.picture)}'
        f"<div><h4>{escape(one.truth or 'unlabelled')}</h4>{rank}</div></header>"
        f"<ol>{''.join(rows)}</ol>{history}</article>"
    )


def _bar(label: str, value: float, whose: str, told: Callable[[float], str]) -> str:
    """A label with its number; ``whose`` says of a right one what it is."""
    share, text = min(1.0, max(0.0, value)), escape(label)
    mark = f'<span class="tick" title="{whose}">✓</span>' if whose else ""
    return (
        f'<li class="{"right" if whose else "wrong"}"><span class="label" title="{text}">{mark}{text}</span>'
        f'<span class="p">{told(value)}</span><i style="--p:{share:.4f}"></i></li>'
    )


def _cosine(value: float) -> str:
    return f"{value:.3f}".replace("-", "−")


def _percent_text(value: float) -> str:
    if 0 < value < 0.0005:
        return "&lt;0.1%"
    return f"{value * 100:.1f}%"


def matrices(snapshots: Sequence[Snapshot], book: PictureBook) -> str:
    """The similarity matrix at the first and at the last snapshot, on one scale of shades."""
    having = [snapshot for snapshot in snapshots if snapshot.matrix]
    if not having:
        return ""
    shown = having if len(having) == 1 else [having[0], having[-1]]
    levels = [
        value - _level(one.matrix)
        for one in shown
        if one.matrix
        for row in one.matrix.cosines
        for value in row
    ]
    low, high = min(levels), max(levels)
    high = max(high, low + _LEAST_RANGE)
    drawn = [_matrix(one, one.matrix, low, high, book) for one in shown if one.matrix]
    last = having[-1]
    assert last.matrix
    captions = "".join(
        f"<li>{book.show(last.pictures, picture)}<span>{escape(caption)}</span></li>"
        for picture, caption in zip(last.matrix.pictures, last.matrix.captions, strict=True)
    )
    scale = (
        f'<p class="shades"><span>{_signed(low)}</span><i></i><span>{_signed(high)}</span>'
        f"<span>cosine above the mean of the pairs that do not belong together"
        f"{'; one scale for both' if len(shown) > 1 else ''}</span></p>"
    )
    return f'<div class="matrices">{"".join(drawn)}</div>{scale}<ol class="captions">{captions}</ol>'


def _level(matrix: Matrix) -> float:
    """The mean cosine of pairs that do not belong together.

    It drifts during a training without any effect on the loss, so shades are told from it.
    """
    size = len(matrix.pictures)
    other = [matrix.cosines[i][j] for i in range(size) for j in range(size) if i != j]
    return sum(other) / len(other) if other else 0.0


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−")


def _matrix(snapshot: Snapshot, matrix: Matrix, low: float, high: float, book: PictureBook) -> str:
    size = len(matrix.pictures)
    level = _level(matrix)
    cells = []
    for row, picture in enumerate(matrix.pictures):
        cells.append(book.show(snapshot.pictures, picture))
        for column in range(size):
            value = matrix.cosines[row][column]
            shade = (value - level - low) / (high - low)
            kind = ' class="d"' if row == column else ""
            title = escape(f"picture {row + 1} × “{matrix.captions[column]}”: {value:.2f}")
            cells.append(f'<b{kind} style="--s:{shade:.3f}" title="{title}"></b>')
    heads = "<span></span>" + "".join(f"<span>{i + 1}</span>" for i in range(size))
    same = [matrix.cosines[i][i] for i in range(size)]
    hits = sum(matrix.cosines[i][i] >= max(matrix.cosines[i]) for i in range(size))
    said = f"{hits} of {size} pictures nearest to their own caption; mean cosine {sum(same) / size:.2f}"
    if size > 1:
        said += f" for pairs, {level:.2f} for others"
    return (
        f'<figure class="matrix"><figcaption><b>Step {number(snapshot.step)}</b></figcaption>'
        f'<div class="cells" role="img" aria-label="{escape(said)}" style="--n:{size}">'
        f"{heads}{''.join(cells)}</div><p>{said}</p></figure>"
    )


def queries(snapshots: Sequence[Snapshot], book: PictureBook) -> str:
    """The pictures nearest to each query, a frame for each snapshot."""
    texts = list(dict.fromkeys(query.text for snapshot in snapshots for query in snapshot.queries))
    strips = []
    for text in texts:
        frames = [
            _frame(snapshot, query, book)
            for snapshot in snapshots
            for query in snapshot.queries
            if query.text == text
        ]
        strips.append(
            f'<article class="strip"><h4>{escape(text)}</h4><div class="frames">{"".join(frames)}</div></article>'
        )
    return "".join(strips)


def _frame(snapshot: Snapshot, query: Query, book: PictureBook) -> str:
    hits = []
    for hit in query.hits:
        said = {True: ", right", False: ", wrong", None: ""}[hit.right]
        kind = {True: "right", False: "wrong", None: "unknown"}[hit.right]
        tick = '<span class="tick" aria-hidden="true">✓</span>' if hit.right else ""
        picture = book.show(snapshot.pictures, hit.picture, more=f" ({hit.cosine:.2f}{said})")
        hits.append(f'<li class="{kind}">{picture}{tick}</li>')
    judged = [hit.right for hit in query.hits if hit.right is not None]
    score = f"<span>{sum(judged)} of {len(judged)}</span>" if judged else ""
    return (
        f'<section class="frame"><h5>step {number(snapshot.step)}{score}</h5>'
        f'<ol class="hits">{"".join(hits)}</ol></section>'
    )


# --------------------------------------------------------------------------------------------------------------
# The frame of every page: one file that carries styles, script and pictures in itself, and asks for nothing.
#
# The page's own security policy forbids what is not inside. All text that comes from data is escaped by those
# who make the sections.

_HERE = Path(__file__).parent
_SHOWN = 200  # characters of a path in a message


@dataclass(frozen=True, kw_only=True)
class Section:
    """A titled part of the page; one without content is left out."""

    name: str
    title: str
    content: str
    lead: str = ""

    def html(self) -> str:
        """The section as an element."""
        lead = f'<p class="lead">{self.lead}</p>' if self.lead else ""
        return f'<section id="{self.name}"><h2>{self.title}</h2>{lead}{self.content}</section>\n'


def page(
    title: str, head: str, sections: Sequence[Section], book: PictureBook, *, styles: Sequence[str] = ()
) -> str:
    """A whole page.

    Args:
        title: plain text; "clipkit" is added.
        head: what stands above the links to the sections, as HTML.
        sections: in order.
        book: the pictures that head and sections show.
        styles: style sheets beside ``page.css``, by their file names.
    """
    shown = [section for section in sections if section.content]
    links = "".join(f'<a href="#{section.name}">{section.title}</a>' for section in shown)
    body = "".join(section.html() for section in shown)
    style = "\n".join((_HERE / name).read_text(encoding="utf-8") for name in ("page.css", *styles))
    script = (_HERE / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)} – clipkit</title>\n"
        f"<style>\n{style}\n{book.style()}\n</style></head>\n"
        f'<body><main>{head}<nav aria-label="Sections">{links}</nav>\n{body}</main>\n'
        f"<script>{script}</script></body></html>\n"
    )


def write_page(out: Path, text: str) -> Path:
    """Write a page or table, which appears whole or not at all; into a pipe or device it goes as it comes.

    Raises:
        DataError: it cannot be written.
    """
    # a caption may hold half of a surrogate pair, which UTF-8 cannot carry
    data = text.encode("utf-8", errors="replace")
    aside = None
    try:
        real = out.resolve()  # what a link leads to is written, and the link stays
        if real.exists() and not real.is_file():  # such as /dev/null, in whose place no file may come
            real.write_bytes(data)
            return out
        aside = real.with_name(f".{os.getpid()}.partial")  # short, as the name may be as long as any can be
        real.parent.mkdir(parents=True, exist_ok=True)
        aside.write_bytes(data)
        aside.replace(real)
    except (OSError, RuntimeError, ValueError) as error:  # a link to itself; a null character
        if aside is not None:
            with suppress(OSError):
                aside.unlink(missing_ok=True)
        said = error.strerror if isinstance(error, OSError) else str(error)
        raise DataError(f"cannot write {str(out)[:_SHOWN]}: {said}") from error
    return out


def scrolling(label: str, content: str, *, kind: str = "") -> str:
    """Something wide, in a frame that scrolls sideways and that the keyboard reaches."""
    name = f"scroll {kind}".strip()
    return f'<div class="{name}" tabindex="0" role="region" aria-label="{escape(label)}">{content}</div>'
