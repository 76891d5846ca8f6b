"""Build ``report.html``, the self-contained page of a training run; the same folder gives the same bytes."""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from clipkit.files.pages import write_page
from clipkit.files.terminal import without_secrets
from eval.report.charts import (
    TEMPLATES,
    Chart,
    ChartLine,
    Point,
    downsample,
    draw,
    figure,
    number,
    smooth,
)
from eval.report.images import Thumbnails, rank_history, similarities
from eval.report.read import Result, RunFolder, Series, read_run_folder
from eval.report.scores import Headline, is_share, metric_name, setting_name

__all__ = ["build_report", "headlines", "newest"]

_IN_BATCH = {"image_to_text_R@1": "image → text", "text_to_image_R@1": "text → image"}
_MEAN = "mean_R@1"  # of both directions of retrieval
_BESIDE = {  # metrics drawn together
    "acc1": ("acc5",),
    _MEAN: tuple(_IN_BATCH),
    "image_to_text_R@1": ("text_to_image_R@1",),
}
_SCORE_FIELDS = ("step", "dataset", "task", "metric", "value", "n", "low", "high", "chance")
_CAP = 100.0  # the published bound of exp(t)
_HEADLINES = 4
_CHARTS = 16  # charts of scores; the table has all of them
_SMOOTHED = 50  # independent values that a smoothed curve keeps, about
_MANY = 2 * _SMOOTHED  # shorter curves are drawn as they are


def build_report(run: Path, out: Path | None = None) -> Path:
    """Write the page of a run folder and return its path.

    Args:
        run: the run folder. Any of its files may be missing or cut short; the page says which.
        out: the file to write, atomically; by default ``report.html`` in the run folder.

    Raises:
        DataError: there is no run folder, or the page cannot be written.
    """
    folder = read_run_folder(run)
    notes = list(folder.notes)
    if folder.bad_samples and folder.bad_samples.count:
        count = number(folder.bad_samples.count)
        notes.append(
            f"{count} samples could not be used and were replaced; the causes are at the end of the page."
        )
    page = TEMPLATES.get_template("run.html").render(
        title=folder.name,
        run=folder,
        notes=notes,
        headlines=headlines(folder.results, folder.step),
        duration=_duration,
        charts=_charts(folder),
        thumbnails=Thumbnails(),
        similarities=similarities,
        rank_history=rank_history,
        results=_results_table(folder.results),
        provenance=_provenance(of_training(folder.results)),
        config=without_secrets(folder.config_text).strip(),
    )
    return write_page(run / "report.html" if out is None else out, page)


def _duration(seconds: float) -> str:
    for limit, length, unit in ((90, 1, "seconds"), (5400, 60, "minutes"), (172_800, 3600, "hours")):
        if seconds < limit:
            return f"{number(round(seconds / length, 1))} {unit}"
    return f"{number(round(seconds / 86_400, 1))} days"


# --------------------------------------------------------------------------------------------------------------
# Scores


def newest(results: Sequence[Result]) -> list[Result]:
    """Select the last score of each metric, series by series; those scored in training come first."""
    last = {(result.series, result.metric): result for result in results}
    own = {result.series for result in results if result.own}
    places = {series: i for i, series in enumerate(dict.fromkeys(series for series, _ in last))}
    return sorted(last.values(), key=lambda result: (result.series not in own, places[result.series]))


def of_training(results: Sequence[Result]) -> list[Result]:
    """Select the last scores taken in training; without any, the latest of all.

    The selection does not change when a checkpoint is scored later.
    """
    own = [result for result in results if result.own] or list(results)
    last = max((result.step for result in own), default=0)
    return [result for result in own if result.step == last]


def _main_first(metrics: Sequence[str]) -> list[str]:
    """Order metrics: the mean of both directions of retrieval first, else as recorded."""
    return sorted(metrics, key=lambda metric: metric != _MEAN)


def _series_name(result: Result, known: Collection[Series]) -> str:
    """Name a series beside its dataset, with prompts and split where ``known`` series differ in them."""
    mine = (result.dataset, result.task, result.setting)
    alike = [(split, prompts) for data, split, task, prompts, own in known if (data, task, own) == mine]
    several_prompts = len({prompts for _, prompts in alike}) > 1
    several_splits = len({split for split, _ in alike}) > 1
    prompts = f"prompts {result.prompt_set}" if result.prompt_set else "no prompts"
    parts = (
        result.task,
        setting_name(result.task, result.setting),
        prompts if several_prompts else "",
        f"split {result.split}" if result.split != "test" or several_splits else "",
    )
    return ", ".join(filter(None, parts))


def _in_percent(result: Result) -> bool:
    return is_share(result.metric, result.value, result.low, result.high, result.chance)


def _text(result: Result, value: float | None) -> str:
    if value is None:
        return ""
    return figure(100 * value, "%") if _in_percent(result) else figure(value, "")


