"""Builds ``report.html``, the page a person looks at after a training: one file that carries everything in itself.

All text that comes from data is escaped. The same run folder gives the same bytes.
"""

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from clipkit.files.urls import without_secrets
from eval.report.draw import (
    Chart,
    ChartLine,
    PictureBook,
    Point,
    Section,
    downsample,
    draw,
    examples,
    figure,
    matrices,
    number,
    page,
    queries,
    scrolling,
    smooth,
    write_page,
)
from eval.report.read import BadSamples, Result, RunFolder, Series, read_run_folder
from eval.report.scores import (
    chief_first,
    headline_scores,
    in_percent,
    metric_name,
    of_training,
    results_table,
    series_name,
)
from eval.results.records import Snapshot

__all__ = ["build_report", "curves"]


# --------------------------------------------------------------------------------------------------------------
# Which curves the report shows, and how they are prepared for drawing.

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
        levels.append(ChartLine(name=name, points=_thinned(chance), reference=True))
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
        ChartLine(name=name, points=_thinned(_percent(run.metrics.get(key, ()))), tone=tone)
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
    lines = [ChartLine(name="exp(t)", points=_thinned(points))]
    if points:
        lines.append(ChartLine(name=f"cap {number(_CAP)}", points=[(points[0][0], _CAP)], reference=True))
    return Chart(title="Temperature", note="exp(t), which multiplies the cosines", lines=lines, floor=0)


