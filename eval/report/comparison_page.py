"""Build the page over many models and datasets from results files and the details beside them.

One self-contained file; the same results give the same bytes.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from markupsafe import Markup

from clipkit.files.pages import write_page
from eval.datasets.dataset import some
from eval.features.image_models import TIMM
from eval.report.charts import TEMPLATES, figure, number
from eval.report.comparison_charts import average_scope, cost, few_shot, layers, leaders, probe_differences
from eval.report.dataset_blocks import Block, blocks_html
from eval.report.images import Thumbnails
from eval.report.result_set import DataGroup, ResultSet, Row, by_data
from eval.report.run_page import value_text
from eval.report.scores import (
    AS_TRAINED,
    SEVERAL_TASKS,
    Headline,
    Line,
    Published,
    ScoreTable,
    Suites,
    is_share,
    lower_is_better,
    metric_name,
    read_scores,
    score_table,
    setting_name,
    task_tables,
)
from eval.results.details import Details, read_details
from eval.results.records import json_lines

__all__ = ["build_comparison"]

_BLOCKS = 96  # models on datasets that are shown in detail
_HEADLINES = 4
_FEW = 3  # up to this many models, cells show intervals
_OPTIONS_OF = ("task", "dataset", "model", "weights")
_MAX_OPTIONS = 300  # characters
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
_OTHER_COLUMNS = (  # shown elsewhere, or different by dataset
    "model", "weights", "architecture", "gflops", "prompts", "prompt_count", "data_revision", "captions", "choices",
    "time", "options", "train_overlap",
)  # fmt: skip
_FOR_PROGRAMS = ("model_hash", "inputs", "lines")  # used to recognize results scored already
_MARKS = re.compile(r"[()']|,(?=\))")
_OPTION = re.compile(r"(\w+)=(\([^()]*\)|[^\s()]+)(?: |$)")


def build_comparison(
    results: Sequence[Path],
    out: Path,
    *,
    published: Published | None = None,
    suites: Suites | None = None,
    primary: Mapping[str, str] | None = None,
) -> Path:
    """Write the page over all models and datasets of some results files and return its path.

    Args:
        results: ``results.jsonl`` files, optionally with details beside them.
        out: the page, written atomically.
        published: by dataset, then model or architecture, published numbers in 0–1. Those of the architectures
            shown are listed beside them; if there are none, the first few.
        suites: by name, the datasets to average over.
        primary: by dataset, its primary metric; by default the first recorded.

    Raises:
        DataError: a results file cannot be read, there are no scores, or the page cannot be written.
    """
    found = read_scores(results)
    details, notes = _details(results)
    facts: dict[str, Any] = {"suites": suites or {}, "primary": primary or {}, "published": published or {}}
    tables = task_tables(found, **facts)
    whole = score_table(found, **facts)  # of all tasks that train nothing
    zero_shot = tables.get("zero-shot") or replace(whole, lines=(), averages=())
    probe_lead, probe = _probe(found, zero_shot, tables.get("linear-probe"))
    datasets = len({row.dataset for row in found.rows})
    models = f"{len(found.models)} models" if len(found.models) > 1 else found.models[0].label
    thumbnails = Thumbnails()
    page = TEMPLATES.get_template("comparison.html").render(
        title=f"{models} on {f'{datasets} datasets' if datasets > 1 else found.rows[0].dataset}",
        lead=_sentence(found),
        notes=[*found.notes, *notes],
        headlines=_headlines(whole)[:_HEADLINES],
        leaders=leaders(whole),
        scores_lead=_lead([*tables.values()]),
        tables=[_score_table(task, table) for task, table in tables.items()],
        probe_lead=probe_lead,
        probe=probe,
        cost=cost(whole),
        few_shot=few_shot(found, zero_shot),
        layers=layers(found),
        details=_detail_sections(found, details, thumbnails),
        all_scores=_all_scores(found),
        models=found.models,
        facts_of=_model_facts(found),
        options=_options(results),
        revisions=_revisions(found),
        value_text=value_text,
        thumbnails=thumbnails,
    )
    return write_page(out, page)


def _details(results: Sequence[Path]) -> tuple[list[Details], list[str]]:
    found: dict[tuple[str, ...], Details] = {}
    notes: list[str] = []
    for path in dict.fromkeys(results):
        read, own = read_details(path)
        notes += own
        found.update({one.key: one for one in read})
    return list(found.values()), notes


# --------------------------------------------------------------------------------------------------------------
# Head


def _sentence(found: ResultSet) -> str:
    tasks = dict.fromkeys(row.task for row in found.rows)
    text = f"{number(len(found.rows))} scores: {', '.join(tasks)}."
    # every line of a task records the time of all its settings together
    seconds = {(row.model, *row.what[:4], row.seconds) for row in found.rows if row.seconds is not None}
    total = sum(one for *_, one in seconds if isinstance(one, float))
    if total >= 1:  # less only means that features were cached
        short = total < 120
        duration = f"{number(round(total if short else total / 60, 1))} {'seconds' if short else 'minutes'}"
        text += f" All tasks together took {duration}."
    return text


def _headlines(table: ScoreTable) -> list[Headline]:
    """Show the best model of each average; without averages, of each dataset."""

    def headline(what: str, value: float, i: int, more: str) -> Headline:
        best = [f"best: {table.models[i].label}"] if len(table.models) > 1 else []
        return Headline(
            what=what, figure=f"{100 * value:.1f}", details=[*best, *filter(None, [more])], value=value
        )

    found = []
    for average in table.averages:
        known = [(value, -i) for i, value in enumerate(average.cells) if value is not None]
        if known:
            value, i = max(known)
            found.append(headline(average.title, value, -i, average_scope(average)))
    if found:
        return found
    for line in table.lines:
        cells = [
            (cell.value, -i)
            for i, cell in enumerate(line.cells)
            if cell and is_share(cell.metric, cell.value)
        ]
        if cells and line.counted:
            value, i = max(cells)
            best = line.cells[-i]
            interval = ""
            if best and best.low is not None and best.high is not None:
                interval = f"95% interval {100 * best.low:.1f}% to {100 * best.high:.1f}%"
            found.append(headline(f"{line.dataset} {metric_name(line.metric)}", value, -i, interval))
    return found


def _lead(tables: Sequence[ScoreTable]) -> str:
    averages = [average for table in tables for average in table.averages]
    parts = ["Percent."]
    if any(len(table.models) > 1 for table in tables):
        parts.append("The best model of each row is in bold.")
    if averages:
        mean = "A mean covers the datasets that all models have, so that columns are comparable"
        blank = any(None in average.cells for average in averages)
        parts.append(
            f"{mean}; models that have none of its datasets are left out (–)." if blank else f"{mean}."
        )
    if any(len(average.tasks) > 1 for average in averages):
        parts.append("A mean over several tasks uses the main task of each dataset.")
    if any(table.published for table in tables):
        parts.append("Published numbers were measured by others, with their weights and prompts.")
    return " ".join(parts)


# --------------------------------------------------------------------------------------------------------------
# Tables


@dataclass(frozen=True, kw_only=True)
class _Cell:
    """One score: ``bar`` is its value in 0–1, if it is a fraction."""

    text: str
    small: str = ""
    title: str = ""
    bar: float | None = None
    best: bool = False


@dataclass(frozen=True, kw_only=True)
class _TableRow:
    """A row of scores; None where a model has none."""

    name: str
    small: str
    cells: Sequence[_Cell | None]
    others: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class _Table:
    """The table of one task: ``usual`` is the metric of most lines, which only the others name."""

    title: str
    table: ScoreTable
    usual: str
    means: Sequence[_TableRow]
    rows: Sequence[_TableRow]
    few: bool


def _score_table(task: str, table: ScoreTable) -> _Table:
    metrics = [line.metric for line in table.lines]
    usual = max(dict.fromkeys(metrics), key=metrics.count, default="")
    few = len(table.models) <= _FEW
    means = []
    for average in table.averages:
        tasks = f": {average.task}" if len(average.tasks) > 1 else ""
        means.append(
            _TableRow(
                name=average.name,
                small=f"over {average.label}{tasks}",
                cells=_cells(average.cells, share=True),
                others=[_number(one, share=True) for one in average.published],
            )
        )
    rows = [_line_row(line, few, usual) for line in table.lines]
    title = _TITLES.get(task, task)
    return _Table(title=title, table=table, usual=metric_name(usual), means=means, rows=rows, few=few)


def _line_row(line: Line, few: bool, usual: str) -> _TableRow:
    values = [None if cell is None else cell.value for cell in line.cells]
    bounds = [one for cell in line.cells if cell for one in (cell.low, cell.high, cell.chance)]
    share = is_share(line.metric, *values, *bounds)
    note = f"{line.note}, ".removeprefix(f"{line.task}, ").removesuffix(", ")  # the heading names the task
    return _TableRow(
        name=line.dataset,
        small=", ".join(filter(None, (metric_name(line.metric) if line.metric != usual else "", note))),
        cells=_cells(values, share=share, metric=line.metric, scores=line.cells, few=few),
        others=[_number(one, share=share) for one in line.published],
    )


def _number(value: float | None, *, share: bool, digits: int = 1) -> str:
    if value is None:
        return ""
    return f"{100 * value:.{digits}f}" if share else number(value)


def _cells(
    values: Sequence[float | None],
    *,
    share: bool,
    metric: str = "",
    scores: Sequence[Row | None] = (),
    few: bool = False,
) -> list[_Cell | None]:
    """Format the cells of a row; the best of several fractions is marked, with those that look equal."""
    texts = [_number(value, share=share) for value in values]
    known = [value for value in values if value is not None]
    best = ""
    if share and len(known) > 1:
        best = texts[values.index((min if lower_is_better(metric) else max)(known))]
    cells: list[_Cell | None] = []
    for i, (value, text) in enumerate(zip(values, texts, strict=True)):
        score = scores[i] if scores else None
        interval = _interval(score, share)
        title = [f"95%: {interval}"] if interval else []
        if score is not None and score.chance is not None:
            title.append(f"chance {figure(100 * score.chance, '%') if share else number(score.chance)}")
        if score is not None and score.n is not None:
            title.append(f"n = {number(score.n)}")
        cell = _Cell(
            text=text,
            small=interval if few else "",
            title=", ".join(title),
            bar=value if share else None,
            best=text == best,
        )
        cells.append(None if value is None else cell)
    return cells


def _interval(row: Row | None, share: bool) -> str:
    if row is None or row.low is None or row.high is None:
        return ""
    return f"{_number(row.low, share=share)}–{_number(row.high, share=share)}"


def _all_scores(results: ResultSet) -> list[tuple[str, int, list[_TableRow]]]:
    """List dataset, number of scores and rows; a row's ``others`` are n and chance."""
    by_dataset: dict[str, dict[tuple[str, ...], list[Row]]] = {}
    for row in results.rows:
        by_dataset.setdefault(row.dataset, {}).setdefault(row.what, []).append(row)
    return [
        (
            dataset,
            len(rows),
            [
                _scores_row(what, group, len(results.models))
                for what, own in rows.items()
                for group in by_data(own)
            ],
        )
        for dataset, rows in by_dataset.items()
    ]


