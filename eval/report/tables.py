"""The table of models × datasets with averages and published numbers, and all scores as CSV, LaTeX and Markdown.

A dataset's score is its primary metric, in its main task and with the prompts that most models were scored with. An
average covers the datasets that every model has, of those models that have any, so that columns are comparable. A
suite's average uses the main task of each dataset, and is left out if over half of the suite is unavailable.
Datasets in no suite are averaged by task, metric and setting. Scores of other data under the same name have their
own lines, which are not averaged.
"""

import csv
import io
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import TypedDict, Unpack

from clipkit.samples import safe_cell
from eval.datasets.card import Published as PublishedScores
from eval.datasets.dataset import TEST
from eval.metrics import is_fraction, is_informative, lower_is_better, metric_title
from eval.report.charts import format_number, format_value
from eval.report.placement import Ranking
from eval.results.table import Model, Record, ResultTable, group_by, group_by_data, read_table

# tasks without training; the first is the usual main task
AS_TRAINED = ("zero-shot", "retrieval", "captioning", "compositional", "judgments", "likelihood")
SEVERAL_TASKS = "several tasks"
PLAIN = "ridge"  # few-shot settings without an estimator
_MOST_PUBLISHED = 4
_DIRECTIONS = ("image_to_text_R@1", "text_to_image_R@1")
_RETRIEVAL = (*_DIRECTIONS, "mean_R@1")
_CURVES = ("-shot", "layer ", "dim ")  # settings that are points of a curve
_CSV_NAMES = (
    "dataset", "split", "task", "prompt_set", "setting", "metric", "value", "n", "low", "high", "chance",
)  # fmt: skip
_HEADER = ("Dataset", "Task", "Metric")
_LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "[": "{[}",  # at the start of a row it would be an option of the \\ before
}  # fmt: skip
_MARKDOWN = {mark: f"\\{mark}" for mark in "\\`*_[]<>|#"}

_Kind = tuple[str, str, str, str]  # task, split, prompt set, setting


class Facts(TypedDict, total=False):
    """What is known about the datasets.

    Attributes:
        suites: by name, the datasets to average over.
        primary: by dataset, its primary metric; by default the first recorded.
        published: by dataset, published numbers in [0, 1] by model or architecture, shown next to the dataset's
            first line; or several sets of them, each shown next to the line of its task, metric and prompts.
        paper: by dataset, the difference in figure 5 of the CLIP paper, see ``eval.datasets.card.Paper``.
        ranking: where the models are among published ones.
    """

    suites: Mapping[str, Sequence[str]]
    primary: Mapping[str, str]
    published: Mapping[str, Mapping[str, float] | Sequence[PublishedScores]]
    paper: Mapping[str, float]
    ranking: Ranking


def format_setting(task: str, setting: str) -> str:
    """Format a setting: "1 epoch", and few-shot settings always with their estimator."""
    if setting == "1 epochs":
        return "1 epoch"
    if task == "few-shot" and re.fullmatch(r"\d+-shot", setting):
        return f"{setting} {PLAIN}"
    return setting


def join_words(*words: str) -> str:
    """Join the words that are not empty by commas."""
    return ", ".join(filter(None, words))


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """Values in one metric, or means ("" for the metric of several tasks), by the index of the model.

    Attributes:
        cells: the records of the values; none for means.
        published: published values by the name of the model.
    """

    metric: str
    values: Mapping[int, float]
    cells: Mapping[int, Record] = field(default_factory=dict)
    published: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def in_percent(self) -> bool:
        """Whether all numbers of the row are fractions."""
        numbers: list[float | None] = [*self.values.values(), *self.published.values()]
        for cell in self.cells.values():
            numbers += [cell.low, cell.high, cell.chance]
        return is_fraction(self.metric, *numbers)

    def format_number(self, value: float | None, digits: int = 1) -> str:
        """Format a value, in percent if the row is; "" for None."""
        if value is None:
            return ""
        return f"{100 * value:.{digits}f}" if self.in_percent else format_number(value)

    def format_value(self, value: float) -> str:
        """Format a value with its unit."""
        return format_value(100 * value, "%") if self.in_percent else format_number(value)

    def format_interval(self, model: int) -> str:
        """Format the 95% interval of a model's value; "" if there is none."""
        interval = self.cells[model].interval if model in self.cells else None
        if interval is None:
            return ""
        low, high = interval
        return f"{self.format_number(low)}–{self.format_number(high)}"

    @cached_property
    def best(self) -> set[int]:
        """The best models, including those equal after rounding; none if all are equal."""
        texts = {model: self.format_number(value) for model, value in self.values.items()}
        if len(set(texts.values())) < 2:
            return set()
        select = min if lower_is_better(self.metric) else max
        best = self.format_number(select(self.values.values()))
        return {model for model, text in texts.items() if text == best}


