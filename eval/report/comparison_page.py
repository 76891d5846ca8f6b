"""Build the page over many models and datasets from results files and the details next to them.

One self-contained file; the same results give the same bytes.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any, Unpack

from markupsafe import Markup

from clipkit.files import write_page
from eval.datasets.dataset import TEST, list_some
from eval.features.image_models import TIMM
from eval.metrics import is_fraction
from eval.report.blocks import detail_sections
from eval.report.charts import (
    TEMPLATES,
    Bar,
    ChartLine,
    Dot,
    Headline,
    Thumbnails,
    scatter,
)
from eval.report.tables import (
    PLAIN,
    Average,
    Facts,
    Line,
    ScoreTable,
    TableRow,
    join_words,
    read_scores,
    score_table,
    select_cells,
    setting_name,
    task_tables,
)
from eval.results.records import read_all_details
from eval.results.scores import PREFIX
from eval.results.table import Model, Record, ResultTable, group_by, group_by_data, is_same_data

_HEADLINES = 4
_SUITES = 4  # with a ranking of the models
_TONES = 8
_LAYERS = 13  # layer numbers that fit on an axis as wide as a phone
_MOST_GFLOPS = 1e12  # larger values are errors and would spoil the axis
_SHOTS = re.compile(r"(\d{1,4})-shot\b[ ,]*(.*)")
_LAYER = re.compile(r"layer (\d{1,4})\b[ ,]*(.*)")
_RESNET50 = f"{TIMM}resnet50."
_SIZE = re.compile(
    r"(?i)x?[tsmblhg]|ti|big-?g|tiny|small|base|large|huge|giant|so\d+m|patch\d+|plus|\d+|quickgelu"
)
_RESOLUTION = re.compile(r"[-_](?=[2-9]\d\d)\d+")
_OTHER_COLUMNS = (  # shown elsewhere, different by dataset, or for recognizing results scored already
    "model", "weights", "architecture", "dim", "gflops", "prompts", "prompt_count", "data_revision", "captions",
    "choices", "time", "options", "train_overlap", "equal_images", "model_hash", "inputs", "lines",
)  # fmt: skip

TEMPLATES.filters["pieces"] = lambda name: re.findall(r"[^-/_: @]*[-/_: @]|[^-/_: @]+", name)


def build_comparison(results: Sequence[Path], out: Path, **facts: Unpack[Facts]) -> Path:
    """Write the page over all models and datasets of some results files and return its path.

    Args:
        results: ``results.jsonl`` files, optionally with details next to them.
        out: the page, written atomically.
        facts: about the datasets.

    Raises:
        DataError: a results file cannot be read, there are no scores, or the page cannot be written.
    """
    scores = read_scores(results)
    tables = task_tables(scores, **facts)
    as_trained = score_table(scores, **facts)
    zero_shot = tables.get("zero-shot") or replace(as_trained, lines=(), averages=())
    probe = tables.get("linear-probe")
    baseline, differences = "", dict[str, list[Bar]]()
    if probe is not None:
        baseline, differences = _compare_probes(scores.models, zero_shot, probe, facts.get("paper", {}))
    ends = [end for bars in differences.values() for bar in bars for end in (bar.value, bar.reference)]
    details, unread = read_all_details(results)
    # every line of a task records the duration of all its settings together
    seconds = {(row.model, *row.what[:4], row.seconds): row.seconds for row in scores.rows if row.seconds}
    datasets = {row.dataset for row in scores.rows}
    models = f"{len(scores.models)} models" if len(scores.models) > 1 else scores.models[0].label
    thumbnails = Thumbnails()
    page = TEMPLATES.get_template("comparison.html").render(
        title=f"{models} on {f'{len(datasets)} datasets' if len(datasets) > 1 else scores.rows[0].dataset}",
        models=scores.models,
        rows=scores.rows,
        seconds=sum(seconds.values()),
        notes=[*scores.notes, *unread],
        headlines=[_headline(as_trained, row) for row in as_trained.main_rows[:_HEADLINES]],
        leaders=_rank_models(as_trained),
        tables=tables,
        baseline=baseline,
        differences=differences,
        limits=[end for end in ends if end is not None],
        cost=_chart_costs(as_trained, probe),
        few_shot=_few_shot_chart(scores, zero_shot),
        layers=_layers_chart(scores),
        dims=_dims_chart(scores),
        details=detail_sections(scores, [*details.values()], thumbnails),
        all_scores=_list_scores(scores),
        facts_of=_list_model_facts(scores.models),
        options=_describe_options(scores.rows),
        revisions=_list_revisions(scores.rows),
        thumbnails=thumbnails,
    )
    return write_page(out, page)


def _capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]


def _headline(table: ScoreTable, row: Line | Average) -> Headline:
    """Show the best model of a row."""
    values = {i: value for i, value in enumerate(row.values) if value is not None}
    best = max(values, key=values.__getitem__)
    details = [f"best: {table.models[best].label}"] if len(table.models) > 1 else []
    cell = row.cells[best] if row.cells else None
    if cell is not None and cell.interval is not None:
        low, high = cell.interval
        details.append(f"95% interval {100 * low:.1f}% to {100 * high:.1f}%")
    if row.scope:
        details.append(row.scope)
    return Headline(what=row.title, figure=f"{100 * values[best]:.1f}", details=details, value=values[best])


def _rank_models(table: ScoreTable) -> list[tuple[Average, list[Bar]]]:
    """Rank several models, and published ones, by the means over suites."""
    leaders = []
    for average in table.averages[:_SUITES] if len(table.models) > 1 else ():
        values = zip(table.models, average.values, strict=True)
        bars = [Bar(name=model.label, value=value) for model, value in values if value is not None]
        for name, value in average.published.items():
            bars.append(Bar(name=name, value=value, note="published", muted=True))
        leaders.append((average, bars))
    return leaders


def _compare_probes(
    models: Sequence[Model], zero_shot: ScoreTable, probe: ScoreTable, paper: Mapping[str, float]
) -> tuple[str, dict[str, list[Bar]]]:
    """List zero-shot minus linear probe by dataset for each model (figure 5 of the CLIP paper).

    Compares with the linear probe of a timm model if there is one, otherwise with the model's own. If it is a
    ResNet-50, the differences in the paper are marked.

    Returns:
        The label of the timm model or "", and the differences by model.
    """
    counted = [line for line in probe.lines if line.counted]
    # the timm model with the most probes, of several the first
    probes: dict[int, int] = {}
    for i, model in enumerate(models):
        count = sum(line.cells[i] is not None for line in counted)
        if count and model.name.startswith(TIMM):
            probes[i] = count
    baseline = max(probes, key=probes.__getitem__, default=None)
    label, differences = "", dict[str, list[Bar]]()
    if baseline is not None:
        label = models[baseline].label
        references = paper if models[baseline].name.startswith(_RESNET50) else {}
        for i, model in enumerate(models):
            differences[model.label] = _list_differences(zero_shot, counted, i, baseline, references)
    if not any(differences.values()):
        label = ""
        for i, model in enumerate(models):
            differences[model.label] = _list_differences(zero_shot, counted, i, i, {})
    return label, {name: bars for name, bars in differences.items() if bars}


def _list_differences(
    zero_shot: ScoreTable, probes: Sequence[Line], model: int, baseline: int, references: Mapping[str, float]
) -> list[Bar]:
    """List a model's zero-shot scores minus the baseline's probes; of several settings of a probe the first."""
    zero_lines = {(line.dataset, line.metric): line for line in zero_shot.lines if line.counted}
    bars: dict[str, Bar] = {}
    for line in probes:
        zero_line = zero_lines.get((line.dataset, line.metric))
        first = zero_line.cells[model] if zero_line else None
        second = line.cells[baseline]
        if first is not None and second is not None and is_same_data(first, second):
            reference = references.get(line.dataset)
            bar = Bar(name=line.dataset, value=first.value - second.value, reference=reference)
            bars.setdefault(line.dataset, bar)
    return list(bars.values())


def _chart_costs(as_trained: ScoreTable, probe: ScoreTable | None) -> list[Markup]:
    """Chart means over the image tower's GFLOPs: the first one, and those of linear probes.

    The latter have a line for each family of models (figure 10 of the CLIP paper).
    """
    charts = [_chart_cost(as_trained.models, row) for row in as_trained.main_rows[:1]]
    if probe is not None:
        means = [average for average in probe.averages[:_SUITES] if not average.setting]
        charts += [_chart_cost(as_trained.models, average, families=True) for average in means]
    return [chart for chart in charts if chart]


def _chart_cost(models: Sequence[Model], row: Line | Average, *, families: bool = False) -> Markup:
    """Chart a row over the image tower's GFLOPs, if models differ in them."""
    dots: dict[int, Dot] = {}
    for i, (model, value) in enumerate(zip(models, row.values, strict=True)):
        if value is not None and model.gflops is not None and 0 < model.gflops < _MOST_GFLOPS:
            dots[i] = Dot(name=model.label, x=model.gflops, y=value, tone=i % _TONES + 1)
    if len({dot.x for dot in dots.values()}) < 2:
        return Markup()
    lines: list[tuple[Dot, Dot, bool]] = []
    if families:
        members = group_by(dots, lambda i: family(models[i]) or models[i].label)
        for j, indices in enumerate(members.values()):
            for i in indices:
                dots[i] = replace(dots[i], tone=j % _TONES + 1)
            lines += _join_family(models, {i: dots[i] for i in indices})
    title = _capitalize(row.title) if isinstance(row, Average) else row.names[0]
    notes = []
    if lines:
        notes.append("lines join models of one family, dashed lines the same model at a higher resolution")
    if len(dots) < len(models):
        notes.append(f"{len(models) - len(dots)} of {len(models)} models not shown: their cost is unknown")
    return scatter(title, [*dots.values()], lines=lines, x_unit="GFLOPs per image", note="; ".join(notes))