def headlines(results: Sequence[Result], step: int | None) -> list[Headline]:
    """Select the main metric of each dataset scored in training; scores of another step than ``step`` say so."""
    metrics: dict[Series, dict[str, Result]] = {}
    for result in of_training(results):
        metrics.setdefault(result.series, {})[result.metric] = result
    known = {result.series for result in results}
    found = []
    for own in [*metrics.values()][:_HEADLINES]:
        result = own[_main_first(list(own))[0]]
        details = [] if result.step == step else [f"step {number(result.step)}"]
        if result.low is not None and result.high is not None:
            details.append(f"95% interval {_text(result, result.low)} to {_text(result, result.high)}")
        details += [f"chance {_text(result, result.chance)}"] if result.chance is not None else []
        details += [f"n = {number(result.n)}"] if result.n is not None else []
        percent = _in_percent(result)
        found.append(
            Headline(
                dataset=result.dataset,
                what=" ".join(filter(None, (_series_name(result, known), metric_name(result.metric)))),
                figure=_text(result, result.value).removesuffix("%" if percent else ""),
                unit="%" if percent else "",
                details=details,
                value=result.value if percent else None,
                interval=None if result.low is None or result.high is None else (result.low, result.high),
                chance=result.chance,
            )
        )
    return found


def _results_table(results: Sequence[Result]) -> list[tuple[str, ...]]:
    known = {result.series for result in results}
    rows: list[tuple[str, ...]] = []
    for result in newest(results):
        interval = ""
        if result.low is not None and result.high is not None:
            interval = f"{_text(result, result.low)} – {_text(result, result.high)}"
        rows.append(
            (
                result.dataset,
                _series_name(result, known),
                metric_name(result.metric),
                _text(result, result.value),
                interval,
                _text(result, result.chance),
                "" if result.n is None else number(result.n),
                number(result.step),
            )
        )
    return rows


def _provenance(results: Sequence[Result]) -> list[tuple[str, list[str]]]:
    """List what the scores depend on, by dataset where datasets differ."""
    values: dict[str, dict[str, str]] = {}
    for result in results:
        for key, value in result.line.items():
            if value is not None and key not in _SCORE_FIELDS:
                values.setdefault(key, {})[result.dataset] = value_text(value)
    datasets = {result.dataset for result in results}
    facts = []
    for key, by_dataset in values.items():
        if len(set(by_dataset.values())) == 1 and len(by_dataset) == len(datasets):
            lines = [next(iter(by_dataset.values()))]
        else:
            lines = [f"{name}: {value}" for name, value in by_dataset.items()]
        facts.append((key.replace("_", " "), lines))
    return facts


