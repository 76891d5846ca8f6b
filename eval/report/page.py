"""Builds the page over many models and datasets from results files and the details beside them.

One file that carries everything in itself; all text that comes from data is escaped. The same results give the same
bytes.
"""

import math
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from clipkit.errors import DataError
from eval.features.image_models import TIMM
from eval.report.draw import (
    Bar,
    Chart,
    ChartLine,
    Dot,
    PictureBook,
    Section,
    difference_bars,
    draw,
    example_card,
    figure,
    number,
    page,
    ranked_bars,
    scatter,
    write_page,
)
from eval.report.result_set import Model, ResultSet, Row, same_data
from eval.report.scores import (
    AS_TRAINED,
    PLAIN,
    SEVERAL_TASKS,
    Average,
    Published,
    ScoreTable,
    Suites,
    is_share,
    metric_name,
    read_scores,
    score_table,
    setting_name,
    task_tables,
)
from eval.report.tables import all_scores, model_facts, score_table_html
from eval.results.details import Details, Packed, read_details
from eval.results.records import json_lines

__all__ = [
    "Block",
    "blocks_html",
    "build_comparison",
    "cost",
    "few_shot",
    "layers",
    "leaders",
    "probe_differences",
]


# --------------------------------------------------------------------------------------------------------------
# The figures over many datasets: who leads, zero-shot against a probe, score against cost, shots, layers.

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
    note = [f"mean of {_dataset_names(shared, curves)}"]
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
    note = f"mean of {_dataset_names(shared, curves)}; features before the projection, layer by layer"
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
) -> ChartLine:
    variants = list(dict.fromkeys(one.variant for one in curves))
    model, variant = results.models[curve.model].label, curve.variant or PLAIN
    several = len({one.model for one in curves}) > 1
    name = ", ".join(filter(None, (model if several else "", variant if len(variants) > 1 else "")))
    index = curve.model if several else variants.index(curve.variant)
    return ChartLine(
        name=name or model,
        points=points,
        band=band,
        tone=_tone(index),
        dashed=index >= _TONES or (several and variants.index(curve.variant) > 0),
        dots=True,
        mark=mark,
    )


def _shared(curves: Sequence[_Curve]) -> dict[int, list[str]]:
    """By shots, the datasets that all curves have, of the same data, as far as they go; {} where none has any.

    A dataset of few pictures has no score of many a class: it counts up to where all that go further have it.
    """
    every = set.intersection(*(curve.datasets for curve in curves))
    rows = {
        name: [own[name] for curve in curves for own in curve.points.values() if name in own]
        for name in every
    }
    same = {name for name in every if same_data(*rows[name])}
    found = {}
    for shots in sorted({shots for curve in curves for shots in curve.points}):
        there = [set(curve.points[shots]) for curve in curves if shots in curve.points]
        found[shots] = sorted(same.intersection(*there))
    return found if any(found.values()) else {}


def _rows_of(curve: _Curve, shared: Mapping[int, Sequence[str]]) -> list[tuple[int, list[Row]]]:
    """The scores that each point of a curve is the mean of; where no datasets are shared, its own."""
    points = (
        (shots, [rows[name] for name in (shared[shots] if shared else sorted(rows))])
        for shots, rows in sorted(curve.points.items())
    )
    return [(shots, rows) for shots, rows in points if rows]


def _dataset_names(shared: Mapping[int, Sequence[str]], curves: Sequence[_Curve]) -> str:
    """Which datasets a mean is of."""
    if not shared:
        return "each line's own datasets, which differ"
    counts: dict[tuple[str, ...], list[str]] = {}
    for shots, names in shared.items():
        counts.setdefault(tuple(names), []).append(str(shots))
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


# --------------------------------------------------------------------------------------------------------------
# What a model did on one dataset: calibration, confusion, its weakest classes, and example predictions.