def _join_family(models: Sequence[Model], dots: Mapping[int, Dot]) -> list[tuple[Dot, Dot, bool]]:
    """Join the sizes of a family by cost, and each with the same architecture at higher resolutions (True)."""
    lines = []
    base: Dot | None = None
    smallest: dict[str, Dot] = {}
    for i in sorted(dots, key=lambda i: dots[i].x):
        shape = _RESOLUTION.sub("", models[i].architecture)
        if shape in smallest:
            lines.append((smallest[shape], dots[i], True))
            continue
        smallest[shape] = dots[i]
        if base is not None:
            lines.append((base, dots[i], False))
        base = dots[i]
    return lines


def family(model: Model) -> str:
    """Return a published model's kind and training, the same for all its sizes; "" for runs.

    "open_clip:ViT-L-14/openai" and "open_clip:ViT-B-32/openai" are "ViT openai".
    """
    scheme, colon, name = model.name.partition(":")
    if not colon or not scheme.isidentifier():
        return ""
    kind, _, training = name.replace(".", "/", 1).partition("/")
    words = [re.sub(r"\d.*", "", word) for word in re.split("[-_]", kind) if not _SIZE.fullmatch(word)]
    return " ".join(filter(None, (*words, training)))


@dataclass(frozen=True, kw_only=True)
class _Curve:
    """Scores of one model and variant of a setting: by number (images per class, layer), those to average."""

    model: int
    name: str
    tone: int
    dashed: bool
    points: Mapping[int, Sequence[Record]]


