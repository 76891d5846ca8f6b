"""Which curves the report shows, and how they are prepared for drawing."""

import math
from collections.abc import Collection, Mapping, Sequence

from eval.report.charts import Chart, Line, Point, downsample, draw, figure, number, smooth
from eval.report.run_folder import Result, RunFolder, Series
from eval.report.scores import chief_first, in_percent, metric_name, series_name

__all__ = ["curves"]

_IN_BATCH = {"image_to_text_R@1": "picture → text", "text_to_image_R@1": "text → picture"}
_CAP = 100.0  # the published bound of exp(t)
_SETS = 16  # charts of datasets; the table has them all
_BESIDE = {
    "acc1": ("acc5",),
    "mean_R@1": tuple(_IN_BATCH),
    "image_to_text_R@1": ("text_to_image_R@1",),
}  # drawn with a metric
_SMOOTHED = 50  # a smoothed curve keeps about this many independent values
_MANY = 2 * _SMOOTHED  # fewer points are drawn as they are


def curves(run: RunFolder) -> str:
    """The charts of a run; "" if it recorded nothing."""
    own = {result.series for result in run.results if result.own}
    scored = _scored(run)
    charts = [
        _loss(run),
        *(chart for series, chart in scored if series in own),
        _in_batch(run),
        _temperature(run),
        _learning_rate(run),
    ]
    speed = run.metrics.get("samples_per_second", ())
    charts.append(_noisy("Speed", speed, summary=_typical(speed, " samples/s"), floor=0))
    whole = dict(run.metrics.get("batch_time", ()))
    waiting = [
        (step, 100 * seconds / whole[step])
        for step, seconds in run.metrics.get("data_time", ())
        if whole.get(step)
    ]
    charts.append(
        _noisy(
            "Time waiting for data", waiting, summary=_typical(waiting, "%"), unit="%", floor=0, ceiling=10
        )
    )
    charts.append(_use(run))
    charts += [chart for series, chart in scored if series not in own]
    drawn = "".join(draw(chart) for chart in charts)
    return f'<div class="charts">{drawn}</div>' if drawn else ""


def _loss(run: RunFolder) -> Chart:
    chance = run.metrics.get("chance", ())
    levels = []
    if chance:
        name = f"chance {number(chance[-1][1])}"
        if _is_log_of_batch(run):
            batch = round(math.exp(min(chance[-1][1], 40.0)))
            name = f"chance, ln {number(batch)} = {number(chance[-1][1])}"
        levels.append(Line(name=name, points=_thinned(chance), reference=True))
    last = run.last("loss")
    summary = None if last is None else number(last)
    points = run.metrics.get("loss", ())
    note = "line: mean of nearby steps; band: least to greatest" if len(points) >= _MANY else ""
    return _noisy("Loss", points, summary=summary, note=note, levels=levels, wide=True)


def _is_log_of_batch(run: RunFolder) -> bool:
    """Whether guessing gives the logarithm of the batch, as it does but for the sigmoid loss and pairs left out."""
    loss = run.config.get("loss")
    if not isinstance(loss, Mapping):
        return True
    return bool(loss.get("name", "clip") == "clip" and loss.get("same", "negatives") != "ignored")


def _in_batch(run: RunFolder) -> Chart:
    lines = [
        Line(name=name, points=_thinned(_percent(run.metrics.get(key, ()))), tone=tone)
        for tone, (key, name) in enumerate(_IN_BATCH.items(), start=1)
        if run.metrics.get(key)
    ]
    note = "pictures nearest to their own text of the batch, and texts to their picture"
    return Chart(title="Told apart in the batch", note=note, lines=lines, unit="%", floor=0)


def _use(run: RunFolder) -> Chart:
    """Model FLOPs utilization; where steps beat the peak that was measured, their share of the fastest one.

    No step can do more than the device: such a peak was measured too low, and the fastest step is nearer to it.
    """
    points = run.metrics.get("mfu", ())
    most = max((share for _, share in points), default=0.0)
    title, note, of = "Use of the device (MFU)", "", ""
    if most > 1:
        points = [(step, share / most) for step, share in points]
        title = "Use of the device"
        of = " of the fastest step"
        note = (
            "steps were faster than the peak that was measured at the start, when the machine was probably busy; "
            "so the share of its peak (MFU) is not known"
        )
    useful = _percent(points)
    typical = _typical(useful, "%")
    return _noisy(title, useful, summary=typical and typical + of, note=note, unit="%", floor=0, ceiling=100)