def build_row(metric: str, records: Iterable[Record]) -> TableRow:
    """Build the row of some records, at most one of each model."""
    cells = {record.model: record for record in sorted(records, key=attrgetter("model"))}
    return TableRow(metric=metric, values={model: cell.value for model, cell in cells.items()}, cells=cells)


@dataclass(frozen=True, kw_only=True)
class Line(TableRow):
    """Scores of all models on one dataset.

    Attributes:
        note: the task, prompt set, split, setting or data, if the dataset has several; or "".
        setting: the setting that averages distinguish; "" for tasks without training.
        counted: whether averages of its task include it.
        main: whether averages of suites include it, because its task is the dataset's main task.
    """

    dataset: str
    task: str
    note: str
    setting: str
    counted: bool
    main: bool
    scope: str = ""

    @property
    def title(self) -> str:
        return join_words(f"{self.dataset} {metric_title(self.metric)}", self.note)

    @property
    def names(self) -> tuple[str, str, str]:
        """Dataset, task and metric."""
        dataset = f"{self.dataset} ({self.note})" if self.note else self.dataset
        return dataset, self.task, metric_title(self.metric)


@dataclass(frozen=True, kw_only=True)
class Average(TableRow):
    """The mean over ``over`` of the ``of`` datasets of a suite: those that every model with any of them has.

    ``tasks`` are those of the scores. ``metric`` is "" unless their task has means of other metrics. ``setting`` is
    "" for tasks without training. ``partial``: some models have none of the datasets.
    """

    suite: str
    tasks: tuple[str, ...]
    setting: str
    over: int
    of: int
    partial: bool

    @property
    def task(self) -> str:
        return ", ".join(self.tasks)

    @property
    def name(self) -> str:
        metric = metric_title(self.metric) if self.metric else ""
        return f"mean of {join_words(self.suite, metric, format_setting(self.task, self.setting))}"

    @property
    def title(self) -> str:
        if self.suite == self.task or len(self.tasks) > 1:
            return self.name
        return f"{self.name}, {self.task}"

    @property
    def label(self) -> str:
        return f"{self.over} of {self.of}" if self.over < self.of else f"{self.of}"

    @property
    def scope(self) -> str:
        """The datasets and tasks it covers, in words."""
        tasks = f", each by its main task ({self.task})" if len(self.tasks) > 1 else ""
        if self.over == self.of:
            return f"over all its {self.of} datasets{tasks}"
        models = "all models that have any" if self.partial else "all models"
        return f"over the {self.over} of {self.of} datasets that {models} have{tasks}"

    @property
    def names(self) -> tuple[str, str, str]:
        """Name, tasks and number of datasets."""
        return self.name, self.task, f"over {self.label}"


@dataclass(frozen=True, kw_only=True)
class ScoreTable:
    """Lines in the order of the suites, then of the results; ``columns`` names the published models."""

    models: tuple[Model, ...]
    columns: tuple[str, ...]
    lines: tuple[Line, ...]
    averages: tuple[Average, ...]

    @property
    def rows(self) -> tuple[Line | Average, ...]:
        return *self.averages, *self.lines

    @property
    def published(self) -> tuple[str, ...]:
        return tuple(name for name in self.columns if any(name in row.published for row in self.rows))

    @property
    def usual(self) -> str:
        """The most frequent metric, of several the first."""
        counts = Counter(line.metric for line in self.lines)
        return max(counts, key=counts.__getitem__, default="")

    @property
    def main_rows(self) -> Sequence[Line | Average]:
        """The averages, or else the lines that they would count."""
        return self.averages or [line for line in self.lines if line.counted]


def read_scores(results: Sequence[Path]) -> ResultTable:
    """Read results files as ``read_table`` does, without uninformative scores unless there are no others."""
    table = read_table(results)
    rows = tuple(row for row in table.rows if is_informative(row.metric, row.n))
    return replace(table, rows=rows or table.rows)