def _collect_curves(
    scores: ResultTable, rows: Sequence[Record], setting: re.Pattern[str], least: int = 1
) -> tuple[list[_Curve], list[int], str]:
    """Collect curves of at least ``least`` points over the datasets that all curves have, of the same data.

    Each dataset contributes its first recorded metric. A dataset with few images per class has no scores for many
    shots and contributes only to the others. If the curves share no datasets, each uses its own.

    Returns:
        The curves, all their numbers, and a description of the datasets.
    """
    metrics: dict[str, str] = {}
    points_of: dict[tuple[int, str], dict[int, dict[str, Record]]] = {}
    for row in rows:
        match = setting.fullmatch(row.setting)
        if not match or not is_fraction(row.metric, row.value):
            continue
        if metrics.setdefault(row.dataset, row.metric) == row.metric:
            variant = match[2] if row.task == "few-shot" else f"{row.task} {match[2]}".rstrip()
            points = points_of.setdefault((row.model, variant), {})
            points.setdefault(int(match[1]), {}).setdefault(row.dataset, row)
    points_of = {key: points for key, points in sorted(points_of.items()) if len(points) >= least}
    if not points_of:
        return [], [], ""
    rows_of = [
        group_by(
            (row for by_dataset in points.values() for row in by_dataset.values()), attrgetter("dataset")
        )
        for points in points_of.values()
    ]
    common = set(rows_of[0]).intersection(*rows_of)
    common = {
        name for name in common if is_same_data(*(row for own_rows in rows_of for row in own_rows[name]))
    }
    numbers = sorted({number for points in points_of.values() for number in points})
    shared: dict[int, tuple[str, ...]] = {}
    for number in numbers:
        at_number = [points[number] for points in points_of.values() if number in points]
        shared[number] = tuple(sorted(common.intersection(*at_number)))
    is_any_shared = any(shared.values())
    variants = list(dict.fromkeys(variant for _, variant in points_of))
    several = len({model for model, _ in points_of}) > 1
    curves = []
    for (model, variant), points in points_of.items():
        # named and colored by what differs between the curves
        label = scores.models[model].label
        place = variants.index(variant)
        index = model if several else place
        name = join_words(label if several else "", (variant or PLAIN) if len(variants) > 1 else "")
        averaged: dict[int, list[Record]] = {}
        for number in sorted(points):
            names = shared[number] if is_any_shared else sorted(points[number])
            if names:
                averaged[number] = [points[number][dataset] for dataset in names]
        curves.append(
            _Curve(
                model=model,
                name=name or label,
                tone=index % _TONES + 1,
                dashed=index >= _TONES or (several and place > 0),
                points=averaged,
            )
        )
    return curves, numbers, _describe_shared(shared, len(set().union(*rows_of)))