_LABELLED = 20  # classes: of more, the cells of a confusion matrix carry no words
_WIDE = 12  # more rows with names need more room
_SHORT_NAME = 5  # letters of names that fit above the columns of so many classes
_SHADES = 6
_LISTED = 8  # mistakes and classes
_WAYS = {"image_to_text_mean_rank": "image to text", "text_to_image_mean_rank": "text to image"}
_CAPTIONS = (
    "The captions most similar to each picture, with cosine similarities, not probabilities. The rank is that of "
    "the first of its own; equal captions are one."
)
_FIRST = tuple(factor * 10**power for power in range(8) for factor in (1, 3))  # found among so many
_PICTURES = 12 << 20  # letters of all pictures of a page


@dataclass(frozen=True, kw_only=True)
class Block:
    """One model on one dataset: its details, and its score as it is told."""

    model: Model
    details: Details
    score: str


def blocks_html(blocks: Sequence[Block], book: PictureBook) -> str:
    """The blocks of one dataset."""
    return "".join(_block(block, book) for block in blocks)


def _block(block: Block, book: PictureBook) -> str:
    details = block.details
    facts = "".join(
        filter(None, (_found(details), _calibration(details), _confusion(details), _lists(details)))
    )
    chosen = "" if details.chosen_c is None else f", C = {number(details.chosen_c)}"
    chosen += "" if details.chosen_rate is None else f", learning rate {details.chosen_rate:g}"
    chosen += f" (chosen on {escape(details.tuned_on)})" if details.tuned_on else ""
    prompts = f"prompts {details.prompt_set}" if details.prompt_set else ""
    where = ", ".join(filter(None, (details.task, prompts, setting_name(details.task, details.setting))))
    score = f", {escape(block.score)}" if block.score else ""
    head = f"<h4>{escape(block.model.label)} <small>{escape(where)}{chosen}{score}</small></h4>"
    facts = f'<div class="facets">{facts}</div>' if facts else ""
    return (
        f'<article class="block">{head}{facts}{_examples(details, book)}</article>'
        if facts or details.examples
        else ""
    )


def _examples(details: Details, book: PictureBook) -> str:
    if not details.examples:
        return ""
    if book.size > _PICTURES:
        return '<p class="lead">Its example pictures would make this page too large.</p>'
    of_captions = details.task == "retrieval"
    count = details.candidates if of_captions else len(details.class_names)
    cards = "".join(
        example_card(one, count, details.pictures, book, cosines=of_captions) for one in details.examples
    )
    lead = f'<p class="lead">{_CAPTIONS}</p>' if of_captions else ""
    return f'{lead}<div class="examples">{cards}</div>'


def _found(details: Details) -> str:
    """Of retrieval: what share of the queries has a match among the first k, for every k."""
    ranks = {}
    for name, told in _WAYS.items():
        try:
            if name in details.values:
                ranks[told] = sorted(details.values[name].tensor().tolist())
        except DataError:
            return '<p class="note">The ranks cannot be read.</p>'
    ranks = {told: own for told, own in ranks.items() if own}
    if not ranks:
        return ""
    last = max(own[-1] for own in ranks.values())
    first = [*(k for k in _FIRST if 1.5 * k < last), last]
    lines = [
        ChartLine(
            name=told,
            points=[(float(i), 100 * bisect_right(own, k) / len(own)) for i, k in enumerate(first)],
            tone=1 + i,
            dots=True,
            summary=f"median rank {number(median(own))}",
        )
        for i, (told, own) in enumerate(ranks.items())
    ]
    return draw(
        Chart(
            title="Found among the first k",
            note="share of queries with a match there",
            lines=lines,
            unit="%",
            floor=0,
            ceiling=100,
            wide=True,
            x_name="among the first",
            x_ticks=[(float(i), number(k)) for i, k in enumerate(first)],
        )
    )