def _learning_rate(run: RunFolder) -> Chart:
    points = run.metrics.get("lr", ())
    peak = f"peak {number(max(rate for _, rate in points))}" if points else ""
    return Chart(
        title="Learning rate",
        lines=[ChartLine(name="learning rate", points=_thinned(points), summary=peak)],
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
        lines.append(ChartLine(name=name, points=[(first[0].step, factor * chance)], reference=True))
    title = ", ".join(filter(None, (first[0].dataset, series_name(first[0], known))))
    best = max(y for line in lines for _, y in line.points)
    ceiling = 100.0 if percent and best > 75 else None
    note = "" if first[-1].step == step else f"at step {number(first[-1].step)}"
    return Chart(title=title, note=note, lines=lines, unit=unit, floor=0, ceiling=ceiling)


def _scores(rows: Sequence[Result], factor: float, tone: int) -> ChartLine:
    band = [
        (row.step, factor * row.low, factor * row.high)
        for row in rows
        if row.low is not None and row.high is not None
    ]
    points = [(row.step, factor * row.value) for row in rows]
    return ChartLine(
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
    levels: Sequence[ChartLine] = (),
    wide: bool = False,
) -> Chart:
    """Many points as a smoothed line before a faint band from the least to the greatest raw value."""
    if len(points) >= _MANY:
        mean = _thinned(smooth(points, len(points) / _SMOOTHED))
        line = ChartLine(name=title.lower(), points=mean, band=_range(points), summary=summary)
    else:
        line = ChartLine(name=title.lower(), points=points, summary=summary)
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


# --------------------------------------------------------------------------------------------------------------


def build_report(run: Path, out: Path | None = None) -> Path:
    """Write the report of a run folder and give its path.

    Args:
        run: the run folder. Each of its files may be missing or cut short; the page says what it lacks.
        out: the file to write; by default ``report.html`` in the run folder. It appears whole or not at all.

    Raises:
        DataError: there is no run folder, or the page cannot be written.
    """
    folder = read_run_folder(run)
    out = run / "report.html" if out is None else out
    return write_page(out, _page(folder))


def _page(run: RunFolder) -> str:
    book = PictureBook()
    sections = [
        Section(name="curves", title="Curves", content=curves(run)),
        *_picture_sections(run, book),
        Section(name="results", title="All results", content=results_table(run.results)),
        Section(name="about", title="About this run", content=_about(run)),
    ]
    return page(run.name, _head(run), sections, book)


def _head(run: RunFolder) -> str:
    notes = list(run.notes)
    if run.bad_samples and run.bad_samples.count:
        count = number(run.bad_samples.count)
        notes.append(f"{count} samples could not be used and were replaced; the end of the page says why.")
    listed = "".join(f"<li>{escape(note)}</li>" for note in notes)
    aside = f'<aside class="notes" aria-label="Notes"><ul>{listed}</ul></aside>' if notes else ""
    scores = headline_scores(run.results, run.step) or _unscored(run)
    return (
        f'<header class="top"><p class="kind">clipkit training report</p><h1>{escape(run.name)}</h1>'
        f'<p class="lead">{_sentence(run)}</p>{scores}</header>{aside}'
    )


def _sentence(run: RunFolder) -> str:
    """The run in one sentence."""
    model, planned = run.config.get("model"), run.planned
    name = model.get("name") if isinstance(model, Mapping) else None
    parts = [f"<b>{escape(str(name))}</b>" if name else "A model"]
    if run.metrics and run.step is not None:
        of = f" of {number(planned)}" if planned is not None and planned > run.step else ""
        parts.append(f"trained for {number(run.step)}{of} steps")
    elif run.step is not None:
        parts.append(f"at step {number(run.step)}")
    else:
        parts.append("of which nothing is recorded yet")
    samples, seconds, loss, chance = (run.last(key) for key in ("samples", "seconds", "loss", "chance"))
    if samples:
        parts.append(f"on {number(samples)} samples")
    if seconds:
        parts.append(f"in {_duration(seconds)}")
    text = " ".join(parts)
    if loss is not None:
        text += f". The last loss is {number(loss)}"
        text += f", where guessing gives {number(chance)}" if chance else ""
    return text + "."


def _unscored(run: RunFolder) -> str:
    """Why there are no scores, and how to get some; "" if they are due, as a note tells that already."""
    if run.config and not run.scored_on:
        ways = (
            ("While it trains:", "python train.py … eval.data=FOLDER"),
            ("What is trained already:", "python -m eval retrieval --model RUN --data FOLDER"),
            ("Then this page anew:", "python -m eval report RUN"),
        )
        listed = "".join(f"<li>{escape(when)} <code>{escape(command)}</code></li>" for when, command in ways)
        return (
            '<div class="unscored"><p>Nothing is scored in this run, because its config names no '
            f"<code>eval.data</code>. To score it:</p><ul>{listed}</ul>"
            "<p>RUN is the folder of this run. FOLDER is a dataset that holds pairs out as split "
            "<code>test</code>, as <code>python -m data pack TABLE FOLDER --test 0.1</code> makes one. "
            "For a built-in one with class names, such as <code>digits</code>, say <code>zero-shot</code> in "
            "place of <code>retrieval</code>.</p></div>"
        )
    if run.config and (run.step or 0) < run.first_score:
        named = escape(", ".join(run.scored_on))
        return f'<p class="unscored">No scores yet: {named}, first at step {number(run.first_score)}.</p>'
    return ""


def _duration(seconds: float) -> str:
    for limit, length, unit in ((90, 1, "seconds"), (5400, 60, "minutes"), (172_800, 3600, "hours")):
        if seconds < limit:
            return f"{number(round(seconds / length, 1))} {unit}"
    return f"{number(round(seconds / 86_400, 1))} days"


def _picture_sections(run: RunFolder, book: PictureBook) -> list[Section]:
    def by_dataset(build: Callable[[Sequence[Snapshot], PictureBook], str]) -> str:
        parts = [(name, build(snapshots, book)) for name, snapshots in run.snapshots.items()]
        return "".join(
            f'<div class="dataset"><h3>{escape(name)}</h3>{part}</div>' for name, part in parts if part
        )

    return [
        Section(
            name="examples",
            title="Example predictions",
            lead="Held-out pictures picked by chance, with the five likeliest labels. ✓ marks the true one.",
            content=by_dataset(examples),
        ),
        Section(
            name="similarity",
            title="Similarity of a held-out batch",
            lead="Rows are pictures, columns their captions. The pairs lie on the diagonal, which stands out more "
            "and more as the model learns.",
            content=by_dataset(matrices),
        ),
        Section(
            name="queries",
            title="Nearest pictures",
            lead="The held-out pictures nearest to a text, nearest first, as the training went on. ✓ marks those "
            "of the right class.",
            content=by_dataset(queries),
        ),
    ]


def _about(run: RunFolder) -> str:
    parts = [_provenance(of_training(run.results)), _bad_samples(run.bad_samples)]
    if run.config_text:
        parts.append(f"<h3>Configuration</h3><pre>{escape(without_secrets(run.config_text).strip())}</pre>")
    return "".join(parts)


_SCORE_FIELDS = ("step", "dataset", "task", "metric", "value", "n", "low", "high", "chance")


def _provenance(results: Sequence[Result]) -> str:
    """Where the scores at the top come from; what differs between datasets is told for each."""
    values: dict[str, dict[str, str]] = {}
    for result in results:
        for key, value in result.line.items():
            if value is not None and key not in _SCORE_FIELDS:
                values.setdefault(key, {})[result.dataset] = _told(value)
    datasets = {result.dataset for result in results}
    rows = []
    for key, by_dataset in values.items():
        if len(set(by_dataset.values())) == 1 and len(by_dataset) == len(datasets):
            told = escape(next(iter(by_dataset.values())))
        else:
            told = "<br>".join(f"{escape(name)}: {escape(value)}" for name, value in by_dataset.items())
        rows.append(f"<dt>{escape(key.replace('_', ' '))}</dt><dd>{told}</dd>")
    return (
        f'<h3>Where the scores at the top come from</h3><dl class="facts">{"".join(rows)}</dl>'
        if rows
        else ""
    )


def _told(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_told(one)}" for key, one in value.items())
    if isinstance(value, float):
        return number(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _bad_samples(bad: BadSamples | None) -> str:
    if bad is None or bad.count == 0:
        return ""
    rows = "".join(f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in one)}</tr>" for one in bad.first)
    said = f"{number(bad.count)} samples could not be used and were replaced by others. The first of them:"
    table = (
        '<table><thead><tr><th scope="col">Shard</th><th scope="col">Key</th><th scope="col">Cause</th></tr>'
        f"</thead><tbody>{rows}</tbody></table>"
    )
    return f"<h3>Bad samples</h3><p>{said}</p>{scrolling('Bad samples', table)}"
