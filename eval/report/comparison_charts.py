"""Charts over many models and datasets: ranking, zero-shot against probes, cost, images per class, layers."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from eval.report.charts import (
    Bar,
    Chart,
    ChartLine,
    Dot,
    difference_bars,
    draw,
    ranked_bars,
    scatter,
)
from eval.report.result_set import ResultSet, Row, same_data
from eval.report.scores import PLAIN, Average, ScoreTable, is_share

__all__ = ["average_scope", "cost", "few_shot", "layers", "leaders", "probe_differences"]

_TONES = 8
_SHOTS = re.compile(r"(\d{1,4})-shot\b[ ,]*(.*)")
_LAYER = re.compile(r"layer (\d{1,4})\b[ ,]*(.*)")
_MOST_SUITES = 4
_MOST_GFLOPS = 1e12  # larger values are errors and would spoil the axis
_LABELS = 13  # layer numbers that fit on an axis as wide as a phone


def leaders(table: ScoreTable) -> list[Markup]:
    """Rank the models by their average over each suite, if there are several models."""
    if len(table.models) < 2:
        return []
    charts = []
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
        charts.append(ranked_bars(_capital(average.title), bars, note=average_scope(average)))
    return charts


def average_scope(average: Average) -> str:
    """Say which datasets and tasks a mean covers."""
    tasks = f", each by its main task ({average.task})" if len(average.tasks) > 1 else ""
    if average.over == average.of:
        return f"over all its {average.of} datasets{tasks}"
    models = "all models that have any" if None in average.cells else "all models"
    return f"over the {average.over} of {average.of} datasets that {models} have{tasks}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def probe_differences(results: ResultSet, zero_shot: ScoreTable, probe: ScoreTable | None) -> list[Markup]:
    """Chart zero-shot minus linear probe by dataset for each model (figure 5 of the CLIP paper)."""
    if probe is None:
        return []
    before = {(line.dataset, line.metric): line for line in zero_shot.lines if line.counted}
    found: dict[str, dict[str, Bar]] = {}
    for i, model in enumerate(results.models):
        for line in probe.lines:
            other = before.get((line.dataset, line.metric))
            own, first = line.cells[i], other.cells[i] if other else None
            if line.counted and own is not None and first is not None and same_data(first, own):
                bar = Bar(name=line.dataset, value=first.value - own.value)
                found.setdefault(model.label, {}).setdefault(
                    line.dataset, bar
                )  # the first of several settings
    values = [bar.value for bars in found.values() for bar in bars.values()]
    limits = min(values, default=0.0), max(values, default=0.0)
    return [
        difference_bars(
            label,
            list(bars.values()),
            limits=limits,
            note=f"zero-shot is better on {sum(bar.value > 0 for bar in bars.values())} of {len(bars)}",
        )
        for label, bars in found.items()
    ]


def cost(table: ScoreTable) -> Markup:
    """Chart the first average (or dataset) over the image tower's GFLOPs, if models differ in them."""
    if table.averages:
        title, cells = _capital(table.averages[0].title), table.averages[0].cells
    else:
        counted = [line for line in table.lines if line.counted]
        if not counted:
            return Markup()
        title, cells = counted[0].dataset, tuple(cell.value if cell else None for cell in counted[0].cells)
    dots = [
        Dot(name=model.label, x=model.gflops, y=value, tone=i % _TONES + 1)
        for i, (model, value) in enumerate(zip(table.models, cells, strict=True))
        if model.gflops is not None and 0 < model.gflops < _MOST_GFLOPS and value is not None
    ]
    if len({dot.x for dot in dots}) < 2:
        return Markup()
    without = len(table.models) - len(dots)
    note = f"{without} of {len(table.models)} models not shown: their cost is unknown" if without else ""
    return scatter(title, dots, x_unit="GFLOPs per image", note=note)


# --------------------------------------------------------------------------------------------------------------
# Curves over numbered settings: images per class, layers


@dataclass(frozen=True, kw_only=True)
class _Curve:
    """One model and variant of a setting: scores by number and dataset."""

    model: int
    variant: str
    points: Mapping[int, Mapping[str, Row]]

    @property
    def datasets(self) -> set[str]:
        return {name for rows in self.points.values() for name in rows}


def _curves(rows: Sequence[Row], setting: re.Pattern[str]) -> list[_Curve]:
    """Collect curves by model and by the rest of the setting; of each dataset the first metric recorded."""
    found: dict[tuple[int, str], dict[int, dict[str, Row]]] = {}
    metrics: dict[str, str] = {}
    for row in rows:
        match = setting.fullmatch(row.setting)
        if not match or not is_share(row.metric, row.value):
            continue
        if metrics.setdefault(row.dataset, row.metric) != row.metric:
            continue
        variant = match[2] if row.task == "few-shot" else " ".join(filter(None, (row.task, match[2])))
        points = found.setdefault((row.model, variant), {})
        points.setdefault(int(match[1]), {}).setdefault(row.dataset, row)
    return [
        _Curve(model=model, variant=name, points=points) for (model, name), points in sorted(found.items())
    ]