def _describe_shared(shared: Mapping[int, tuple[str, ...]], total: int) -> str:
    """Describe over which of ``total`` datasets curves are means, by the datasets shared at each number."""
    numbers_of = group_by(shared, shared.__getitem__)
    if not any(numbers_of):
        return "each line's own datasets, which differ"
    if len(numbers_of) > 1:
        parts = []
        for names, numbers in numbers_of.items():
            if names:
                parts.append(f"{len(names)} at {', '.join(map(str, numbers))}")
        return f"the datasets that all have: {'; '.join(parts)}"
    (names,) = numbers_of
    if len(names) == 1:
        return names[0]
    if len(names) < total:
        return f"the {len(names)} of {total} datasets that all have"
    return f"{total} datasets"


def _few_shot_chart(scores: ResultTable, zero_shot: ScoreTable) -> dict[str, Any]:
    """Describe mean accuracy over images per class, zero-shot at 0 (figure 6 of the CLIP paper)."""
    rows = [row for row in scores.rows if row.task == "few-shot"]
    means = [row for row in rows if not row.metric.endswith("_std")]
    deviations = {
        (row.model, row.dataset, row.setting, row.metric.removesuffix("_std")): row.value
        for row in rows
        if row.metric.endswith("_std")
    }
    curves, shots, datasets = _collect_curves(scores, means, _SHOTS)
    positions = {k: float(i) for i, k in enumerate(dict.fromkeys([0, *shots]))}
    lines = []
    for line, curve in zip(_mean_lines(curves, positions.__getitem__), curves, strict=True):
        band = []
        for (x, mean), point_rows in zip(line.points, curve.points.values(), strict=True):
            spreads = [_spread(row, deviations) for row in point_rows]
            squares = [spread**2 for spread in spreads if spread is not None]
            if len(squares) == len(spreads):
                width = 100 * math.sqrt(sum(squares)) / len(squares)
                band.append((x, mean - width, mean + width))
        lines.append(replace(line, band=band, mark=_zero_shot_mark(curve, zero_shot)))
    notes = [f"mean of {datasets}"]
    if any(line.band for line in lines):
        kind = "± standard deviation over seeds" if deviations else "interval"
        notes.append(f"band: {kind} of the mean")
    if any(line.mark is not None for line in lines):
        notes.append("rings: zero-shot")
    return {"lines": lines, "note": "; ".join(notes), "ticks": [(x, str(k)) for k, x in positions.items()]}


def _spread(row: Record, deviations: Mapping[tuple[int, str, str, str], float]) -> float | None:
    """Return the standard deviation over seeds, or else half the interval."""
    half = None
    if row.interval is not None:
        half = (row.interval[1] - row.interval[0]) / 2
    return deviations.get((row.model, row.dataset, row.setting, row.metric), half)


def _zero_shot_mark(curve: _Curve, zero_shot: ScoreTable) -> tuple[float, float] | None:
    """Return the mean zero-shot score at 0 on the datasets of the first point, if all of them have one."""
    values = {line.dataset: line.values[curve.model] for line in reversed(zero_shot.lines) if line.counted}
    rows = next(iter(curve.points.values()), ())
    marks = [value for row in rows if (value := values.get(row.dataset)) is not None]
    if not marks or len(marks) < len(rows):
        return None
    return 0.0, 100 * fmean(marks)


def _layers_chart(scores: ResultTable) -> dict[str, Any]:
    """Describe the mean accuracy of a probe at each depth, if several layers were probed."""
    curves, depths, datasets = _collect_curves(scores, scores.rows, _LAYER, least=2)
    shown = depths[::-1][:: math.ceil(len(depths) / _LAYERS) or 1]
    ticks = [(float(depth), str(depth)) for depth in reversed(shown)]
    return {"lines": _mean_lines(curves, float), "note": f"mean of {datasets}", "ticks": ticks}