def task_tables(
    results: ResultTable, *, curves: bool = False, **facts: Unpack[Facts]
) -> dict[str, ScoreTable]:
    """Build a table for each task, preceded by the means over several tasks.

    Published numbers are shown only for tasks without training. With ``curves``, points of curves (few-shot
    settings and layers) have lines too.
    """
    as_trained = score_table(results, curves=curves, **facts)
    means = tuple(average for average in as_trained.averages if len(average.tasks) > 1)
    tables = {SEVERAL_TASKS: replace(as_trained, lines=(), averages=means)}
    for task in AS_TRAINED:
        lines = tuple(line for line in as_trained.lines if line.task == task)
        means = tuple(average for average in as_trained.averages if average.tasks == (task,))
        tables[task] = replace(as_trained, lines=lines, averages=means)
    trained: Facts = {**facts, "published": {}}
    for row in results.rows:
        if row.task not in tables:
            tables[row.task] = score_table(results, tasks=(row.task,), curves=curves, **trained)
    return {name: table for name, table in tables.items() if table.rows}


def score_table(
    results: ResultTable, *, tasks: Sequence[str] = AS_TRAINED, curves: bool = False, **facts: Unpack[Facts]
) -> ScoreTable:
    """Build one table of some tasks; see ``task_tables``."""
    suites = facts.get("suites", {})
    order = {name: i for i, name in enumerate(dict.fromkeys(chain.from_iterable(suites.values())))}
    rows = [row for row in results.rows if row.task in tasks]
    if not curves:
        rows = [row for row in rows if not any(mark in row.setting for mark in _CURVES)]
    rows.sort(key=lambda row: order.get(row.dataset, len(order)))
    datasets = group_by(rows, attrgetter("dataset"))
    published = {name: facts.get("published", {}).get(name, {}) for name in datasets}
    columns = _select_published(published.values(), results.models)
    lines: list[Line] = []
    for dataset, dataset_rows in datasets.items():
        primary = facts.get("primary", {}).get(dataset)
        for line in _build_lines(dataset_rows, tasks, primary, published[dataset]):
            shown = {name: line.published[name] for name in columns if name in line.published}
            lines.append(replace(line, published=shown))
    averages = _build_averages(lines, suites, len(results.models))
    return ScoreTable(models=results.models, columns=columns, lines=tuple(lines), averages=averages)


def _select_published(
    published: Iterable[Mapping[str, float] | Sequence[PublishedScores]], models: Sequence[Model]
) -> tuple[str, ...]:
    """Select published models that are among those shown, by name or architecture; if none is, the first few."""
    names: dict[str, None] = {}
    for scores in published:
        if isinstance(scores, Mapping):
            names |= dict.fromkeys(scores)
        else:
            names |= dict.fromkeys(chain.from_iterable(sets.values for sets in scores))
    shown = set()
    for model in models:
        shown |= {_simplify_name(model.name), _simplify_name(model.label), _simplify_name(model.architecture)}
    selected = [name for name in names if _simplify_name(name) in shown - {""}]
    return tuple(selected or [*names][:_MOST_PUBLISHED])


def _simplify_name(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower())).removesuffix("quickgelu")


def _get_averaged_setting(kind: _Kind) -> str:
    return "" if kind[0] in AS_TRAINED else kind[3]


def _build_lines(
    rows: Sequence[Record],
    tasks: Sequence[str],
    primary: str | None,
    published: Mapping[str, float] | Sequence[PublishedScores],
) -> list[Line]:
    """Build a line of a dataset for each task, split, prompt set, setting, metric and data.

    Averages count the split and prompts of most models.
    """
    kinds = group_by(rows, attrgetter("task", "split", "prompt_set", "setting"))
    usual: dict[tuple[str, str], _Kind] = {}
    for kind in sorted(kinds, key=lambda kind: -len({row.model for row in kinds[kind]})):
        usual.setdefault((kind[0], _get_averaged_setting(kind)), kind)
    main_tasks: dict[str, str] = {}
    # the task of the primary metric, or else the first
    for kind in sorted(
        kinds, key=lambda kind: (all(row.metric != primary for row in kinds[kind]), tasks.index(kind[0]))
    ):
        main_tasks.setdefault(_get_averaged_setting(kind), kind[0])
    lines = []
    for kind, kind_rows in kinds.items():
        task, setting = kind[0], _get_averaged_setting(kind)
        metrics = group_by(kind_rows, attrgetter("metric"))
        main_metric = primary if primary is not None and primary in metrics else next(iter(metrics))
        shown = [main_metric]
        # retrieval shows both directions and their mean
        if main_metric in _RETRIEVAL:
            shown += [metric for metric in _RETRIEVAL if metric in metrics and metric != main_metric]
        is_usual = kind == usual[task, setting]
        is_main = task == main_tasks[setting]
        for metric in shown:
            is_averaged = metric == main_metric or {metric, main_metric} <= set(_DIRECTIONS)
            for i, group in enumerate(group_by_data(metrics[metric])):
                row = build_row(metric, group.rows)
                counted = is_usual and i == 0 and is_averaged and is_fraction(metric, *row.values.values())
                beside: Mapping[str, float] = {}
                if not isinstance(published, Mapping):
                    if i == 0:
                        beside = _find_published(published, kind, metric)
                elif is_usual and is_main and i == 0 and metric == main_metric and primary in (None, metric):
                    beside = published
                lines.append(
                    Line(
                        dataset=rows[0].dataset,
                        task=task,
                        note=join_words(_describe_kind(kind, kinds), group.note),
                        setting=setting,
                        metric=metric,
                        values=row.values,
                        cells=row.cells,
                        published=beside,
                        counted=counted,
                        main=counted and is_main,
                    )
                )
    return lines


