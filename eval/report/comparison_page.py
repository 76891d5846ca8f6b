"""Build the page over many models and datasets from results files and the details next to them.

One self-contained file; the same results give the same bytes.
"""

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from statistics import fmean, median
from typing import Any, Unpack

from markupsafe import Markup

from clipkit.errors import DataError
from clipkit.files import write_page
from eval.datasets.dataset import TEST, list_some
from eval.features.adapters import TIMM
from eval.metrics import is_fraction, metric_title
from eval.report.charts import (
    TEMPLATES,
    TONES,
    Bar,
    ChartLine,
    Dot,
    Headline,
    Thumbnails,
    draw_chart,
    draw_scatter,
    format_number,
    load_macro,
)
from eval.report.tables import (
    AS_TRAINED,
    PLAIN,
    Average,
    Facts,
    Line,
    ScoreTable,
    TableRow,
    build_row,
    format_setting,
    join_words,
    read_scores,
    score_table,
    task_tables,
)
from eval.results.records import PREFIX, Details, Packed, read_all_details
from eval.results.table import Model, Record, ResultTable, group_by, group_by_data, is_same_data

_HEADLINES = 4
_SUITES = 4  # with a ranking of the models

_MOST_GFLOPS = 1e12  # larger values are errors and would spoil the axis
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
        headlines=[_build_headline(as_trained, row) for row in as_trained.main_rows[:_HEADLINES]],
        leaders=_rank_models(as_trained),
        tables=tables,
        baseline=baseline,
        differences=differences,
        limits=[end for end in ends if end is not None],
        ranking=facts.get("ranking"),
        cost=_chart_costs(as_trained, probe),
        few_shot=few_shot_chart(scores, zero_shot),
        layers=layers_chart(scores),
        dims=dims_chart(scores),
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


def _build_headline(table: ScoreTable, row: Line | Average) -> Headline:
    best = max(row.values, key=row.values.__getitem__)
    value = row.values[best]
    details = [f"best: {table.models[best].label}"] if len(table.models) > 1 else []
    interval = row.cells[best].interval if row.cells else None
    if interval is not None:
        low, high = interval
        details.append(f"95% interval {100 * low:.1f}% to {100 * high:.1f}%")
    if row.scope:
        details.append(row.scope)
    return Headline(what=row.title, figure=f"{100 * value:.1f}", details=details, value=value)


def _rank_models(table: ScoreTable) -> list[tuple[Average, list[Bar]]]:
    leaders = []
    for average in table.averages[:_SUITES] if len(table.models) > 1 else ():
        bars = [Bar(name=table.models[i].label, value=value) for i, value in average.values.items()]
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
        count = sum(i in line.cells for line in counted)
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
        first = zero_line.cells.get(model) if zero_line else None
        second = line.cells.get(baseline)
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
    dots: dict[int, Dot] = {}
    for i, value in row.values.items():
        model = models[i]
        if model.gflops is not None and 0 < model.gflops < _MOST_GFLOPS:
            dots[i] = Dot(name=model.label, x=model.gflops, y=value, tone=i % TONES + 1)
    if len({dot.x for dot in dots.values()}) < 2:
        return Markup()
    lines: list[tuple[Dot, Dot, bool]] = []
    if families:
        members = group_by(dots, lambda i: name_family(models[i]) or models[i].label)
        for j, indices in enumerate(members.values()):
            for i in indices:
                dots[i] = replace(dots[i], tone=j % TONES + 1)
            lines += _join_family(models, {i: dots[i] for i in indices})
    title = _capitalize(row.title) if isinstance(row, Average) else row.names[0]
    notes = []
    if lines:
        notes.append("lines join models of one family, dashed lines the same model at a higher resolution")
    if len(dots) < len(models):
        notes.append(f"{len(models) - len(dots)} of {len(models)} models not shown: their cost is unknown")
    return draw_scatter(
        title, [*dots.values()], lines=lines, x_unit="GFLOPs per image", note="; ".join(notes)
    )


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