def _dims_chart(scores: ResultTable) -> dict[str, Any]:
    """Describe the mean score of prefixes of the embedding and of the whole over the logarithm of their size."""
    rows_of: dict[tuple[object, ...], list[Record]] = {}
    for row in scores.rows:
        dim, setting = row.dim_and_setting
        key = row.model, *row.series[:4], setting
        rows_of.setdefault(key, []).append(replace(row, setting=f"dim {dim} {setting}".strip()))
    several = []
    for rows in rows_of.values():
        if len({row.setting for row in rows}) > 1:
            several += rows
    curves, dims, datasets = _collect_curves(scores, several, PREFIX, least=2)
    ticks = [(math.log2(dim), str(dim)) for dim in dims]
    return {"lines": _mean_lines(curves, math.log2), "note": f"mean of {datasets}", "ticks": ticks}


def _mean_lines(curves: Sequence[_Curve], position: Callable[[int], float]) -> list[ChartLine]:
    """Draw the mean score of each point of curves at ``position(number)``."""
    lines = []
    for curve in curves:
        means = {number: 100 * fmean(row.value for row in rows) for number, rows in curve.points.items()}
        points = [(position(number), mean) for number, mean in means.items()]
        lines.append(
            ChartLine(name=curve.name, points=points, tone=curve.tone, dots=True, dashed=curve.dashed)
        )
    return lines


def _list_scores(
    scores: ResultTable,
) -> list[tuple[str, int, list[tuple[TableRow, str, int | None, float | None]]]]:
    """List dataset, number of scores, and rows with description, n and chance."""
    sections = []
    for dataset, dataset_rows in group_by(scores.rows, attrgetter("dataset")).items():
        rows = []
        groups = group_by(dataset_rows, attrgetter("what"))
        for (_, split, task, prompts, setting, metric), metric_rows in groups.items():
            for group in group_by_data(metric_rows):
                cells = select_cells(group.rows, len(scores.models))
                values = tuple(None if cell is None else cell.value for cell in cells)
                description = join_words(
                    task,
                    setting_name(task, setting),
                    f"prompts {prompts}" if prompts else "",
                    "" if split == TEST else split,
                    group.note,
                )
                chance = next((row.chance for row in group.rows if row.chance is not None), None)
                table_row = TableRow(metric=metric, values=values, cells=cells)
                rows.append((table_row, description, group.n, chance))
        sections.append((dataset, len(groups), rows))
    return sections


def _list_model_facts(models: Sequence[Model]) -> tuple[dict[str, Any], list[str]]:
    """Return the provenance that all models share, and the names of fields in which they differ."""
    shared: dict[str, Any] = {}
    differing: list[str] = []
    for key in dict.fromkeys(key for model in models for key in model.provenance):
        values = [model.provenance.get(key) for model in models]
        if key in _OTHER_COLUMNS or all(value is None for value in values):
            continue
        if all(value == values[0] for value in values):
            shared[key] = values[0]
        else:
            differing.append(key)
    return shared, differing


def _describe_options(rows: Sequence[Record]) -> dict[str, str]:
    """By task, the last options of each model and dataset, with datasets if they differ."""
    last = {(row.task, row.dataset, row.model): row.text("options") for row in rows if row.text("options")}
    options = {}
    for task, keys in group_by(last, lambda key: key[0]).items():
        texts = group_by(keys, last.__getitem__)
        descriptions = []
        for text, text_keys in texts.items():
            names = list(dict.fromkeys(dataset for _, dataset, _ in text_keys))
            descriptions.append(f"{text} ({list_some(names)})" if len(texts) > 1 else text)
        options[task] = " – ".join(descriptions)
    return options


def _list_revisions(rows: Sequence[Record]) -> dict[str, str]:
    """By dataset, the revisions of its images and prompts."""
    revisions = {}
    for (dataset, split), split_rows in group_by(rows, attrgetter("dataset", "split")).items():
        texts: dict[str, None] = {}
        for row in split_rows:
            if row.data_revision:
                texts[f"images {row.data_revision}"] = None
            if row.prompts and row.task in ("zero-shot", "likelihood"):
                texts[f"prompts {row.prompt_set} {row.prompts}".replace("  ", " ")] = None
        if texts:
            revisions[dataset if split == TEST else f"{dataset}, {split}"] = "; ".join(texts)
    return revisions
