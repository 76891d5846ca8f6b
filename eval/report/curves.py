"""Curves over images per class, layers and dimensions: means over the datasets that all curves have."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from eval.metrics import is_fraction
from eval.report.charts import TONES, ChartLine
from eval.report.tables import PLAIN, ScoreTable, join_words
from eval.results.scores import PREFIX
from eval.results.table import Model, Record, ResultTable, group_by, is_same_data

_MOST_LAYERS = 13  # layer numbers that fit on an axis as wide as a phone
_SHOTS = re.compile(r"(\d{1,4})-shot\b[ ,]*(.*)")
_LAYER = re.compile(r"layer (\d{1,4})\b[ ,]*(.*)")

# by x (images per class, layer, dimension) and dataset
_Points = dict[int, dict[str, Record]]


@dataclass(frozen=True, kw_only=True)
class _Curve:
    """Scores of one model and variant of a setting: by x, those to average."""

    model: int
    name: str
    tone: int
    dashed: bool
    points: Mapping[int, Sequence[Record]]


def few_shot_chart(scores: ResultTable, zero_shot: ScoreTable) -> dict[str, Any]:
    """Describe mean accuracy over images per class, zero-shot at 0 (figure 6 of the CLIP paper)."""
    deviations: dict[tuple[int, str, str, str], float] = {}
    means = []
    for row in scores.rows:
        if row.task == "few-shot" and row.metric.endswith("_std"):
            metric = row.metric.removesuffix("_std")
            deviations[row.model, row.dataset, row.setting, metric] = row.value
        elif row.task == "few-shot":
            means.append(row)
    curves, shots, datasets = _collect_curves(scores.models, _group_points(means, _SHOTS))
    positions = {k: float(i) for i, k in enumerate(dict.fromkeys([0, *shots]))}
    lines = []
    for line, curve in zip(_draw_means(curves, positions.__getitem__), curves, strict=True):
        band = []
        for (x, mean), rows in zip(line.points, curve.points.values(), strict=True):
            spreads = [_find_spread(row, deviations) for row in rows]
            squares = [spread**2 for spread in spreads if spread is not None]
            if len(squares) == len(spreads):
                width = 100 * math.sqrt(sum(squares)) / len(squares)
                band.append((x, mean - width, mean + width))
        lines.append(replace(line, band=band, mark=_mark_zero_shot(curve, zero_shot)))
    notes = [f"mean of {datasets}"]
    if any(line.band for line in lines):
        kind = "± standard deviation over seeds" if deviations else "interval"
        notes.append(f"band: {kind} of the mean")
    if any(line.mark is not None for line in lines):
        notes.append("rings: zero-shot")
    return {"lines": lines, "note": "; ".join(notes), "ticks": [(x, str(k)) for k, x in positions.items()]}


def _find_spread(row: Record, deviations: Mapping[tuple[int, str, str, str], float]) -> float | None:
    """Return the standard deviation over seeds, or else half the interval."""
    half = None
    if row.interval is not None:
        half = (row.interval[1] - row.interval[0]) / 2
    return deviations.get((row.model, row.dataset, row.setting, row.metric), half)


def _mark_zero_shot(curve: _Curve, zero_shot: ScoreTable) -> tuple[float, float] | None:
    """Return the mean zero-shot score at 0 on the datasets of the first point, if all of them have one."""
    values: dict[str, float] = {}
    for line in zero_shot.lines:
        if line.counted and line.dataset not in values and curve.model in line.values:
            values[line.dataset] = line.values[curve.model]
    rows = next(iter(curve.points.values()), ())
    marks = [values[row.dataset] for row in rows if row.dataset in values]
    if not marks or len(marks) < len(rows):
        return None
    return 0.0, 100 * fmean(marks)


def layers_chart(scores: ResultTable) -> dict[str, Any]:
    """Describe the mean accuracy of a probe at each depth, if several layers were probed."""
    curves, depths, datasets = _collect_curves(scores.models, _group_points(scores.rows, _LAYER), least=2)
    shown = depths[::-1][:: math.ceil(len(depths) / _MOST_LAYERS) or 1]
    ticks = [(float(depth), str(depth)) for depth in reversed(shown)]
    return {"lines": _draw_means(curves, float), "note": f"mean of {datasets}", "ticks": ticks}


def dims_chart(scores: ResultTable) -> dict[str, Any]:
    """Describe the mean score of prefixes of the embedding and of the whole over the logarithm of their size."""
    groups: dict[tuple[object, ...], list[Record]] = {}
    for row in scores.rows:
        dim, setting = row.dim_and_setting
        key = row.model, *row.series[:4], setting
        groups.setdefault(key, []).append(replace(row, setting=f"dim {dim} {setting}".strip()))
    several = []
    for rows in groups.values():
        if len({row.setting for row in rows}) > 1:
            several += rows
    curves, dims, datasets = _collect_curves(scores.models, _group_points(several, PREFIX), least=2)
    ticks = [(math.log2(dim), str(dim)) for dim in dims]
    return {"lines": _draw_means(curves, math.log2), "note": f"mean of {datasets}", "ticks": ticks}


def _draw_means(curves: Sequence[_Curve], position: Callable[[int], float]) -> list[ChartLine]:
    """Draw the mean score of each point of curves at ``position(x)``."""
    lines = []
    for curve in curves:
        points = []
        for x, rows in curve.points.items():
            points.append((position(x), 100 * fmean(row.value for row in rows)))
        lines.append(
            ChartLine(name=curve.name, points=points, tone=curve.tone, dots=True, dashed=curve.dashed)
        )
    return lines


def _group_points(rows: Iterable[Record], setting: re.Pattern[str]) -> dict[tuple[int, str], _Points]:
    """Group the fractions whose setting has an x by model and variant; each dataset has its first metric."""
    metrics: dict[str, str] = {}
    curves: dict[tuple[int, str], _Points] = {}
    for row in rows:
        match = setting.fullmatch(row.setting)
        if not match or not is_fraction(row.metric, row.value):
            continue
        if metrics.setdefault(row.dataset, row.metric) == row.metric:
            variant = match[2] if row.task == "few-shot" else f"{row.task} {match[2]}".rstrip()
            points = curves.setdefault((row.model, variant), {})
            points.setdefault(int(match[1]), {}).setdefault(row.dataset, row)
    return curves


def _collect_curves(
    models: Sequence[Model], points_of: Mapping[tuple[int, str], _Points], least: int = 1
) -> tuple[list[_Curve], list[int], str]:
    """Collect curves of at least ``least`` points over the datasets that all curves have, of the same data.

    A dataset with few images per class has no scores for many shots and contributes only to the others. If the
    curves share no datasets, each uses its own.

    Returns:
        The curves, all their x, and a description of the datasets.
    """
    points_of = {key: points for key, points in sorted(points_of.items()) if len(points) >= least}
    if not points_of:
        return [], [], ""
    shared, total = _share_datasets(list(points_of.values()))
    is_any_shared = any(shared.values())
    variants = list(dict.fromkeys(variant for _, variant in points_of))
    several = len({model for model, _ in points_of}) > 1
    curves = []
    for (model, variant), points in points_of.items():
        # named and colored by what differs between the curves
        label = models[model].label
        rank = variants.index(variant)
        color = model if several else rank
        name = join_words(label if several else "", (variant or PLAIN) if len(variants) > 1 else "")
        averaged: dict[int, list[Record]] = {}
        for x in sorted(points):
            names = shared[x] if is_any_shared else sorted(points[x])
            if names:
                averaged[x] = [points[x][dataset] for dataset in names]
        curves.append(
            _Curve(
                model=model,
                name=name or label,
                tone=color % TONES + 1,
                dashed=color >= TONES or (several and rank > 0),
                points=averaged,
            )
        )
    return curves, list(shared), _describe_shared(shared, total)


def _share_datasets(curves: Sequence[_Points]) -> tuple[dict[int, tuple[str, ...]], int]:
    """Find at each x the datasets that all curves with this x have, of the same data; also count all datasets."""
    rows_of: dict[str, list[Record]] = {}
    common: set[str] = set()
    for i, points in enumerate(curves):
        names: set[str] = set()
        for rows in points.values():
            names |= rows.keys()
            for name, row in rows.items():
                rows_of.setdefault(name, []).append(row)
        common = common & names if i else names
    common = {name for name in common if is_same_data(*rows_of[name])}
    shared = {}
    for x in sorted(set().union(*curves)):
        at_x = [points[x] for points in curves if x in points]
        shared[x] = tuple(sorted(common.intersection(*at_x)))
    return shared, len(rows_of)


def _describe_shared(shared: Mapping[int, tuple[str, ...]], total: int) -> str:
    """Describe over which of ``total`` datasets curves are means, by the datasets shared at each x."""
    groups = group_by(shared, shared.__getitem__)
    if not any(groups):
        return "each line's own datasets, which differ"
    if len(groups) > 1:
        parts = []
        for names, xs in groups.items():
            if names:
                parts.append(f"{len(names)} at {', '.join(map(str, xs))}")
        return f"the datasets that all have: {'; '.join(parts)}"
    (names,) = groups
    if len(names) == 1:
        return names[0]
    if len(names) < total:
        return f"the {len(names)} of {total} datasets that all have"
    return f"{total} datasets"