def name_family(model: Model) -> str:
    """Return a published model's kind and training, the same for all its sizes; "" for runs.

    "open_clip:ViT-L-14/openai" and "open_clip:ViT-B-32/openai" are "ViT openai".
    """
    scheme, colon, name = model.name.partition(":")
    if not colon or not scheme.isidentifier():
        return ""
    kind, _, training = name.replace(".", "/", 1).partition("/")
    words = [re.sub(r"\d.*", "", word) for word in re.split("[-_]", kind) if not _SIZE.fullmatch(word)]
    return " ".join(filter(None, (*words, training)))


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
                description = join_words(
                    task,
                    format_setting(task, setting),
                    f"prompts {prompts}" if prompts else "",
                    "" if split == TEST else split,
                    group.note,
                )
                chance = next((row.chance for row in group.rows if row.chance is not None), None)
                rows.append((build_row(metric, group.rows), description, group.n, chance))
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


# --------------------------------------------------------------------------------------------------------------
# Curves over images per class, layers and dimensions: means over the datasets that all curves have.

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


# --------------------------------------------------------------------------------------------------------------
# Details of models on datasets: ranks, calibration, confusion, frequent mistakes and examples.

_BLOCKS = 96  # models on datasets that are shown in detail
_SHADES = 6  # of a confusion matrix
_LISTED = 8  # mistakes and classes