def few_shot(results: ResultSet, zero_shot: ScoreTable) -> Markup:
    """Chart mean accuracy over images per class, zero-shot at 0 (CLIP paper, figure 6)."""
    rows = results.having("few-shot")
    deviations = {
        (row.model, row.dataset, row.setting, row.metric.removesuffix("_std")): row.value
        for row in rows
        if row.metric.endswith("_std")
    }
    curves = _curves([row for row in rows if not row.metric.endswith("_std")], _SHOTS)
    if not curves:
        return Markup()
    shared = _shared(curves)
    shots = sorted({k for curve in curves for k in curve.points})
    at = {k: float(i) for i, k in enumerate([0, *shots])}
    lines = []
    for curve in curves:
        points, band = [], []
        for k, own in _rows_of(curve, shared):
            mean = _mean([row.value for row in own])
            spread = [
                deviations.get((row.model, row.dataset, row.setting, row.metric), _half_interval(row))
                for row in own
            ]
            known = [one for one in spread if one is not None]
            points.append((at[k], 100 * mean))
            if len(known) == len(own):
                width = math.sqrt(sum(one * one for one in known)) / len(known)
                band.append((at[k], 100 * (mean - width), 100 * (mean + width)))
        # a ring at 0: the zero-shot score on the datasets of the first point, if all of them have one
        counted = {
            line.dataset: line.cells[curve.model] for line in reversed(zero_shot.lines) if line.counted
        }
        datasets = [row.dataset for _, own in _rows_of(curve, shared)[:1] for row in own]
        values = [cell.value for name in datasets if (cell := counted.get(name))]
        ring = (0.0, 100 * _mean(values)) if values and len(values) == len(datasets) else None
        lines.append(_line(results, curve, curves, points, band, ring))
    kind = "± standard deviation over seeds" if deviations else "interval"
    note = [f"mean of {_dataset_names(shared, curves)}"]
    note += [f"band: {kind} of the mean"] * any(line.band for line in lines)
    note += ["rings: zero-shot"] * any(line.mark is not None for line in lines)
    return draw(
        Chart(
            title="Accuracy by images per class",
            note="; ".join(note),
            lines=lines,
            unit="%",
            wide=True,
            x_name="images:",
            x_ticks=[(place, str(k)) for k, place in at.items()],
        )
    )


def _half_interval(row: Row) -> float | None:
    return None if row.low is None or row.high is None else (row.high - row.low) / 2


def layers(results: ResultSet) -> Markup:
    """Chart the mean accuracy of a probe at each depth, where several layers were probed."""
    curves = [curve for curve in _curves(results.rows, _LAYER) if len(curve.points) > 1]
    if not curves:
        return Markup()
    shared = _shared(curves)
    lines = []
    for curve in curves:
        rows = _rows_of(curve, shared)
        points = [(float(layer), 100 * _mean([row.value for row in own])) for layer, own in rows]
        lines.append(_line(results, curve, curves, points, (), None))
    depths = sorted({layer for curve in curves for layer in curve.points})
    every = math.ceil(len(depths) / _LABELS)
    return draw(
        Chart(
            title="Accuracy by depth",
            note=f"mean of {_dataset_names(shared, curves)}; features before the projection, layer by layer",
            lines=lines,
            unit="%",
            wide=True,
            x_name="layer",
            x_ticks=[(float(layer), str(layer)) for layer in reversed(depths[::-1][::every])],
        )
    )


def _line(
    results: ResultSet,
    curve: _Curve,
    curves: Sequence[_Curve],
    points: Sequence[tuple[float, float]],
    band: Sequence[tuple[float, float, float]],
    mark: tuple[float, float] | None,
) -> ChartLine:
    """Name and color a curve by what differs between the curves."""
    variants = list(dict.fromkeys(one.variant for one in curves))
    model, variant = results.models[curve.model].label, curve.variant or PLAIN
    several = len({one.model for one in curves}) > 1
    name = ", ".join(filter(None, (model if several else "", variant if len(variants) > 1 else "")))
    index = curve.model if several else variants.index(curve.variant)
    return ChartLine(
        name=name or model,
        points=points,
        band=band,
        tone=index % _TONES + 1,
        dashed=index >= _TONES or (several and variants.index(curve.variant) > 0),
        dots=True,
        mark=mark,
    )


def _shared(curves: Sequence[_Curve]) -> dict[int, list[str]]:
    """List, by number, the datasets that all curves reaching it have, of the same data; {} where there are none.

    A dataset with few images per class has no score for many shots: it counts as far as it goes.
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
    """List the scores that each point of a curve averages; its own where no datasets are shared."""
    points = (
        (number, [rows[name] for name in (shared[number] if shared else sorted(rows))])
        for number, rows in sorted(curve.points.items())
    )
    return [(number, rows) for number, rows in points if rows]


def _dataset_names(shared: Mapping[int, Sequence[str]], curves: Sequence[_Curve]) -> str:
    """Say which datasets a mean covers."""
    if not shared:
        return "each line's own datasets, which differ"
    counts: dict[tuple[str, ...], list[str]] = {}
    for number, names in shared.items():
        counts.setdefault(tuple(names), []).append(str(number))
    if len(counts) > 1:
        parts = "; ".join(f"{len(names)} at {', '.join(at)}" for names, at in counts.items() if names)
        return f"the datasets that all have: {parts}"
    (common,) = counts
    if len(common) == 1:
        return common[0]
    every = set().union(*(curve.datasets for curve in curves))
    if len(common) == len(every):
        return f"{len(common)} datasets"
    return f"the {len(common)} of {len(every)} datasets that all have"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
