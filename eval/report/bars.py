"""Bars and dots in plain HTML: models by score, differences by dataset, score against cost."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from eval.report.charts import number

__all__ = ["Bar", "Dot", "difference_bars", "ranked_bars", "scatter", "signed"]

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
            f'title="{escape(_told(dot, x_unit))}"></i>'
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
    said = "; ".join(_told(dot, x_unit) for dot in order)
    return (
        f'<figure class="chart wide scatter">{_caption(title, note)}'
        f'<div class="plot" role="img" aria-label="{escape(f"{title}: {said}")}">'
        f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" aria-hidden="true">{drawing}</svg>'
        f'{labels}<span class="xu">{escape(x_unit)}</span>{"".join(marks)}</div>'
        f'<ol class="numbered">{key}</ol></figure>'
    )


def _told(dot: Dot, unit: str) -> str:
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