def _describe_kind(kind: _Kind, kinds: Collection[_Kind]) -> str:
    """Describe how a line differs from others of the dataset; settings and other splits are always named."""
    task, split, prompt_set, setting = kind
    tasks, splits, prompt_sets, _ = map(set, zip(*kinds, strict=True))
    words = []
    if len(tasks) > 1:
        words.append(task)
    if len(splits) > 1 or split != TEST:
        words.append(split)
    if len(prompt_sets) > 1 and prompt_set:
        words.append(f"prompts {prompt_set}")
    return join_words(*words, format_setting(task, setting))


def _find_published(published: Sequence[PublishedScores], kind: _Kind, metric: str) -> Mapping[str, float]:
    for scores in published:
        if (scores.task, TEST, scores.prompts, "") == kind and scores.metric == metric:
            return scores.values
    return {}


def _build_averages(
    lines: Sequence[Line], suites: Mapping[str, Sequence[str]], models: int
) -> tuple[Average, ...]:
    """Average over suites by setting, then over tasks and metrics whose datasets no suite covers."""
    suite_averages: list[Average] = []
    main_lines = [line for line in lines if line.main]
    for setting, setting_lines in group_by(main_lines, attrgetter("setting")).items():
        datasets = group_by(setting_lines, attrgetter("dataset"))
        for suite, names in suites.items():
            average = _build_average(suite, setting, list(dict.fromkeys(names)), datasets, models)
            if average is not None and 2 * average.over >= average.of:
                suite_averages.append(average)
    others: list[Average] = []
    counted = [line for line in lines if line.counted]
    for (task, setting), task_lines in group_by(counted, attrgetter("task", "setting")).items():
        covered = [
            set(suites[average.suite])
            for average in suite_averages
            if task in average.tasks and average.setting == setting
        ]
        datasets = group_by(task_lines, attrgetter("dataset"))
        metrics: dict[str, list[str]] = {}
        for name, dataset_lines in datasets.items():
            # both directions of retrieval are averaged
            metric = _RETRIEVAL[-1] if len(dataset_lines) > 1 else dataset_lines[0].metric
            metrics.setdefault(metric, []).append(name)
        for metric, names in metrics.items():
            metric = metric if len(metrics) > 1 else ""
            average = _build_average("all datasets", setting, names, datasets, models, metric)
            if average is not None and not any(suite.issuperset(names) for suite in covered):
                others.append(average)
    order = [*suites]
    return (*sorted(suite_averages, key=lambda average: order.index(average.suite)), *others)


def _build_average(
    suite: str,
    setting: str,
    names: Collection[str],
    datasets: Mapping[str, list[Line]],
    models: int,
    metric: str = "",
) -> Average | None:
    groups = [datasets[name] for name in names if name in datasets]
    having: set[int] = set()
    for line in chain.from_iterable(groups):
        having |= line.values.keys()
    common = [group for group in groups if all(having == line.values.keys() for line in group)]
    if len(common) < 2:
        return None
    values = {}
    for model in sorted(having):
        values[model] = fmean(fmean(line.values[model] for line in group) for group in common)
    return Average(
        suite=suite,
        tasks=tuple(dict.fromkeys(line.task for line in chain.from_iterable(common))),
        metric=metric,
        setting=setting,
        over=len(common),
        of=len(names),
        partial=len(having) < models,
        values=values,
        published=_average_published(common),
    )


def _average_published(groups: Sequence[Sequence[Line]]) -> dict[str, float]:
    means: dict[str, list[float]] = {}
    for group in groups:
        values: dict[str, list[float]] = {}
        for line in group:
            for name, value in line.published.items():
                values.setdefault(name, []).append(value)
        for name in values:
            means.setdefault(name, []).append(fmean(values[name]))
    return {
        name: fmean(group_means) for name, group_means in means.items() if len(group_means) == len(groups)
    }


