"""The figures over many datasets: who leads, zero-shot against a probe, score against cost, shots, layers."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eval.report.bars import Bar, Dot, difference_bars, ranked_bars, scatter
from eval.report.charts import Chart, Line, draw
from eval.report.result_set import ResultSet, Row
from eval.report.same_data import same_data
from eval.report.score_table import Average, ScoreTable
from eval.report.scores import PLAIN, is_share

__all__ = ["cost", "few_shot", "layers", "leaders", "probe_differences"]

_TONES = 8
_OPEN = 2  # figures of as many models are open; the others unfold
_SHOTS = re.compile(r"(\d{1,4})-shot\b[ ,]*(.*)")
_LAYER = re.compile(r"layer (\d{1,4})\b[ ,]*(.*)")
_MOST_SUITES = 4
_MOST_GFLOPS = 1e12  # what is more has been written wrongly, and has no place on an axis
_LABELS = 13  # of layers, on an axis as wide as a phone


def leaders(table: ScoreTable) -> str:
    """The models by their average over each suite; "" where there are less than two, or no averages."""
    if len(table.models) < 2:
        return ""
    figures = []
    for average in table.averages[:_MOST_SUITES]:
        bars = [
            Bar(name=model.label, value=value)
            for model, value in zip(table.models, average.cells, strict=True)
            if value is not None
        ]
        bars += [
            Bar(name=name, value=value, note="published", muted=True)
            for name, value in zip(table.published, average.published, strict=True)
            if value is not None
        ]
        figures.append(ranked_bars(_capital(average.title), bars, note=said_of(average)))
    return f'<div class="charts">{"".join(figures)}</div>' if figures else ""


def said_of(average: Average) -> str:
    """Over which datasets and tasks a mean is taken."""
    tasks = f", each by its main task ({average.task})" if len(average.tasks) > 1 else ""
    if average.over == average.of:
        return f"over all its {average.of} datasets{tasks}"
    missing = average.of - average.over
    are = "is" if missing == 1 else "are"
    whose = "all models that have any" if None in average.cells else "all models"
    return f"over {average.over} of {average.of} datasets{tasks}; {missing} {are} not there for {whose}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def probe_differences(results: ResultSet, zero_shot: ScoreTable, probe: ScoreTable | None) -> str:
    """Zero-shot minus linear probe by dataset, a figure a model (figure 5 of the CLIP paper); "" without probes."""
    if probe is None:
        return ""
    before = {(line.dataset, line.metric): line for line in zero_shot.lines if line.counted}
    found: dict[str, dict[str, Bar]] = {}
    for i, model in enumerate(results.models):
        for line in probe.lines:
            other = before.get((line.dataset, line.metric))
            own, first = line.cells[i], other.cells[i] if other else None
            if line.counted and own is not None and first is not None and same_data(first, own):
                bar = Bar(name=line.dataset, value=first.value - own.value)
                found.setdefault(model.label, {}).setdefault(line.dataset, bar)  # of its settings the first
    values = [bar.value for bars in found.values() for bar in bars.values()]
    limits = min(values, default=0.0), max(values, default=0.0)
    figures = []
    for label, bars in found.items():
        wins = sum(bar.value > 0 for bar in bars.values())
        note = f"zero-shot is ahead on {wins} of {len(bars)}"
        figures.append(difference_bars(label, list(bars.values()), limits=limits, note=note))
    return _unfolding(figures, "model")


def _unfolding(figures: Sequence[str], what: str) -> str:
    """The first figures, and the rest behind a line to click on."""
    if not figures:
        return ""
    shown = f'<div class="charts">{"".join(figures[:_OPEN])}</div>'
    rest = figures[_OPEN:]
    if not rest:
        return shown
    return (
        f"{shown}<details><summary>{len(rest)} more {what}{'s' * (len(rest) > 1)}</summary>"
        f'<div class="charts">{"".join(rest)}</div></details>'
    )


def cost(table: ScoreTable) -> str:
    """The first average (or dataset) against the GFLOPs of the image tower; "" unless models differ in it."""
    if table.averages:
        title, cells = _capital(table.averages[0].title), table.averages[0].cells
    else:
        counted = [line for line in table.lines if line.counted]
        if not counted:
            return ""
        title, cells = counted[0].dataset, tuple(cell.value if cell else None for cell in counted[0].cells)
    dots = [
        Dot(name=model.label, x=model.gflops, y=value, tone=_tone(i))
        for i, (model, value) in enumerate(zip(table.models, cells, strict=True))
        if model.gflops is not None and 0 < model.gflops < _MOST_GFLOPS and value is not None
    ]
    if len({dot.x for dot in dots}) < 2:
        return ""
    without = len(table.models) - len(dots)
    note = f"{without} of {len(table.models)} models not shown: their cost is not known" if without else ""
    return scatter(title, dots, x_unit="GFLOPs a picture", note=note)


@dataclass(frozen=True, kw_only=True)
class _Curve:
    """One line over numbered settings: by number, by dataset, the score."""

    model: int
    variant: str
    points: Mapping[int, Mapping[str, Row]]

    @property
    def datasets(self) -> set[str]:
        """Those that any point has."""
        return {name for rows in self.points.values() for name in rows}


def _curves(rows: Sequence[Row], setting: re.Pattern[str]) -> list[_Curve]:
    """Curves by model and by what else the setting says; of each dataset the first metric recorded."""
    found: dict[tuple[int, str], dict[int, dict[str, Row]]] = {}
    metrics: dict[str, str] = {}
    for row in rows:
        match = setting.fullmatch(row.setting)
        if (
            match
            and is_share(row.metric, row.value)
            and metrics.setdefault(row.dataset, row.metric) == row.metric
        ):
            key = (
                row.model,
                match[2] if row.task == "few-shot" else " ".join(filter(None, (row.task, match[2]))),
            )
            found.setdefault(key, {}).setdefault(int(match[1]), {}).setdefault(row.dataset, row)
    return [
        _Curve(model=model, variant=variant, points=points)
        for (model, variant), points in sorted(found.items())
    ]


def few_shot(results: ResultSet, zero_shot: ScoreTable) -> str:
    """Mean accuracy against pictures a class, zero-shot at 0 (CLIP paper, figure 6); "" without few-shot."""
    rows = results.having("few-shot")
    deviations = {
        (row.model, row.dataset, row.setting, row.metric.removesuffix("_std")): row.value
        for row in rows
        if row.metric.endswith("_std")
    }
    curves = _curves([row for row in rows if not row.metric.endswith("_std")], _SHOTS)
    if not curves:
        return ""
    shared = _shared(curves)
    shots = sorted({k for curve in curves for k in curve.points})
    at = {k: float(i) for i, k in enumerate([0, *shots])}
    lines = []
    for curve in curves:
        points, band = [], []
        for k, own in _rows_of(curve, shared):
            mean = _mean([row.value for row in own])
            spread = [_spread(row, deviations) for row in own]
            known = [one for one in spread if one is not None]
            points.append((at[k], 100 * mean))
            if len(known) == len(own):
                width = math.sqrt(sum(one * one for one in known)) / len(known)
                band.append((at[k], 100 * (mean - width), 100 * (mean + width)))
        lines.append(_line(results, curve, curves, points, band, _ring(curve, shared, zero_shot)))
    kind = "± standard deviation over seeds" if deviations else "its interval"
    note = [f"mean of {_datasets(shared, curves)}"]
    note += [f"band: {kind} of the mean"] * any(line.band for line in lines)
    note += ["rings: zero-shot"] * any(line.mark is not None for line in lines)
    chart = Chart(
        title="Accuracy by pictures a class",
        note="; ".join(note),
        lines=lines,
        unit="%",
        wide=True,
        x_name="pictures:",
        x_ticks=[(place, str(k)) for k, place in at.items()],
    )
    return f'<div class="charts">{draw(chart)}</div>'


def _ring(
    curve: _Curve, shared: Mapping[int, Sequence[str]], zero_shot: ScoreTable
) -> tuple[float, float] | None:
    """The zero-shot score on the datasets of the curve's first point; None where one has none."""
    counted = {line.dataset: line.cells[curve.model] for line in reversed(zero_shot.lines) if line.counted}
    datasets = [row.dataset for _, rows in _rows_of(curve, shared)[:1] for row in rows]
    values = [cell.value for name in datasets if (cell := counted.get(name))]
    return (0.0, 100 * _mean(values)) if values and len(values) == len(datasets) else None