def _scores_row(what: tuple[str, ...], group: DataGroup, models: int) -> _TableRow:
    _, split, task, prompts, setting, metric = what
    rows = {row.model: row for row in group.rows}
    share = is_share(
        metric, *(x for row in rows.values() for x in (row.value, row.low, row.high, row.chance))
    )
    prompts = prompts and f"prompts {prompts}"
    parts = (task, setting_name(task, setting), prompts, "" if split == "test" else split, group.note)
    cells = [
        _Cell(text=_number(row.value, share=share, digits=2), small=_interval(row, share))
        if (row := rows.get(i))
        else None
        for i in range(models)
    ]
    chance = next((row.chance for row in rows.values() if row.chance is not None), None)
    return _TableRow(
        name=metric_name(metric),
        small=", ".join(filter(None, parts)),
        cells=cells,
        others=(
            "" if group.n is None else number(group.n),
            "" if chance is None else figure(100 * chance, "%") if share else number(chance),
        ),
    )


# --------------------------------------------------------------------------------------------------------------
# Zero-shot against probes, and details by dataset


def _probe(found: ResultSet, zero_shot: ScoreTable, probe: ScoreTable | None) -> tuple[str, list[Markup]]:
    """Compare each model's zero-shot with the linear probe of a timm model if there is one, else with its own."""
    name, classifier = "linear probe", "a classifier trained on their images"
    # the timm model with the most probes, of several the first
    counts = {
        i: sum(line.cells[i] is not None for line in probe.lines if line.counted)
        for i, model in enumerate(found.models if probe else ())
        if model.name.startswith(TIMM) and probe
    }
    baseline = max((i for i in counts if counts[i]), key=lambda i: (counts[i], -i), default=None)
    charts: list[Markup] = []
    if probe is not None and baseline is not None:
        lines = [replace(line, cells=(line.cells[baseline],) * len(line.cells)) for line in probe.lines]
        charts = probe_differences(found, zero_shot, replace(probe, lines=tuple(lines)))
        if charts:
            label = found.models[baseline].label
            name, classifier = f"the linear probe of {label}", f"{classifier} with the features of {label}"
    lead = (
        f"Zero-shot minus {name}, in percentage points. On datasets with a bar to the right, class names work "
        f"better than {classifier}."
    )
    return lead, charts or probe_differences(found, zero_shot, probe)