def _calibration(details: Details) -> str:
    """The reliability diagram: bars below the diagonal are surer than they are right."""
    error = details.calibration_error
    if error is None:
        return ""
    bars = []
    for one in details.bins:
        x, width = 100 * one.low, 100 * (one.high - one.low)
        right, sure = 100 * one.accuracy, 100 * one.confidence
        said = escape(f"{number(one.count)} pictures: {sure:.1f}% sure, {right:.1f}% right")
        bars.append(
            f'<g><title>{said}</title><rect x="{x + 0.4:.1f}" y="{100 - right:.1f}" width="{width - 0.8:.1f}" '
            f'height="{right:.1f}"/><path class="sure" d="M{x:.1f} {100 - sure:.1f}h{width:.1f}"/></g>'
        )
    said = f"expected calibration error {figure(100 * error, '%')}"
    return (
        f'<figure class="facet"><figcaption><b>Calibration</b> <span class="note">{said}</span></figcaption>'
        '<div class="diagram"><p class="axes up"><span>1</span><span>how often it is right</span><span>0</span></p>'
        f'<svg class="reliability" viewBox="0 0 100 100" role="img" aria-label="{said}">{"".join(bars)}'
        '<path class="diagonal" d="M0 100L100 0"/><path class="frame" d="M0 0V100H100"/></svg>'
        '<p class="axes"><span>0</span><span>how sure the model is</span><span>1</span></p></div>'
        '<p class="note">Bars: the share that is right. Lines: how sure the model was.</p></figure>'
    )


def _confusion(details: Details) -> str:
    of_classes = _matrix("Confusion", details.class_names, details.matrix, details.n)
    return of_classes + _matrix(
        "By superclass", details.superclass_names, details.superclass_matrix, details.n
    )


def _matrix(title: str, names: Sequence[str], packed: Packed | None, n: int) -> str:
    size = len(names)
    if packed is None or not size:
        return ""
    try:
        matrix = packed.tensor().view(size, size).tolist()
    except (DataError, RuntimeError):
        return '<p class="note">The confusion matrix cannot be read.</p>'
    right = sum(matrix[i][i] for i in range(size))
    said = f"{number(right)} of {number(n)} on the diagonal"
    drawn = _cells(names, matrix) if size <= _LABELLED else _drawing(matrix)
    told = f"rows are true, columns predicted; {said}"
    caption = f'<figcaption><b>{title}</b> <span class="note">{told}</span></figcaption>'
    wide = " wide" if _WIDE < size <= _LABELLED else ""
    return f'<figure class="facet confusion{wide}">{caption}{drawn}</figure>'


def _cells(names: Sequence[str], matrix: Sequence[Sequence[int]]) -> str:
    size = len(names)
    short = size <= _WIDE and all(0 < len(name) <= _SHORT_NAME for name in names)
    heads = names if short else [str(i + 1) for i in range(size)]  # numbers that the rows tell the names of
    kind = ' class="head"' if short else ""
    cells = ["<span></span>", *(f"<span{kind}>{escape(head)}</span>" for head in heads)]
    for i, row in enumerate(matrix):
        total = sum(row) or 1
        who = escape(names[i])
        told = "" if short else f" <i>{i + 1}</i>"
        cells.append(f'<span class="who" title="{who}"><span>{who or "–"}</span>{told}</span>')
        for j, count in enumerate(row):
            if not count:
                cells.append("<b></b>")
                continue
            kind = ' class="d"' if i == j else ""
            told = escape(f"{names[i]} → {names[j]}: {number(count)} ({100 * count / total:.0f}%)")
            cells.append(f'<b{kind} style="--s:{count / total:.2f}" title="{told}"></b>')
    label = f"confusion matrix of {size} classes"
    return (
        f'<div class="cells named" role="img" aria-label="{label}" style="--n:{size}">{"".join(cells)}</div>'
    )