def value_text(value: Any) -> str:
    """Format a value of a results line."""
    if value is None:
        return ""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {value_text(one)}" for key, one in value.items())
    if isinstance(value, float):
        return number(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# --------------------------------------------------------------------------------------------------------------
# Curves


def _charts(run: RunFolder) -> list[str]:
    """Render the charts of a run."""
    own = {result.series for result in run.results if result.own}
    scored = _score_charts(run)
    speed = run.metrics.get("samples_per_second", ())
    batch_time = dict(run.metrics.get("batch_time", ()))
    waiting = [
        (step, 100 * seconds / batch_time[step])
        for step, seconds in run.metrics.get("data_time", ())
        if batch_time.get(step)
    ]
    scale, rate = run.metrics.get("scale", ()), run.metrics.get("lr", ())
    temperature = [ChartLine(name="exp(t)", points=_thinned(scale))]
    if scale:
        temperature.append(
            ChartLine(name=f"cap {number(_CAP)}", points=[(scale[0][0], _CAP)], reference=True)
        )
    peak = f"peak {number(max(value for _, value in rate))}" if rate else ""
    charts = [
        _loss(run),
        *(chart for series, chart in scored if series in own),
        _in_batch(run),
        Chart(title="Temperature", note="exp(t), which multiplies the cosines", lines=temperature, floor=0),
        Chart(
            title="Learning rate",
            lines=[ChartLine(name="learning rate", points=_thinned(rate), summary=peak)],
            floor=0,
        ),
        _noisy("Speed", speed, summary=_median(speed, " samples/s"), floor=0),
        _noisy(
            "Time waiting for data", waiting, summary=_median(waiting, "%"), unit="%", floor=0, ceiling=10
        ),
        _utilization(run),
        *(chart for series, chart in scored if series not in own),
    ]
    return [drawn for chart in charts if (drawn := draw(chart))]


def _loss(run: RunFolder) -> Chart:
    chance, points, last = run.metrics.get("chance", ()), run.metrics.get("loss", ()), run.last("loss")
    levels = []
    if chance:
        loss = run.config.get("loss")
        name = f"chance {number(chance[-1][1])}"
        # ln(batch), except for the sigmoid loss and where equal pairs are ignored
        if not isinstance(loss, Mapping) or (
            loss.get("name", "clip") == "clip" and loss.get("same", "negatives") != "ignored"
        ):
            batch = round(math.exp(min(chance[-1][1], 40.0)))
            name = f"chance, ln {number(batch)} = {number(chance[-1][1])}"
        levels.append(ChartLine(name=name, points=_thinned(chance), reference=True))
    note = "line: moving average; band: minimum to maximum" if len(points) >= _MANY else ""
    return _noisy(
        "Loss", points, summary=None if last is None else number(last), note=note, levels=levels, wide=True
    )


def _in_batch(run: RunFolder) -> Chart:
    lines = [
        ChartLine(name=name, points=_thinned(_percent(run.metrics.get(key, ()))), tone=tone)
        for tone, (key, name) in enumerate(_IN_BATCH.items(), start=1)
        if run.metrics.get(key)
    ]
    note = "R@1: images nearest to their own text among those of the batch, and texts to their image"
    return Chart(title="Retrieval within the batch", note=note, lines=lines, unit="%", floor=0)


def _utilization(run: RunFolder) -> Chart:
    """Chart model FLOPs utilization; if steps beat the measured peak, relative to the fastest step.

    No step can exceed the device's peak: in that case the measured peak is too low, and the fastest step is closer.
    """
    points = run.metrics.get("mfu", ())
    most = max((fraction for _, fraction in points), default=0.0)
    title, note, of = "Device utilization (MFU)", "", ""
    if most > 1:
        points = [(step, fraction / most) for step, fraction in points]
        title = "Device utilization"
        of = " of the fastest step"
        note = (
            "steps were faster than the peak measured at the start, when the machine was probably busy, so MFU is "
            "unknown"
        )
    useful = _percent(points)
    median = _median(useful, "%")
    return _noisy(title, useful, summary=median and median + of, note=note, unit="%", floor=0, ceiling=100)


def _score_charts(run: RunFolder) -> list[tuple[Series, Chart]]:
    """Chart each series of several steps: a few metrics, the first with its interval, and chance."""
    groups: dict[Series, dict[str, list[Result]]] = {}
    for result in run.results:
        groups.setdefault(result.series, {}).setdefault(result.metric, []).append(result)
    charts = []
    for series, metrics in groups.items():
        main, *others = _main_first(list(metrics))
        first = metrics[main]
        if len(first) < 2:
            continue
        percent = all(map(_in_percent, first))
        factor, unit = (100.0, "%") if percent else (1.0, "")
        beside = [metrics[name] for name in _BESIDE.get(main, others[:1]) if name in metrics]
        shown = [first, *(rows for rows in beside if all(map(_in_percent, rows)) == percent)]
        lines = [
            ChartLine(
                name=metric_name(rows[0].metric),
                points=[(row.step, factor * row.value) for row in rows],
                band=[
                    (row.step, factor * row.low, factor * row.high)
                    for row in rows
                    if rows is first and row.low is not None and row.high is not None
                ],
                tone=tone,
                dots=True,
            )
            for tone, rows in enumerate(shown, start=1)
        ]
        chance = first[-1].chance
        if chance is not None:
            name = f"chance {figure(factor * chance, unit)}"
            lines.append(ChartLine(name=name, points=[(first[0].step, factor * chance)], reference=True))
        chart = Chart(
            title=", ".join(filter(None, (first[0].dataset, _series_name(first[0], groups)))),
            note="" if first[-1].step == run.step else f"at step {number(first[-1].step)}",
            lines=lines,
            unit=unit,
            floor=0,
            ceiling=100.0 if percent and max(y for line in lines for _, y in line.points) > 75 else None,
        )
        charts.append((series, chart))
    return charts[:_CHARTS]


def _noisy(
    title: str,
    points: Sequence[Point],
    *,
    summary: str | None,
    note: str = "",
    unit: str = "",
    floor: float | None = None,
    ceiling: float | None = None,
    levels: Sequence[ChartLine] = (),
    wide: bool = False,
) -> Chart:
    """Chart many points as a smoothed line before a band from the least to the greatest raw value."""
    line = ChartLine(name=title.lower(), points=points, summary=summary)
    if len(points) >= _MANY:
        buckets = downsample(points)
        # each range is joined with its neighbours', so that a band of single values still has a width
        near = [buckets[max(0, i - 1) : i + 2] for i in range(len(buckets))]
        line = ChartLine(
            name=title.lower(),
            points=_thinned(smooth(points, len(points) / _SMOOTHED)),
            band=[
                (bucket[0], min(low for _, _, low, _ in own), max(high for _, _, _, high in own))
                for bucket, own in zip(buckets, near, strict=True)
            ],
            summary=summary,
        )
    return Chart(
        title=title, lines=[line, *levels], unit=unit, note=note, floor=floor, ceiling=ceiling, wide=wide
    )


def _percent(points: Sequence[Point]) -> list[Point]:
    return [(step, 100 * fraction) for step, fraction in points]


def _thinned(points: Sequence[Point]) -> list[Point]:
    return [(x, last) for x, last, _, _ in downsample(points)]


def _median(points: Sequence[Point], unit: str) -> str | None:
    """The median, which neither the start nor a pause affects."""
    values = sorted(value for _, value in points)
    return f"median {figure(values[len(values) // 2], unit)}" if values else None