@dataclass(frozen=True, kw_only=True)
class _DetailSections:
    """Details by dataset: (dataset, models, content)."""

    lead: str
    datasets: Sequence[tuple[str, str, Markup]]


def _detail_sections(found: ResultSet, details: Sequence[Details], thumbnails: Thumbnails) -> _DetailSections:
    """Render details by dataset; of many models only the first few, so that the page stays small."""
    by_dataset = _blocks(found, details)
    left = sum(len(blocks) for blocks in by_dataset.values())
    most = max((len(blocks) for blocks in by_dataset.values()), default=0)
    while most > 1 and sum(min(most, len(blocks)) for blocks in by_dataset.values()) > _BLOCKS:
        most -= 1
    datasets = []
    for dataset, blocks in by_dataset.items():
        content = blocks_html(blocks[:most], thumbnails)
        if content.strip():
            left -= len(blocks[:most])
            labels = list(dict.fromkeys(block.model.label for block in blocks))
            datasets.append((dataset, f"{len(labels)} models" if len(labels) > 1 else labels[0], content))
    lead = []
    if any(block.details.examples for blocks in by_dataset.values() for block in blocks[:most]):
        lead.append(
            "Examples alternate between random correct and random wrong predictions, whatever the accuracy. ✓ "
            "marks correct ones."
        )
    if left:
        lead.append(
            f"The first {most} models of each dataset are shown."
            if most > 1
            else "One model of each dataset is shown."
        )
    return _DetailSections(lead=" ".join(lead), datasets=datasets)