def as_csv(results: Sequence[Path], **facts: Unpack[Facts]) -> str:
    """Format all scores as comma-separated values with a header line.

    Column ``kind`` is "score" for a measured score, with the names and numbers of results.jsonl; "mean" for an
    average over the suite in ``dataset``, whose ``task`` may list several and whose ``n`` counts datasets; and
    "published" for numbers measured by others. Names that a spreadsheet would take for a formula start with an
    apostrophe.
    """
    scores = read_scores(results)
    tables = task_tables(scores, curves=True, **facts).values()
    file = io.StringIO()
    writer = csv.DictWriter(file, ("kind", "model", *_CSV_NAMES), restval="", lineterminator="\n")
    writer.writeheader()

    def write_row(kind: str, model: str, **fields: str | float | None) -> None:
        names = {"kind": kind, "model": model, **fields}
        writer.writerow({name: _format_cell(value) for name, value in names.items()})

    for row in scores.rows:
        fields = {name: getattr(row, name) for name in _CSV_NAMES}
        write_row("score", scores.models[row.model].label, **fields)
    for average in chain.from_iterable(table.averages for table in tables):
        names = {"dataset": average.suite, "task": average.task, "setting": average.setting}
        for model, value in average.values.items():
            label = scores.models[model].label
            write_row("mean", label, **names, metric=average.metric, value=value, n=average.over)
    for line in chain.from_iterable(table.lines for table in tables):
        cell = next(iter(line.cells.values()))
        names = {"dataset": line.dataset, "split": cell.split, "task": cell.task, "metric": line.metric}
        # numbers of other tasks may be for any prompts
        if cell.task == "retrieval":
            names["prompt_set"] = cell.prompt_set
        for name, value in line.published.items():
            write_row("published", name, **names, value=value)
    return file.getvalue()


def _format_cell(value: str | float | None) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return safe_cell(_join_lines(value))
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def as_latex(results: Sequence[Path], **facts: Unpack[Facts]) -> str:
    """Format the table of models × datasets as a ``tabular`` for the package booktabs.

    Tasks are separated by rules, means followed by a space, and the best model of each row is in bold.
    """
    header, tables = _format_tables(results, facts, _LATEX, r"\textbf{{{}}}", "--")
    lines = [
        "% needs \\usepackage{booktabs}; numbers are percentages",
        f"\\begin{{tabular}}{{lll{'r' * (len(header) - len(_HEADER))}}}",
        "\\toprule",
        " & ".join(header) + r" \\",
    ]
    for means, others in tables:
        lines.append("\\midrule")
        lines += [" & ".join(cells) + r" \\" for cells in means]
        if means and others:
            lines.append("\\addlinespace")
        lines += [" & ".join(cells) + r" \\" for cells in others]
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", ""])


def as_markdown(results: Sequence[Path], **facts: Unpack[Facts]) -> str:
    """Format the table of models × datasets for GitHub, with the best model of each row in bold."""
    header, tables = _format_tables(results, facts, _MARKDOWN, "**{}**", "")
    lines = [header, ["---"] * len(_HEADER) + ["---:"] * (len(header) - len(_HEADER))]
    for means, others in tables:
        lines += [*means, *others]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


_Cells = list[list[str]]


def _format_tables(
    results: Sequence[Path], facts: Facts, escapes: Mapping[str, str], bold: str, missing: str
) -> tuple[list[str], list[tuple[_Cells, _Cells]]]:
    scores = read_scores(results)
    tables = task_tables(scores, curves=True, **facts).values()
    published = list(dict.fromkeys(chain.from_iterable(table.published for table in tables)))
    names = [
        *_HEADER,
        *(model.label for model in scores.models),
        *(f"{name} (published)" for name in published),
    ]

    def escape(name: str) -> str:
        return "".join(escapes.get(letter, letter) for letter in _join_lines(name))

    def format_rows(rows: Iterable[Line | Average]) -> _Cells:
        texts = []
        for row in rows:
            cells = list(map(escape, row.names))
            for model in range(len(scores.models)):
                text = row.format_number(row.values.get(model)) or missing
                cells.append(bold.format(text) if model in row.best else text)
            cells += [row.format_number(row.published.get(name)) or missing for name in published]
            texts.append(cells)
        return texts

    rows = [(format_rows(table.averages), format_rows(table.lines)) for table in tables]
    return list(map(escape, names)), rows


def _join_lines(text: str) -> str:
    """Replace line breaks by spaces, and control characters and halves of surrogate pairs by "?"."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", "?", " ".join(text.encode("utf-8", "replace").decode().split()))
