"""Build the page over many models and datasets from results files and the details next to them.

One self-contained file; the same results give the same bytes.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Unpack

from markupsafe import Markup

from clipkit.files import write_page
from eval.datasets.dataset import TEST, list_some
from eval.features.image_models import TIMM
from eval.report.blocks import detail_sections
from eval.report.charts import (
    TEMPLATES,
    TONES,
    Bar,
    Dot,
    Headline,
    Thumbnails,
    draw_scatter,
)
from eval.report.curves import dims_chart, few_shot_chart, layers_chart
from eval.report.tables import (
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
from eval.results.records import read_all_details
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
        headlines=[_build_headline(as_trained, row) for row in as_trained.main_rows[:_HEADLINES]],
        leaders=_rank_models(as_trained),
        tables=tables,
        baseline=baseline,
        differences=differences,
        limits=[end for end in ends if end is not None],
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
    """Show the best model of a row."""
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
    """Rank several models, and published ones, by the means over suites."""
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
    """Chart a row over the image tower's GFLOPs, if models differ in them."""
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
