"""Charts as inline SVG and HTML, thumbnails, and numbers as text; the markup is in ``templates/charts.html``.

Drawings stretch with the page (``preserveAspectRatio="none"``, strokes that do not scale). Labels are HTML text
placed in percent, so they are legible at any width. Each chart carries its points as JSON for the read-out by
pointer or arrow keys (``report.js``), and is complete without scripts.
"""

import base64
import binascii
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from clipkit.files import templates
from eval.metrics import metric_title
from eval.results.records import Thumbnail

TEMPLATES = templates(Path(__file__).with_name("templates"))
TONES = 8  # colors of lines and dots
POINTS = 400  # buckets of a long curve: about one per pixel column of a phone
_LABEL_ROOM = 12.0  # height of a reference label, in percent of the chart
_NUMBER = (4.5, 7.0)  # width and height of a dot's number, in percent of the chart
_SIDES = ((1, 0), (-1, 0), (0, -1), (0, 1), (1, -1), (-1, -1), (1, 1), (-1, 1))
_TINY = 16  # pixels; images up to this size are enlarged without smoothing

Point = tuple[float, float]


def load_macro(file: str, name: str) -> Callable[..., Markup]:
    """Return a macro of a template."""
    function: Callable[..., Markup] = getattr(TEMPLATES.get_template(file).module, name)
    return function


def format_number(value: float) -> str:
    """Format a number with thousands separators and three significant digits."""
    size = abs(value)
    if size >= 1e15 or not math.isfinite(value):
        return f"{value:.3g}"
    if size >= 999.5 or value == int(value):
        return f"{value:,.0f}"
    if size >= 0.001:
        text = f"{value:.{max(0, 2 - math.floor(math.log10(size)))}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    return _format_scientific(value)


def _format_scientific(value: float) -> str:
    mantissa, exponent = f"{value:.2e}".split("e")
    power = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{mantissa.rstrip('0').rstrip('.')}×10{power}"


def format_value(value: float, unit: str) -> str:
    """Format a number with its unit; percentages have the same digits everywhere on the page."""
    if unit != "%":
        return f"{format_number(value)}{unit}"
    return f"{value:.2f}%" if 0 < value < 0.995 else f"{value:.1f}%"


def format_points(fraction: float) -> str:
    """Format a difference of fractions in percentage points, with its sign."""
    return f"{100 * fraction:+.1f}".replace("-", "−").replace("+0.0", "0.0").replace("−0.0", "0.0")


def _format_duration(seconds: float) -> str:
    for limit, length, unit in ((90, 1, "seconds"), (5400, 60, "minutes"), (172_800, 3600, "hours")):
        if seconds < limit:
            return f"{format_number(round(seconds / length, 1))} {unit}"
    return f"{format_number(round(seconds / 86_400, 1))} days"