def _spread(row: Row, deviations: Mapping[tuple[int, str, str, str], float]) -> float | None:
    known = deviations.get((row.model, row.dataset, row.setting, row.metric))
    if known is not None:
        return known
    return None if row.low is None or row.high is None else (row.high - row.low) / 2


def layers(results: ResultSet) -> str:
    """Mean accuracy of a probe at each depth; "" without probes of layers."""
    curves = [curve for curve in _curves(results.rows, _LAYER) if len(curve.points) > 1]
    if not curves:
        return ""
    shared = _shared(curves)
    lines = []
    for curve in curves:
        points = [
            (float(layer), 100 * _mean([row.value for row in rows]))
            for layer, rows in _rows_of(curve, shared)
        ]
        lines.append(_line(results, curve, curves, points, (), None))
    note = f"mean of {_datasets(shared, curves)}; features before the projection, layer by layer"
    depths = sorted({layer for curve in curves for layer in curve.points})
    every = math.ceil(len(depths) / _LABELS)
    ticks = [(float(layer), str(layer)) for layer in reversed(depths[::-1][::every])]
    chart = Chart(
        title="Accuracy by depth", note=note, lines=lines, unit="%", wide=True, x_name="layer", x_ticks=ticks
    )
    return f'<div class="charts">{draw(chart)}</div>'