def _percent(points: Sequence[Point]) -> list[Point]:
    return [(step, 100 * share) for step, share in points]


def _temperature(run: RunFolder) -> Chart:
    points = run.metrics.get("scale", ())
    lines = [Line(name="exp(t)", points=_thinned(points))]
    if points:
        lines.append(Line(name=f"cap {number(_CAP)}", points=[(points[0][0], _CAP)], reference=True))
    return Chart(title="Temperature", note="exp(t), which multiplies the cosines", lines=lines, floor=0)


def _learning_rate(run: RunFolder) -> Chart:
    points = run.metrics.get("lr", ())
    peak = f"peak {number(max(rate for _, rate in points))}" if points else ""
    return Chart(
        title="Learning rate",
        lines=[Line(name="learning rate", points=_thinned(points), summary=peak)],
        floor=0,
    )


def _scored(run: RunFolder) -> list[tuple[Series, Chart]]:
    """A chart for each series of several steps: a few metrics, the first with its interval, and chance."""
    groups: dict[Series, dict[str, list[Result]]] = {}
    for result in run.results:
        groups.setdefault(result.series, {}).setdefault(result.metric, []).append(result)
    charts = []
    for series, metrics in groups.items():
        first = metrics[chief_first(list(metrics))[0]]
        if len(first) > 1:
            charts.append((series, _score_chart(first, metrics, groups, run.step)))
    return charts[:_SETS]


def _score_chart(
    first: list[Result], metrics: Mapping[str, list[Result]], known: Collection[Series], step: int | None
) -> Chart:
    percent = all(in_percent(row) for row in first)
    factor, unit = (100.0, "%") if percent else (1.0, "")
    chief, *others = chief_first(list(metrics))
    beside = [metrics[name] for name in _BESIDE.get(chief, others[:1]) if name in metrics]
    like = [first, *(rows for rows in beside if all(in_percent(row) for row in rows) == percent)]
    lines = [_scores(rows, factor, tone) for tone, rows in enumerate(like, start=1)]
    chance = first[-1].chance
    if chance is not None:
        name = f"chance {figure(factor * chance, unit)}"
        lines.append(Line(name=name, points=[(first[0].step, factor * chance)], reference=True))
    title = ", ".join(filter(None, (first[0].dataset, series_name(first[0], known))))
    best = max(y for line in lines for _, y in line.points)
    ceiling = 100.0 if percent and best > 75 else None
    note = "" if first[-1].step == step else f"at step {number(first[-1].step)}"
    return Chart(title=title, note=note, lines=lines, unit=unit, floor=0, ceiling=ceiling)


def _scores(rows: Sequence[Result], factor: float, tone: int) -> Line:
    band = [
        (row.step, factor * row.low, factor * row.high)
        for row in rows
        if row.low is not None and row.high is not None
    ]
    points = [(row.step, factor * row.value) for row in rows]
    return Line(
        name=metric_name(rows[0].metric),
        points=points,
        band=band if tone == 1 else (),
        tone=tone,
        dots=True,
    )


def _noisy(
    title: str,
    points: Sequence[Point],
    *,
    summary: str | None = None,
    note: str = "",
    unit: str = "",
    floor: float | None = None,
    ceiling: float | None = None,
    levels: Sequence[Line] = (),
    wide: bool = False,
) -> Chart:
    """Many points as a smoothed line before a faint band from the least to the greatest raw value."""
    if len(points) >= _MANY:
        mean = _thinned(smooth(points, len(points) / _SMOOTHED))
        line = Line(name=title.lower(), points=mean, band=_range(points), summary=summary)
    else:
        line = Line(name=title.lower(), points=points, summary=summary)
    return Chart(
        title=title, lines=[line, *levels], unit=unit, note=note, floor=floor, ceiling=ceiling, wide=wide
    )


def _thinned(points: Sequence[Point]) -> list[Point]:
    return [(x, last) for x, last, _, _ in downsample(points)]


def _range(points: Sequence[Point]) -> list[tuple[float, float, float]]:
    """Each bucket's range joined with its neighbours', so that a band of single values still has a width."""
    buckets = downsample(points)
    out = []
    for i, (x, _, _, _) in enumerate(buckets):
        near = buckets[max(0, i - 1) : i + 2]
        out.append((x, min(low for _, _, low, _ in near), max(high for _, _, _, high in near)))
    return out


def _typical(points: Sequence[Point], unit: str) -> str | None:
    """The median, which the start and a pause do not bend."""
    values = sorted(value for _, value in points)
    return f"median {figure(values[len(values) // 2], unit)}" if values else None