def format_field(value: object) -> str:
    """Format a value of a results line."""
    if value is None:
        return ""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {format_field(part)}" for key, part in value.items())
    if isinstance(value, float):
        return format_number(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


TEMPLATES.filters |= {
    "metric_name": metric_title,
    "number": format_number,
    "figure": format_value,
    "signed": format_points,
    "duration": _format_duration,
    "value": format_field,
    "percent": lambda value: "<0.1%" if 0 < value < 0.0005 else f"{value * 100:.1f}%",
    "minus": lambda text: text.replace("-", "−"),
}


def smooth_points(points: Sequence[Point], window: float) -> list[Point]:
    """Average exponentially over about ``window`` points, corrected for the bias toward the first."""
    keep = 1 - 1 / max(1.0, window)
    mean = weight = 0.0
    out = []
    for x, y in points:
        mean = keep * mean + (1 - keep) * y
        weight = keep * weight + (1 - keep)
        out.append((x, mean / weight))
    return out


def downsample_points(
    points: Sequence[Point], count: int = POINTS
) -> list[tuple[float, float, float, float]]:
    """Summarize points in at most ``count`` buckets (x, last, low, high), which keep every peak."""
    buckets = min(count, len(points))
    out = []
    for i in range(buckets):
        inside = points[i * len(points) // buckets : (i + 1) * len(points) // buckets]
        values = [y for _, y in inside]
        out.append((inside[-1][0], values[-1], min(values), max(values)))
    return out


@dataclass(frozen=True, kw_only=True)
class Headline:
    """A score in large type: ``figure`` is its value as text without the unit ("%" or "").

    A gauge shows ``value``, ``interval`` and ``chance`` in [0, 1], if ``value`` is not None.
    """

    what: str
    dataset: str = ""
    figure: str
    unit: str = "%"
    details: Sequence[str]
    value: float | None
    interval: tuple[float, float] | None = None
    chance: float | None = None


class Thumbnails:
    """The distinct images of a page, each a rule of its style sheet."""

    def __init__(self) -> None:
        self._classes: dict[str, str] = {}

    def css_class(self, image: Thumbnail | None) -> str:
        """Add an image and return its CSS class; "none" if it is missing or not a PNG."""
        if image is None:
            return "none"
        if image.png not in self._classes:  # it goes into a style sheet: allow nothing but a base64 PNG
            try:
                valid = re.fullmatch(r"[A-Za-z0-9+/]+={0,2}", image.png)
                data = base64.b64decode(image.png, validate=True) if valid else b""
            except binascii.Error:
                data = b""
            if len(data) < 24 or not data.startswith(b"\x89PNG\r\n\x1a\n"):
                return "none"
            tiny = max(int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")) <= _TINY
            self._classes[image.png] = f"p{len(self._classes)}{' tiny' if tiny else ''}"
        return self._classes[image.png]

    @property
    def size(self) -> int:
        """The total number of characters of all images."""
        return sum(map(len, self._classes))

    @property
    def rules(self) -> list[tuple[str, str]]:
        return [(name.split()[0], png) for png, name in self._classes.items()]


@dataclass(frozen=True, kw_only=True)
class ChartLine:
    """One line of a chart.

    Args:
        points: (x, y) in order of x.
        band: (x, low, high), shaded behind the line.
        reference: a level for comparison: dashed and labelled on the chart.
        tone: color of the palette, from 1.
        dots: mark each point (for curves of few points).
        mark: a point in the same color, not joined to the line.
        dashed: for lines beyond the palette's colors.
        thin: for lines of other runs, which are always named.
        summary: shown in the caption instead of the last value.
    """

    name: str
    points: Sequence[Point]
    band: Sequence[tuple[float, float, float]] = ()
    reference: bool = False
    tone: int = 1
    dots: bool = False
    mark: Point | None = None
    dashed: bool = False
    thin: bool = False
    summary: str | None = None

    @property
    def read_out(self) -> dict[str, Any]:
        """The points for the read-out by pointer or arrow keys."""
        points = [self.mark, *self.points] if self.mark else self.points
        return {
            "name": self.name,
            "tone": 0 if self.reference else self.tone,
            "x": [float(f"{x:.10g}") for x, _ in points],
            "y": [float(f"{y:.4g}") for _, y in points],
        }


@dataclass(frozen=True, kw_only=True)
class _Scale:
    """Maps values to the drawing's coordinates, 0–1000, and to percent."""

    x0: float
    x1: float
    y0: float
    y1: float

    def left(self, value: float) -> float:
        return 100 * ((value - self.x0) / (self.x1 - self.x0) if self.x1 > self.x0 else 0.5)

    def top(self, value: float) -> float:
        return 100 * ((self.y1 - value) / (self.y1 - self.y0) if self.y1 > self.y0 else 0.5)

    def points(self, points: Sequence[Point]) -> str:
        return " ".join(f"{10 * self.left(x):.1f},{10 * self.top(y):.1f}" for x, y in points)

    def dots(self, points: Sequence[Point]) -> str:
        return "".join(f"M{10 * self.left(x):.1f} {10 * self.top(y):.1f}h0" for x, y in points)

    def line(self, line: ChartLine) -> str:
        """Format a line's points; a constant reference line reaches from side to side."""
        points = list(line.points)
        if line.reference and points[0][1] == points[-1][1]:
            points = [(self.x0, points[0][1]), *points, (self.x1, points[-1][1])]
        return self.points(points)

    def band(self, line: ChartLine) -> str:
        upper = [(x, high) for x, _, high in line.band]
        return self.points([*upper, *((x, low) for x, low, _ in reversed(line.band))])


def draw_chart(
    title: str,
    lines: Sequence[ChartLine],
    *,
    unit: str = "",
    note: str = "",
    floor: float | None = None,
    ceiling: float | None = None,
    wide: bool = False,
    x_name: str = "step",
    x_ticks: Sequence[tuple[float, str]] = (),
    x_labels: Mapping[float, str] | None = None,
    x_mark: tuple[float, str] | None = None,
) -> Markup:
    """Render a titled line chart as a ``figure``; empty if there is nothing to draw.

    The y axis includes ``floor`` and ``ceiling``. The x axis counts ``x_name``s, unless ``x_ticks`` lists all its
    positions and labels; ``x_labels`` are those of other values of x in the read-out. ``x_mark`` is a position that
    a vertical line marks, and its label.
    """
    lines = [line for line in lines if line.points]
    if all(line.reference for line in lines):
        return Markup()
    xs: list[float] = []
    ys = [y for y in (floor, ceiling) if y is not None]
    for line in lines:
        points = [*line.points, line.mark] if line.mark else line.points
        xs += [x for x, _ in points]
        ys += [y for _, y in points]
        for _, low, high in line.band:
            ys += [low, high]
    if x_mark is not None:
        xs.append(x_mark[0])
    low, high = min(ys), max(ys)
    # room on both sides of a constant line
    if high - low <= max(1e-9 * max(abs(low), abs(high)), 1e-15):
        pad = max(abs(high) * 0.05, 1e-6)
        low, high = low - pad, high + pad
    room = 0.0
    if any(line.mark for line in lines):
        room = 0.02 * (max(xs) - min(xs))
    scale = _Scale(x0=min(xs) - room, x1=max(xs), y0=low, y1=high)

    y_ticks = _choose_ticks(low, high)
    # if a number needs it, all are in scientific notation
    is_plain = all(tick == 0 or abs(tick) >= 0.001 for tick in y_ticks)
    y_texts = [format_number(y) if is_plain or y == 0 else _format_scientific(y) for y in y_ticks]
    labels = {**(x_labels or {}), **dict(x_ticks)}
    if not x_ticks:
        steps = [x for x in _choose_ticks(scale.x0, scale.x1) if x == int(x)] if scale.x1 > scale.x0 else []
        x_ticks = [(x, format_number(x)) for x in steps or [scale.x0]]
        x_ticks[-1] = x_ticks[-1][0], f"{x_ticks[-1][1]} {x_name}s"
    positions = []
    for x, label in x_ticks:
        if scale.x0 <= x <= scale.x1:
            left = scale.left(x)
            positions.append((left, "first" if left < 6 else "last" if left > 90 else "", label))

    ends = [scale.top(line.points[-1][1]) for line in lines if not line.reference]
    references = []
    words = []
    for line in lines:
        (x0, y0), (x1, y1) = line.points[0], line.points[-1]
        if line.reference:
            # the label is on the side of the line where no other line ends nearby
            top = scale.top(y1)
            is_crowded = any(top - _LABEL_ROOM < end <= top for end in ends)
            below = top < _LABEL_ROOM or (is_crowded and top < 100 - _LABEL_ROOM)
            references.append((top, below, line.name))
            words.append(f"{line.name} at {format_value(y1, unit)}")
        else:
            start, end = (f"{x_name} {labels.get(x) or format_number(x)}" for x in (x0, x1))
            words.append(
                f"{line.name} from {format_value(y0, unit)} at {start} to {format_value(y1, unit)} at {end}"
            )
    read_out = {
        "unit": unit,
        "name": x_name,
        "ticks": {f"{x:.10g}": label for x, label in labels.items()},
        "x": [scale.x0, scale.x1],
        "y": [scale.y0, scale.y1],
        "lines": [line.read_out for line in lines],
    }
    return load_macro("charts.html", "chart")(
        title,
        lines,
        scale,
        unit=unit,
        note=note,
        wide=wide,
        y_ticks=[(scale.top(y), text + unit) for y, text in zip(y_ticks, y_texts, strict=True)],
        x_ticks=positions,
        references=references,
        mark=None if x_mark is None else (scale.left(x_mark[0]), x_mark[1]),
        words=f"{title}: {'; '.join(words)}",
        data=json.dumps(read_out, ensure_ascii=False, separators=(",", ":")),
    )


TEMPLATES.globals["draw_chart"] = draw_chart


def _choose_ticks(low: float, high: float) -> list[float]:
    """List round numbers within low … high, in about four steps."""
    rough = (high - low) / 4
    power: float = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = (float(f"{i * step:.10g}") for i in range(first, last + 1))
    room = 1e-9 * (high - low)
    return [tick for tick in ticks if low - room <= tick <= high + room]


def choose_log_ticks(low: float, high: float) -> list[float]:
    """List powers of ten from 10**low to 10**high, and numbers between them if these are few."""
    exponents = range(math.floor(low), math.ceil(high) + 1)
    ticks: list[float] = []
    for factors in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
        every = [factor * 10.0**exponent for exponent in exponents for factor in factors]
        ticks = [tick for tick in every if 10**low <= tick <= 10**high]
        if len(ticks) >= 3:
            break
    return ticks


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A named value with a note; ``muted`` for values shown for comparison.

    ``reference`` is a published difference, which ``difference_bars`` marks.
    """

    name: str
    value: float
    note: str = ""
    muted: bool = False
    reference: float | None = None


@dataclass(frozen=True, kw_only=True)
class Dot:
    """A named point; ``x`` above 0."""

    name: str
    x: float
    y: float
    tone: int = 1


def draw_scatter(
    title: str,
    dots: Sequence[Dot],
    *,
    lines: Sequence[tuple[Dot, Dot, bool]] = (),
    x_unit: str,
    note: str = "",
) -> Markup:
    """Render at least one fraction in [0, 1] over a logarithmic x axis.

    ``lines`` join two dots each, dashed or not; without lines, the best dots up to each x are joined.
    """
    logs = [math.log10(dot.x) for dot in dots]
    best, worst = max(dot.y for dot in dots), min(dot.y for dot in dots)
    step = 0.05 if best - worst < 0.3 else 0.1
    bottom = max(0.0, math.floor(worst / step - 0.2) * step)
    top = min(1.0, math.ceil(best / step + 0.2) * step)
    scale = _Scale(x0=min(logs) - 0.12, x1=max(logs) + 0.12, y0=bottom, y1=top)
    order = sorted(dots, key=lambda dot: (dot.x, -dot.y))
    positions = [(scale.left(math.log10(dot.x)), scale.top(dot.y)) for dot in order]
    frontier = [dot for i, dot in enumerate(order) if all(dot.y > other.y for other in order[:i])]
    ticks = choose_log_ticks(scale.x0, scale.x1)
    # each dot's number is on the first side without a dot or another number
    width, height = _NUMBER
    occupied = list(positions)
    numbers = []
    for dot_x, dot_y in positions:
        sides = [(dot_x + dx * width * 0.75, dot_y + dy * height) for dx, dy in _SIDES]
        free = (
            (x, y)
            for x, y in sides
            if 1 <= x <= 99
            and 2 <= y <= 98
            and not any(
                abs(x - other[0]) < width * 0.7 and abs(y - other[1]) < height * 0.9
                for other in occupied
                if other != (dot_x, dot_y)
            )
        )
        numbers.append(next(free, sides[0]))
        occupied.append(numbers[-1])
    return load_macro("charts.html", "scatter")(
        title,
        list(zip(order, positions, numbers, strict=True)),
        [
            (scale.points([(math.log10(dot.x), dot.y) for dot in (first, last)]), last.tone, dashed)
            for first, last, dashed in lines
        ],
        scale.points([] if lines else [(math.log10(dot.x), dot.y) for dot in frontier]),
        x_ticks=[(scale.left(math.log10(x)), format_number(x)) for x in ticks],
        y_ticks=[bottom + i * step for i in range(round((top - bottom) / step) + 1)],
        scale=scale,
        x_unit=x_unit,
        note=note,
    )