def _line(
    results: ResultSet,
    curve: _Curve,
    curves: Sequence[_Curve],
    points: Sequence[tuple[float, float]],
    band: Sequence[tuple[float, float, float]],
    mark: tuple[float, float] | None,
) -> Line:
    variants = list(dict.fromkeys(one.variant for one in curves))
    model, variant = results.models[curve.model].label, curve.variant or PLAIN
    several = len({one.model for one in curves}) > 1
    name = ", ".join(filter(None, (model if several else "", variant if len(variants) > 1 else "")))
    index = curve.model if several else variants.index(curve.variant)
    return Line(
        name=name or model,
        points=points,
        band=band,
        tone=_tone(index),
        dashed=index >= _TONES or (several and variants.index(curve.variant) > 0),
        dots=True,
        mark=mark,
    )


def _shared(curves: Sequence[_Curve]) -> dict[int, list[str]]:
    """By number, the datasets that all curves have, of the same data, as far as they go; {} where none has any.

    A dataset of few pictures has no score of many a class: it counts up to where all that go further have it.
    """
    every = set.intersection(*(curve.datasets for curve in curves))
    rows = {
        name: [own[name] for curve in curves for own in curve.points.values() if name in own]
        for name in every
    }
    same = {name for name in every if same_data(*rows[name])}
    found = {}
    for number in sorted({number for curve in curves for number in curve.points}):
        there = [set(curve.points[number]) for curve in curves if number in curve.points]
        found[number] = sorted(same.intersection(*there))
    return found if any(found.values()) else {}


def _rows_of(curve: _Curve, shared: Mapping[int, Sequence[str]]) -> list[tuple[int, list[Row]]]:
    """The scores that each point of a curve is the mean of; where no datasets are shared, its own."""
    points = (
        (number, [rows[name] for name in (shared[number] if shared else sorted(rows))])
        for number, rows in sorted(curve.points.items())
    )
    return [(number, rows) for number, rows in points if rows]


def _datasets(shared: Mapping[int, Sequence[str]], curves: Sequence[_Curve]) -> str:
    """Which datasets a mean is of."""
    if not shared:
        return "each line's own datasets, which differ"
    counts: dict[tuple[str, ...], list[str]] = {}
    for number, names in shared.items():
        counts.setdefault(tuple(names), []).append(str(number))
    every = set().union(*(curve.datasets for curve in curves))
    if len(counts) > 1:
        told = "; ".join(f"{len(names)} at {', '.join(at)}" for names, at in counts.items() if names)
        return f"the datasets that all have: {told}"
    (common,) = counts
    if len(common) == 1:
        return common[0]
    return (
        f"{len(common)} datasets"
        if len(common) == len(every)
        else f"the {len(common)} of {len(every)} datasets that all have"
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _tone(index: int) -> int:
    return index % _TONES + 1