def _blocks(found: ResultSet, details: Sequence[Details]) -> dict[str, list[Block]]:
    """Collect details by dataset in the order of the results, first one task of every model, then the others."""
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
        dataset: [own[0] for own in by_model.values()] + [one for own in by_model.values() for one in own[1:]]
        for dataset, by_model in blocks.items()
    }


# --------------------------------------------------------------------------------------------------------------
# Provenance


@dataclass(frozen=True, kw_only=True)
class _ModelFacts:
    """What the lines of all models agree on, and the names of what they do not."""

    shared: Mapping[str, Any]
    own: Sequence[str]


def _model_facts(results: ResultSet) -> _ModelFacts:
    shared: dict[str, Any] = {}
    own: list[str] = []
    for key in dict.fromkeys(key for model in results.models for key in model.provenance):
        values = [model.provenance.get(key) for model in results.models]
        if key in (*_OTHER_COLUMNS, *_FOR_PROGRAMS) or all(value is None for value in values):
            continue
        if all(value == values[0] for value in values):
            shared[key] = values[0]
        else:
            own.append(key)
    return _ModelFacts(shared=shared, own=own)


def _options(results: Sequence[Path]) -> dict[str, str]:
    """By task, the options in the last lines of each model and dataset, with datasets where these differ."""
    last: dict[tuple[str, ...], str] = {}
    for path in dict.fromkeys(results):
        for line in json_lines(path, [], ""):
            text, key = line.get("options"), tuple(str(line.get(name)) for name in _OPTIONS_OF)
            if isinstance(text, str) and text:
                last[key] = text[:_MAX_OPTIONS]
    tasks: dict[str, dict[str, dict[str, None]]] = {}
    for (task, dataset, *_), text in last.items():
        tasks.setdefault(task, {}).setdefault(text, {})[dataset] = None
    options = {}
    for task, by_text in tasks.items():
        shown = []
        for text, datasets in by_text.items():
            words = text
            if "".join(match[0] for match in _OPTION.finditer(text)) == text:
                values = {"True": "yes", "False": "no"}
                words = "; ".join(
                    f"{name.replace('_', ' ')} {values.get(value, _MARKS.sub('', value))}"
                    for name, value in _OPTION.findall(text)
                )
            shown.append(f"{words} ({some(list(datasets))})" if len(by_text) > 1 else words)
        options[task] = " – ".join(shown)
    return options


def _revisions(results: ResultSet) -> dict[str, str]:
    """By dataset, the revisions of its images and prompts."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for row in results.rows:
        seen = found.setdefault((row.dataset, row.split), {})
        if row.data_revision:
            seen[f"images {row.data_revision}"] = None
        if row.prompts and row.task == "zero-shot":
            seen[f"prompts {' '.join(filter(None, (row.prompt_set, row.prompts)))}"] = None
    return {
        name if split == "test" else f"{name}, {split}": "; ".join(seen)
        for (name, split), seen in found.items()
        if seen
    }


TEMPLATES.filters["pieces"] = lambda name: re.findall(r"[^-/_: @]*[-/_: @]|[^-/_: @]+", name)