def _drawing(matrix: Sequence[Sequence[int]]) -> str:
    """Many classes: squares in a few shades of the share of their row, the diagonal in another colour."""
    size = len(matrix)
    paths: dict[tuple[bool, int], list[str]] = {}
    for i, row in enumerate(matrix):
        total = sum(row)
        for j, count in enumerate(row):
            if count:
                shade = min(_SHADES, 1 + int(_SHADES * count / total))
                paths.setdefault((i == j, shade), []).append(f"M{j} {i}h1v1h-1z")
    drawn = "".join(
        f'<path class="{"d" if own else "off"}" fill-opacity="{0.1 + 0.9 * shade / _SHADES:.2f}" '
        f'd="{"".join(squares)}"/>'
        for (own, shade), squares in sorted(paths.items())
    )
    label = f"confusion matrix of {size} classes"
    return f'<svg class="drawn" viewBox="0 0 {size} {size}" role="img" aria-label="{label}">{drawn}</svg>'


def _lists(details: Details) -> str:
    """The most frequent mistakes, and the classes that fare worst."""
    parts = []
    names = details.class_names
    if details.mistakes:
        most = details.mistakes[0][2]
        rows = "".join(
            f"<li><span>{_quoted(names, label)} → {_quoted(names, taken)}</span><b>{number(count)}</b>"
            f'<i style="--p:{count / most:.3f}"></i></li>'
            for label, taken, count in details.mistakes[:_LISTED]
        )
        parts.append(f"<figcaption><b>Taken for another</b></figcaption><ol>{rows}</ol>")
    known = [(right / count, i) for i, (right, count) in enumerate(_pairs(details)) if count]
    if len(known) > 1:
        rows = "".join(
            f'<li><span>{_quoted(names, i)}</span><b>{100 * share:.0f}%</b><i style="--p:{share:.3f}"></i></li>'
            for share, i in sorted(known)[: _LISTED // 2]
        )
        parts.append(f"<figcaption><b>Weakest classes</b></figcaption><ol>{rows}</ol>")
    return f'<figure class="facet lists">{"".join(parts)}</figure>' if parts else ""


def _pairs(details: Details) -> list[tuple[int, int]]:
    return list(zip(details.class_right, details.class_counts, strict=True))


def _quoted(names: Sequence[str], label: int) -> str:
    return escape(names[label] or f"class {label}")


# --------------------------------------------------------------------------------------------------------------

_BLOCKS = 96  # models on datasets that are shown in detail
_HEADLINES = 4
_OPTIONS_OF = ("task", "dataset", "model", "weights")
_MAX_OPTIONS = 300
_SHORT = 12  # lines of a table that needs no unfolding
_TITLES = {
    SEVERAL_TASKS: "Suites of several tasks",
    "zero-shot": "Zero-shot",
    "retrieval": "Retrieval",
    "compositional": "Compositional",
    "linear-probe": "Linear probe",
    "knn": "Nearest neighbours",
    "fine-tune": "Fine-tuned",
    "few-shot": "Few-shot",
}


def build_comparison(
    results: Sequence[Path],
    out: Path,
    *,
    published: Published | None = None,
    suites: Suites | None = None,
    primary: Mapping[str, str] | None = None,
) -> Path:
    """Write the page over all models and datasets of some results files, and give its path.

    Args:
        results: ``results.jsonl`` files, each perhaps with details beside it.
        out: the page. It appears whole or not at all.
        published: by dataset, then model or architecture, what others measured, in 0 … 1. Those of the
            architectures that are shown stand beside them; if there are none, the first few.
        suites: by name, the datasets to take averages over.
        primary: by dataset, its primary metric; by default the first that was recorded.

    Raises:
        DataError: a results file cannot be read, there are no scores, or the page cannot be written.
    """
    found = read_scores(results)
    details, notes = _details(results)
    facts: dict[str, Any] = {"suites": suites or {}, "primary": primary or {}, "published": published or {}}
    tables = task_tables(found, **facts)
    told = _Told(details=details, notes=[*found.notes, *notes], options=_options(results))
    return write_page(out, _page(found, score_table(found, **facts), tables, told))


@dataclass(frozen=True, kw_only=True)
class _Told:
    """What the page tells beside the scores: details, notes, and by task its options with their datasets."""

    details: Sequence[Details]
    notes: Sequence[str]
    options: Mapping[str, Mapping[str, Sequence[str]]]


def _options(results: Sequence[Path]) -> dict[str, dict[str, list[str]]]:
    """What the last lines of each model, task and dataset say of them."""
    last: dict[tuple[str, ...], str] = {}
    for path in dict.fromkeys(results):
        for line in json_lines(path, [], ""):
            text, key = line.get("options"), tuple(str(line.get(name)) for name in _OPTIONS_OF)
            if isinstance(text, str) and text:
                last[key] = text[:_MAX_OPTIONS]
    options: dict[str, dict[str, list[str]]] = {}
    for (task, dataset, *_), text in last.items():
        datasets = options.setdefault(task, {}).setdefault(text, [])
        if dataset not in datasets:
            datasets.append(dataset)
    return options


def _details(results: Sequence[Path]) -> tuple[list[Details], list[str]]:
    found: dict[tuple[str, ...], Details] = {}
    notes: list[str] = []
    for path in dict.fromkeys(results):
        read, own = read_details(path)
        notes += own
        found.update({one.key: one for one in read})
    return list(found.values()), notes


def _page(found: ResultSet, whole: ScoreTable, tables: Mapping[str, ScoreTable], told: _Told) -> str:
    """The page; ``whole`` is of all that is not trained on a dataset, ``tables`` are of each task."""
    book = PictureBook()
    zero_shot = tables.get("zero-shot") or replace(whole, lines=(), averages=())
    shown = _section_of_blocks(found, told.details, book)
    sections = [
        Section(
            name="scores",
            title="Scores",
            lead=_lead([*tables.values()]),
            content=leaders(whole) + _tables(tables),
        ),
        _section_of_probes(found, zero_shot, tables.get("linear-probe")),
        Section(name="cost", title="Score against cost", content=cost(whole)),
        Section(name="few-shot", title="Few-shot", content=few_shot(found, zero_shot)),
        Section(name="layers", title="Layer by layer", content=layers(found)),
        shown,
        Section(name="all", title="All scores", content=all_scores(found)),
        Section(name="about", title="Where the scores come from", content=model_facts(found, told.options)),
    ]
    return page(_title(found), _head(found, whole, told.notes), sections, book, styles=["comparison.css"])


def _title(found: ResultSet) -> str:
    datasets = len({row.dataset for row in found.rows})
    on = f"{datasets} datasets" if datasets > 1 else found.rows[0].dataset
    models = len(found.models)
    return f"{f'{models} models' if models > 1 else found.models[0].label} on {on}"


def _head(found: ResultSet, table: ScoreTable, notes: Sequence[str]) -> str:
    listed = "".join(f"<li>{escape(note)}</li>" for note in notes)
    aside = f'<aside class="notes" aria-label="Notes"><ul>{listed}</ul></aside>' if notes else ""
    headlines = "".join(_headlines(table)[:_HEADLINES])
    scores = f'<div class="scores">{headlines}</div>' if headlines else ""
    return (
        f'<header class="top"><p class="kind">clipkit evaluation report</p><h1>{escape(_title(found))}</h1>'
        f'<p class="lead">{_sentence(found)}</p>{scores}</header>{aside}'
    )


def _sentence(found: ResultSet) -> str:
    tasks = dict.fromkeys(row.task for row in found.rows)
    text = f"{number(len(found.rows))} scores: {escape(', '.join(tasks))}."
    # all lines of a task tell the same, which is of them together, whatever their settings are
    seconds = {(row.model, *row.what[:4], row.seconds) for row in found.rows if row.seconds is not None}
    total = sum(one for *_, one in seconds if isinstance(one, float))
    if total >= 1:  # less says only that features were there already
        told = (
            f"{number(round(total, 1))} seconds" if total < 120 else f"{number(round(total / 60, 1))} minutes"
        )
        text += f" All tasks together took {told}."
    return text


def _headlines(table: ScoreTable) -> list[str]:
    """The best model of each average; without averages, of each dataset."""
    several = len(table.models) > 1
    headlines = []
    for average in table.averages:
        known = [(value, -i) for i, value in enumerate(average.cells) if value is not None]
        if known:
            value, i = max(known)
            who = table.models[-i].label if several else ""
            headlines.append(_headline(average.title, who, value, said_of(average)))
    if headlines:
        return headlines
    for line in table.lines:
        cells = [
            (cell.value, -i)
            for i, cell in enumerate(line.cells)
            if cell and is_share(cell.metric, cell.value)
        ]
        if cells and line.counted:
            value, i = max(cells)
            cell = line.cells[-i]
            interval = (
                f"95% interval {100 * cell.low:.1f}% to {100 * cell.high:.1f}%"
                if cell and cell.low is not None and cell.high is not None
                else ""
            )
            who = table.models[-i].label if several else ""
            headlines.append(_headline(f"{line.dataset} {metric_name(line.metric)}", who, value, interval))
    return headlines


def _headline(what: str, who: str, value: float, said: str) -> str:
    best = f"<span>best: {escape(who)}</span>" if who else ""
    more = f"<span>{escape(said)}</span>" if said else ""
    return (
        f'<div class="score"><p class="what">{escape(what)}</p>'
        f'<p class="figure">{100 * value:.1f}<small>%</small></p>'
        f'<div class="gauge" aria-hidden="true"><i class="bar" style="width:{100 * value:.2f}%"></i></div>'
        f'<p class="details">{best}{more}</p></div>'
    )


def _lead(tables: Sequence[ScoreTable]) -> str:
    averages = [average for table in tables for average in table.averages]
    parts = ["Percent."]
    if any(len(table.models) > 1 for table in tables):
        parts.append("The best model of each line in bold.")
    if averages:
        mean = "A mean is taken over the datasets that all models have, so that its columns compare"
        blank = any(None in average.cells for average in averages)
        parts.append(
            f"{mean}; models that have none of its datasets are left out of it (–)." if blank else f"{mean}."
        )
    if any(len(average.tasks) > 1 for average in averages):
        parts.append("A mean over several tasks is of the main task of each dataset.")
    if any(table.published for table in tables):
        parts.append("Published numbers are others' measurements, of their weights and prompts.")
    return " ".join(parts)


def _tables(tables: Mapping[str, ScoreTable]) -> str:
    """The means over several tasks and the first task's table are open, the others unfold."""
    parts: list[str] = []
    shown = False
    for task, table in tables.items():
        title = _TITLES.get(task, task)
        html = score_table_html(title, table)
        if not shown:
            parts.append((f"<h3>{escape(title)}</h3>" if [*tables] != ["zero-shot"] else "") + html)
        else:
            opened = " open" if len(table.lines) <= _SHORT else ""
            parts.append(f"<details{opened}><summary><b>{escape(title)}</b></summary>{html}</details>")
        shown = shown or bool(table.lines)
    return "".join(parts)


def _section_of_probes(found: ResultSet, zero_shot: ScoreTable, probe: ScoreTable | None) -> Section:
    """Zero-shot of each model against a linear probe: of an image model of timm if there is one, else its own."""
    whose, of_what = "linear probe", "a classifier trained on their pictures"
    content = ""
    baseline = _baseline(found, probe)
    if probe is not None and baseline is not None:
        # every model is held beside the one probe
        lines = [replace(line, cells=(line.cells[baseline],) * len(line.cells)) for line in probe.lines]
        content = probe_differences(found, zero_shot, replace(probe, lines=tuple(lines)))
    if content and baseline is not None:
        name = escape(found.models[baseline].label)
        whose, of_what = f"the linear probe of {name}", f"{of_what} with the features of {name}"
    return Section(
        name="probe",
        title="Zero-shot against linear probe",
        lead=f"Zero-shot less {whose}, in points. On datasets with a bar to the right, the names of the classes do "
        f"better than {of_what}.",
        content=content or probe_differences(found, zero_shot, probe),
    )


def _baseline(found: ResultSet, probe: ScoreTable | None) -> int | None:
    """Which model is an image model of timm: that with the most probes, the first of several."""
    if probe is None:
        return None
    counts = {
        i: sum(line.cells[i] is not None for line in probe.lines if line.counted)
        for i, model in enumerate(found.models)
        if model.name.startswith(TIMM)
    }
    return max((i for i in counts if counts[i]), key=lambda i: (counts[i], -i), default=None)


def _section_of_blocks(found: ResultSet, details: Sequence[Details], book: PictureBook) -> Section:
    """Dataset by dataset; of many models the first few, so that the page stays small."""
    by_dataset = _blocks(found, details)
    left = sum(len(blocks) for blocks in by_dataset.values())
    most = max((len(blocks) for blocks in by_dataset.values()), default=0)
    while most > 1 and sum(min(most, len(blocks)) for blocks in by_dataset.values()) > _BLOCKS:
        most -= 1
    parts: list[str] = []
    for dataset, blocks in by_dataset.items():
        content = blocks_html(blocks[:most], book)
        if content:
            left -= len(blocks[:most])
            opened = "" if parts else " open"
            labels = list(dict.fromkeys(block.model.label for block in blocks))
            names = f"{len(labels)} models" if len(labels) > 1 else labels[0]
            parts.append(
                f'<details class="dataset"{opened}><summary><b>{escape(dataset)}</b> '
                f"<small>{escape(names)}</small></summary>{content}</details>"
            )
    lead = []
    if any(block.details.examples for blocks in by_dataset.values() for block in blocks[:most]):
        lead.append(
            "Examples are random right and random wrong predictions in turn, whatever the accuracy is. ✓ marks "
            "what is right."
        )
    if left:
        lead.append(
            f"Of each dataset the first {most} are shown." if most > 1 else "Of each dataset one is shown."
        )
    return Section(name="datasets", title="Dataset by dataset", lead=" ".join(lead), content="".join(parts))


def _blocks(found: ResultSet, details: Sequence[Details]) -> dict[str, list[Block]]:
    """Details by dataset in the order of the results; the first task of each model and dataset that has any."""
    numbers = {model.weights: i for i, model in reversed(list(enumerate(found.models)))}
    datasets = {name: i for i, name in enumerate(dict.fromkeys(row.dataset for row in found.rows))}
    scores = {(row.model, *row.what[:5]): row for row in reversed(found.rows)}
    blocks: dict[str, dict[int, list[Block]]] = {}
    ordered = sorted(
        (one for one in details if one.weights in numbers and one.dataset in datasets),
        key=lambda one: (datasets[one.dataset], numbers[one.weights], one.task not in AS_TRAINED, one.key),
    )
    for one in ordered:
        model = numbers[one.weights]
        row = scores.get((model, one.dataset, one.split, one.task, one.prompt_set, one.setting))
        score = ""
        if row is not None:
            value = figure(100 * row.value, "%") if is_share(row.metric, row.value) else number(row.value)
            score = f"{metric_name(row.metric)} {value}"
        block = Block(model=found.models[model], details=one, score=score)
        blocks.setdefault(one.dataset, {}).setdefault(model, []).append(block)
    return {
        dataset: [own[0] for own in by_model.values()]
        + [more for own in by_model.values() for more in own[1:]]
        for dataset, by_model in blocks.items()
    }