@dataclass(frozen=True, kw_only=True)
class Block:
    """The details of one model on one dataset; ``score`` is its main score as text."""

    model: Model
    details: Details
    score: str

    @property
    def heading(self) -> str:
        """Task, prompts, setting, hyperparameters and score."""
        details = self.details
        text = join_words(
            details.task,
            f"prompts {details.prompt_set}" if details.prompt_set else "",
            format_setting(details.task, details.setting),
            f"C = {format_number(details.chosen_c)}" if details.chosen_c is not None else "",
            f"learning rate {details.chosen_rate:g}" if details.chosen_rate is not None else "",
        )
        if details.tuned_on:
            text += f" (chosen on {details.tuned_on})"
        return join_words(text, self.score)

    @property
    def recall(self) -> Markup | None:
        """For retrieval, a chart of the fraction of queries with a match among the first k; None if unreadable."""
        ranks: dict[str, list[int]] = {}
        for direction in ("image_to_text", "text_to_image"):
            packed = self.details.values.get(f"{direction}_mean_rank")
            if packed is not None and packed.n:
                try:
                    ranks[direction.replace("_", " ")] = sorted(packed.tensor().tolist())
                except DataError:
                    return None
        if not ranks:
            return Markup()
        last = max(query_ranks[-1] for query_ranks in ranks.values())
        steps = [factor * 10**power for power in range(8) for factor in (1, 3)]
        first = [*(k for k in steps if 1.5 * k < last), last]
        lines = []
        for tone, (direction, query_ranks) in enumerate(ranks.items(), start=1):
            recalls = [100 * bisect_right(query_ranks, k) / len(query_ranks) for k in first]
            lines.append(
                ChartLine(
                    name=direction,
                    points=[(float(i), recall) for i, recall in enumerate(recalls)],
                    tone=tone,
                    dots=True,
                    summary=f"median rank {format_number(median(query_ranks))}",
                )
            )
        return draw_chart(
            "Found among the first k",
            lines,
            note="fraction of queries with a match among them",
            unit="%",
            floor=0,
            ceiling=100,
            wide=True,
            x_name="among the first",
            x_ticks=[(float(i), format_number(k)) for i, k in enumerate(first)],
        )

    @property
    def confusions(self) -> list[dict[str, Any]]:
        """The confusion matrices of classes and superclasses."""
        details = self.details
        matrices = (
            ("Confusion", details.class_names, details.matrix),
            ("By superclass", details.superclass_names, details.superclass_matrix),
        )
        return [
            _prepare_confusion(title, names, packed)
            for title, names, packed in matrices
            if packed is not None and names
        ]

    @property
    def mistakes(self) -> list[tuple[str, str, int]]:
        """The most frequent mistakes: true class, predicted class, count."""
        frequent = self.details.mistakes[:_LISTED]
        return [(self._class(label), self._class(predicted), count) for label, predicted, count in frequent]

    @property
    def weakest(self) -> list[tuple[str, float]]:
        """The classes of the lowest accuracy, if there are several classes."""
        pairs = zip(self.details.class_right, self.details.class_counts, strict=True)
        accuracies = sorted((right / count, i) for i, (right, count) in enumerate(pairs) if count)
        if len(accuracies) < 2:
            return []
        return [(self._class(i), accuracy) for accuracy, i in accuracies[: _LISTED // 2]]

    def _class(self, label: int) -> str:
        return self.details.class_names[label] or f"class {label}"


def _prepare_confusion(title: str, names: Sequence[str], packed: Packed) -> dict[str, Any]:
    """Prepare a confusion matrix; rows are true, ``counts`` None if unreadable.

    ``squares`` draws many classes: whether on the diagonal, opacity, and path of all squares of one shade.
    """
    try:
        counts = packed.tensor().view(len(names), len(names)).tolist()
    except (DataError, RuntimeError):
        return {"title": title, "names": names, "counts": None, "diagonal": 0, "squares": []}
    paths: dict[tuple[bool, int], str] = {}
    for i, row in enumerate(counts):
        for j, count in enumerate(row):
            if count:
                key = i == j, min(_SHADES, 1 + int(_SHADES * count / sum(row)))
                paths[key] = paths.get(key, "") + f"M{j} {i}h1v1h-1z"
    squares = [
        (on_diagonal, 0.1 + 0.9 * shade / _SHADES, paths[on_diagonal, shade])
        for on_diagonal, shade in sorted(paths)
    ]
    diagonal = sum(row[i] for i, row in enumerate(counts))
    return {"title": title, "names": names, "counts": counts, "diagonal": diagonal, "squares": squares}


def blocks_html(blocks: Sequence[Block], thumbnails: Thumbnails) -> Markup:
    """Render the blocks of one dataset."""
    return load_macro("blocks.html", "blocks")(blocks, thumbnails)


def detail_sections(
    scores: ResultTable, details: Sequence[Details], thumbnails: Thumbnails
) -> tuple[str, list[tuple[str, str, Markup]]]:
    """Render details by dataset; of many models only the first few, so that the page stays small.

    Returns:
        An introduction, and by dataset its name, models and content.
    """
    datasets = {}
    for dataset, blocks in group_by(
        _sort_blocks(scores, details), lambda block: block.details.dataset
    ).items():
        # first one task of every model, then the others
        first = {block.model.label: block for block in reversed(blocks)}
        datasets[dataset] = sorted(blocks, key=lambda block: first[block.model.label] is not block)
    most = max(map(len, datasets.values()), default=0)
    while most > 1 and sum(min(most, len(blocks)) for blocks in datasets.values()) > _BLOCKS:
        most -= 1
    left_out = sum(map(len, datasets.values()))
    has_examples = False
    sections = []
    for dataset, blocks in datasets.items():
        has_examples |= any(block.details.examples for block in blocks[:most])
        content = blocks_html(blocks[:most], thumbnails)
        if content.strip():
            left_out -= len(blocks[:most])
            labels = list(dict.fromkeys(block.model.label for block in blocks))
            sections.append((dataset, f"{len(labels)} models" if len(labels) > 1 else labels[0], content))
    lead = []
    if has_examples:
        lead.append(
            "Examples alternate between random correct and random wrong predictions, whatever the accuracy. ✓ "
            "marks correct ones."
        )
    if left_out and most > 1:
        lead.append(f"The first {most} models of each dataset are shown.")
    elif left_out:
        lead.append("One model of each dataset is shown.")
    return " ".join(lead), sections


def _sort_blocks(scores: ResultTable, details: Sequence[Details]) -> list[Block]:
    models = {model.weights: i for i, model in reversed(list(enumerate(scores.models)))}
    order = {name: i for i, name in enumerate(dict.fromkeys(row.dataset for row in scores.rows))}
    rows: dict[tuple[int | str, ...], Record] = {}
    for row in reversed(scores.rows):
        rows[row.model, *row.series] = row
    shown = [record for record in details if record.weights in models and record.dataset in order]

    def position(record: Details) -> tuple[int, int, bool, tuple[str, ...]]:
        is_trained = record.task not in AS_TRAINED
        return order[record.dataset], models[record.weights], is_trained, record.key

    blocks = []
    for record in sorted(shown, key=position):
        model = models[record.weights]
        main = rows.get((model, *record.key[1:]))
        score = ""
        if main is not None:
            value = TableRow(metric=main.metric, values={model: main.value}).format_value(main.value)
            score = f"{metric_title(main.metric)} {value}"
        blocks.append(Block(model=scores.models[model], details=record, score=score))
    return blocks
