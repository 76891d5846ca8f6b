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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import TypedDict, Unpack

from clipkit.samples import safe_cell
from eval.datasets import Published as PublishedScores
from eval.datasets.dataset import TEST
from eval.metrics import METRICS
from eval.report.charts import TEMPLATES, figure, number
from eval.report.result_set import Model, ResultSet, by_data, read_result_set
from eval.results.scores import Record

__all__ = [
    "AS_TRAINED",
    "PLAIN",
    "SEVERAL_TASKS",
    "Average",
    "Facts",
    "Line",
    "ScoreTable",
    "TableRow",
    "as_csv",
    "as_latex",
    "as_markdown",
    "is_fraction",
    "is_informative",
    "is_rank",
    "lower_is_better",
    "metric_name",
    "read_scores",
    "score_table",
    "setting_name",
    "task_tables",
]

# tasks without training; the first is the usual main task
AS_TRAINED = ("zero-shot", "retrieval", "captioning", "compositional", "likelihood")
SEVERAL_TASKS = "several tasks"
PLAIN = "ridge"  # few-shot settings without an estimator
_STD = "_std"  # suffix of a metric: its standard deviation over seeds
_MOST_PUBLISHED = 4
_DIRECTIONS = ("image_to_text_R@1", "text_to_image_R@1")
_RETRIEVAL = (*_DIRECTIONS, "mean_R@1")
_CURVES = ("-shot", "layer ", "dim ")  # settings that are points of a curve
_CSV_COLUMNS = (
    "kind", "model", "dataset", "split", "task", "prompt_set", "setting", "metric", "value", "n", "low", "high",
    "chance",
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
    """

    suites: Mapping[str, Sequence[str]]
    primary: Mapping[str, str]
    published: Mapping[str, Mapping[str, float] | Sequence[PublishedScores]]
    paper: Mapping[str, float]


def metric_name(metric: str) -> str:
    """Format the name of a metric, such as "top-1" for "acc1"."""
    if metric.endswith(_STD):
        return f"{metric_name(metric.removesuffix(_STD))} std"
    known = METRICS.get(metric)
    return (known and known.title) or metric.replace("_", " ")


TEMPLATES.filters["metric_name"] = metric_name


def setting_name(task: str, setting: str) -> str:
    """Format a setting: "1 epoch", and few-shot settings always with their estimator."""
    if setting == "1 epochs":
        return "1 epoch"
    return f"{setting} {PLAIN}" if task == "few-shot" and re.fullmatch(r"\d+-shot", setting) else setting


def is_informative(metric: str, n: int | None) -> bool:
    """Whether a score is informative: the standard deviation over a single seed is not."""
    return not metric.endswith(_STD) or n is None or n > 1


def is_rank(metric: str) -> bool:
    """Whether a metric starts at 1, as ranks and perplexity do."""
    return metric in METRICS and METRICS[metric].highest is None


def lower_is_better(metric: str) -> bool:
    """Whether the best model is the one with the lowest value."""
    return metric in METRICS and not METRICS[metric].larger_is_better


def is_fraction(metric: str, *values: float | None) -> bool:
    """Whether values of a metric are in [0, 1] and shown in percent; ranks and CIDEr-D are not."""
    known = METRICS.get(metric)
    if known is not None and known.highest != 1.0:
        return False
    return all(0 <= one <= 1 for one in values if one is not None)


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """Values of all models in one metric, or means ("" for the metric of several tasks).

    Attributes:
        metric: as in the scores.
        values: one per model; None if it has none.
        cells: the records of the values; () for means.
        published: numbers of published models.
    """

    metric: str
    values: tuple[float | None, ...]
    cells: tuple[Record | None, ...] = ()
    published: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def in_percent(self) -> bool:
        """Whether all numbers of the row are fractions."""
        bounds = (one for cell in self.cells if cell for one in (cell.low, cell.high, cell.chance))
        return is_fraction(self.metric, *self.values, *self.published.values(), *bounds)

    def text(self, value: float | None, digits: int = 1) -> str:
        """Format a value, in percent if the row is."""
        if value is None:
            return ""
        return f"{100 * value:.{digits}f}" if self.in_percent else number(value)

    def figure(self, value: float) -> str:
        """Format a value with its unit."""
        return figure(100 * value, "%") if self.in_percent else number(value)

    def interval(self, i: int) -> str:
        """Format the 95% interval of a model's value; "" if there is none."""
        cell = self.cells[i] if self.cells else None
        if cell is None or cell.low is None or cell.high is None:
            return ""
        return f"{self.text(cell.low)}–{self.text(cell.high)}"

    @cached_property
    def best(self) -> set[int]:
        """The best models, including those equal after rounding; none if all are equal."""
        texts = [self.text(value) for value in self.values]
        known = {text: value for text, value in zip(texts, self.values, strict=True) if value is not None}
        sign = -1 if lower_is_better(self.metric) else 1
        top = max(known, key=lambda text: sign * known[text], default="")
        return {i for i, text in enumerate(texts) if text == top} if len(known) > 1 else set()


@dataclass(frozen=True, kw_only=True)
class Line(TableRow):
    """Scores of all models on one dataset.

    Attributes:
        dataset: its name.
        task: the task of all cells.
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

    @property
    def title(self) -> str:
        """Dataset and metric, and the note."""
        return ", ".join(filter(None, (f"{self.dataset} {metric_name(self.metric)}", self.note)))

    @property
    def scope(self) -> str:
        """No more than its title says."""
        return ""

    @property
    def names(self) -> tuple[str, str, str]:
        """Dataset, task and metric."""
        dataset = f"{self.dataset} ({self.note})" if self.note else self.dataset
        return dataset, self.task, metric_name(self.metric)


@dataclass(frozen=True, kw_only=True)
class Average(TableRow):
    """The mean over ``over`` of the ``of`` datasets of a suite: those that every model with any of them has.

    ``tasks`` are those of the scores. ``metric`` is "" unless their task has means of other metrics. ``setting`` is
    "" for tasks without training.
    """

    suite: str
    tasks: tuple[str, ...]
    setting: str
    over: int
    of: int

    @property
    def name(self) -> str:
        """Its name among those of its tasks."""
        metric = metric_name(self.metric) if self.metric else ""
        return (
            f"mean of {', '.join(filter(None, (self.suite, metric, setting_name(self.task, self.setting))))}"
        )

    @property
    def task(self) -> str:
        """Its tasks."""
        return ", ".join(self.tasks)

    @property
    def title(self) -> str:
        """Its name with the task."""
        return self.name if self.suite == self.task or len(self.tasks) > 1 else f"{self.name}, {self.task}"

    @property
    def label(self) -> str:
        """The number of datasets."""
        return f"{self.over} of {self.of}" if self.over < self.of else f"{self.of}"

    @property
    def scope(self) -> str:
        """The datasets and tasks it covers, in words."""
        tasks = f", each by its main task ({self.task})" if len(self.tasks) > 1 else ""
        if self.over == self.of:
            return f"over all its {self.of} datasets{tasks}"
        models = "all models that have any" if None in self.values else "all models"
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
    def published(self) -> tuple[str, ...]:
        """The published models with any number."""
        rows = (*self.averages, *self.lines)
        return tuple(name for name in self.columns if any(name in row.published for row in rows))

    @property
    def usual(self) -> str:
        """The metric of most lines."""
        metrics = [line.metric for line in self.lines]
        return max(dict.fromkeys(metrics), key=metrics.count, default="")

    @property
    def main_rows(self) -> Sequence[Line | Average]:
        """The averages, or else the lines that they would count."""
        return self.averages or [line for line in self.lines if line.counted]


def read_scores(results: Sequence[Path]) -> ResultSet:
    """Read results files as ``read_result_set`` does, without uninformative scores unless there are no others."""
    found = read_result_set(results)
    return replace(
        found, rows=tuple(row for row in found.rows if is_informative(row.metric, row.n)) or found.rows
    )


def task_tables(results: ResultSet, *, curves: bool = False, **facts: Unpack[Facts]) -> dict[str, ScoreTable]:
    """Build a table for each task, preceded by the means over several tasks.

    Published numbers are shown only for tasks without training. With ``curves``, points of curves (few-shot
    settings and layers) have lines too.
    """
    whole = score_table(results, curves=curves, **facts)
    means = tuple(one for one in whole.averages if len(one.tasks) > 1)
    tables = {SEVERAL_TASKS: replace(whole, lines=(), averages=means)}
    for task in AS_TRAINED:
        lines = tuple(line for line in whole.lines if line.task == task)
        means = tuple(one for one in whole.averages if one.tasks == (task,))
        tables[task] = replace(whole, lines=lines, averages=means)
    trained: Facts = {**facts, "published": {}}
    for task in dict.fromkeys(row.task for row in results.rows if row.task not in AS_TRAINED):
        tables[task] = score_table(results, tasks=(task,), curves=curves, **trained)
    return {name: table for name, table in tables.items() if table.lines or table.averages}


def score_table(
    results: ResultSet, *, tasks: Sequence[str] = AS_TRAINED, curves: bool = False, **facts: Unpack[Facts]
) -> ScoreTable:
    """Build one table of some tasks; see ``task_tables``."""
    suites, published = facts.get("suites", {}), facts.get("published", {})
    order = {name: i for i, name in enumerate(dict.fromkeys(chain.from_iterable(suites.values())))}
    by_dataset: dict[str, list[Record]] = {}
    for row in sorted(results.rows, key=lambda row: order.get(row.dataset, len(order))):
        if row.task in tasks and (curves or not any(mark in row.setting for mark in _CURVES)):
            by_dataset.setdefault(row.dataset, []).append(row)
    # published models that are among those shown, by name or architecture; if none is, the first few
    given = {dataset: published.get(dataset, {}) for dataset in by_dataset}
    sets = [
        values
        for one in given.values()
        for values in ([one] if isinstance(one, Mapping) else [each.values for each in one])
    ]
    names = list(dict.fromkeys(chain.from_iterable(sets)))
    shown = {
        _letters(name) for one in results.models for name in (one.name, one.label, one.architecture) if name
    }
    columns = tuple([name for name in names if _letters(name) in shown] or names[:_MOST_PUBLISHED])
    lines: list[Line] = []
    for dataset, rows in by_dataset.items():
        primary = facts.get("primary", {}).get(dataset)
        lines += _dataset_lines(rows, len(results.models), tasks, primary, given[dataset], columns)
    averages = _averages(lines, suites)
    return ScoreTable(models=results.models, columns=columns, lines=tuple(lines), averages=averages)


def _letters(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum()).removesuffix("quickgelu")


def _dataset_lines(
    rows: Sequence[Record],
    models: int,
    tasks: Sequence[str],
    primary: str | None,
    given: Mapping[str, float] | Sequence[PublishedScores],
    columns: Sequence[str],
) -> list[Line]:
    """Build a line for each task, split, prompt set, setting and data; averages count those of most models."""
    kinds: dict[_Kind, list[Record]] = {}
    for row in rows:
        kinds.setdefault((row.task, row.split, row.prompt_set, row.setting), []).append(row)
    settings = {kind: "" if kind[0] in AS_TRAINED else kind[3] for kind in kinds}  # that averages distinguish
    usual: dict[tuple[str, str], _Kind] = {}  # by task and setting, the split and prompts of most models
    for kind in sorted(kinds, key=lambda kind: -len({row.model for row in kinds[kind]})):
        usual.setdefault((kind[0], settings[kind]), kind)
    mains: dict[str, str] = {}  # by setting, the task of the primary metric, or else the first
    for kind in sorted(
        kinds, key=lambda kind: (all(row.metric != primary for row in kinds[kind]), tasks.index(kind[0]))
    ):
        mains.setdefault(settings[kind], kind[0])
    lines = []
    for kind, own in kinds.items():
        task, split, prompts, setting = (
            kind[i] if len({other[i] for other in kinds}) > 1 else "" for i in range(len(kind))
        )
        kind_note = (
            task,
            split or (kind[1] if kind[1] != TEST else ""),
            prompts and f"prompts {prompts}",
            setting_name(kind[0], setting or kind[3]),
        )
        metrics = list(dict.fromkeys(row.metric for row in own))
        metric = primary if primary in metrics else metrics[0]
        # retrieval shows both directions and their mean
        others = (
            [one for one in _RETRIEVAL if one != metric and one in metrics] if metric in _RETRIEVAL else []
        )
        for one in (metric, *others):
            for i, group in enumerate(by_data(row for row in own if row.metric == one)):
                first = kind == usual[kind[0], settings[kind]] and i == 0
                main = mains[settings[kind]] == kind[0]
                cells: list[Record | None] = [None] * models
                for row in group.rows:
                    cells[row.model] = row
                values = tuple(None if cell is None else cell.value for cell in cells)
                counted = (
                    first
                    and (one == metric or {one, metric} <= set(_DIRECTIONS))
                    and is_fraction(one, *values)
                )
                beside: Mapping[str, float] = {}
                if isinstance(given, Mapping):
                    if first and main and one == metric and primary in (None, one):
                        beside = given
                elif i == 0:
                    same = (
                        each.values
                        for each in given
                        if (each.task, TEST, each.prompts, "") == kind and each.metric == one
                    )
                    beside = next(same, {})
                lines.append(
                    Line(
                        dataset=rows[0].dataset,
                        task=kind[0],
                        note=", ".join(filter(None, (*kind_note, group.note))),
                        setting=settings[kind],
                        metric=one,
                        values=values,
                        cells=tuple(cells),
                        published={name: beside[name] for name in columns if name in beside},
                        counted=counted,
                        main=counted and main,
                    )
                )
    return lines


def _averages(lines: Sequence[Line], suites: Mapping[str, Sequence[str]]) -> tuple[Average, ...]:
    """Average over suites by setting, then over tasks and metrics whose datasets no suite covers."""
    of_suites: list[Average] = []
    for setting in dict.fromkeys(line.setting for line in lines if line.main):
        main = _by_dataset([line for line in lines if line.main and line.setting == setting])
        for suite, names in suites.items():
            one = _average(suite, setting, list(dict.fromkeys(names)), main)
            if one is not None and 2 * one.over >= one.of:
                of_suites.append(one)
    others: list[Average] = []
    for task, setting in dict.fromkeys((line.task, line.setting) for line in lines if line.counted):
        covered = [suites[one.suite] for one in of_suites if task in one.tasks and one.setting == setting]
        metrics: dict[str, dict[str, list[Line]]] = {}
        counted = [line for line in lines if line.counted and (line.task, line.setting) == (task, setting)]
        for dataset, own in _by_dataset(counted).items():
            # both directions of retrieval are averaged
            metric = _RETRIEVAL[-1] if len(own) > 1 else own[0].metric
            metrics.setdefault(metric, {})[dataset] = own
        for metric, group in metrics.items():
            one = _average("all datasets", setting, list(group), group, metric if len(metrics) > 1 else "")
            if one is not None and not any(set(group) <= set(suite) for suite in covered):
                others.append(one)
    order = [*suites]
    return (*sorted(of_suites, key=lambda one: order.index(one.suite)), *others)


def _by_dataset(lines: Sequence[Line]) -> dict[str, list[Line]]:
    found: dict[str, list[Line]] = {}
    for line in lines:
        found.setdefault(line.dataset, []).append(line)
    return found


def _average(
    suite: str, setting: str, datasets: Collection[str], lines: Mapping[str, list[Line]], metric: str = ""
) -> Average | None:
    """Average over the datasets that all models with any of them have; None if these are fewer than two."""
    own = [lines[name] for name in datasets if name in lines]
    columns = range(len(own[0][0].values)) if own else range(0)
    having = [i for i in columns if any(line.values[i] is not None for group in own for line in group)]
    common = [group for group in own if all(line.values[i] is not None for line in group for i in having)]
    if len(common) < 2:
        return None

    def mean(groups: Sequence[Sequence[float | None]]) -> float | None:
        """The mean of the datasets' means; None if a dataset has no value."""
        means = [fmean(known) for one in groups if (known := [value for value in one if value is not None])]
        return fmean(means) if len(means) == len(groups) else None

    published = {
        name: mean([[line.published.get(name) for line in group] for group in common])
        for name in dict.fromkeys(name for line in common[0] for name in line.published)
    }
    return Average(
        suite=suite,
        tasks=tuple(dict.fromkeys(line.task for group in common for line in group)),
        metric=metric,
        setting=setting,
        over=len(common),
        of=len(datasets),
        values=tuple(mean([[line.values[i] for line in group] for group in common]) for i in columns),
        published={name: value for name, value in published.items() if value is not None},
    )


def as_csv(results: Sequence[Path], **facts: Unpack[Facts]) -> str:
    """Format all scores as comma-separated values with a header line.

    Column ``kind`` is "score" for a measured score, with the names and numbers of results.jsonl; "mean" for an
    average over the suite in ``dataset``, whose ``task`` may list several and whose ``n`` counts datasets; and
    "published" for numbers measured by others. Names that a spreadsheet would take for a formula start with an
    apostrophe.

    Raises:
        DataError: a file cannot be read, or there are no scores.
    """
    found = read_scores(results)
    tables = task_tables(found, curves=True, **facts).values()
    rows: list[tuple[tuple[str, ...], tuple[float | None, ...]]] = [
        (
            ("score", found.models[row.model].label, *row.what),
            (row.value, row.n, row.low, row.high, row.chance),
        )
        for row in found.rows
    ]
    for table in tables:
        for one in table.averages:
            names = (one.suite, "", one.task, "", one.setting, one.metric)
            for of, value in zip(table.models, one.values, strict=True):
                if value is not None:
                    rows.append((("mean", of.label, *names), (value, one.over, None, None, None)))
    for table in tables:
        for line in table.lines:
            cell = next(cell for cell in line.cells if cell)
            prompts = cell.prompt_set if cell.task == "retrieval" else ""  # others may be for any prompts
            names = (line.dataset, cell.split, cell.task, prompts, "", line.metric)
            for model, value in line.published.items():
                rows.append((("published", model, *names), (value, None, None, None, None)))
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(_CSV_COLUMNS)
    for texts, numbers in rows:
        cells = ["" if one is None else str(one) if isinstance(one, int) else f"{one:.6g}" for one in numbers]
        writer.writerow([*(safe_cell(_one_line(text)) for text in texts), *cells])
    return file.getvalue()


def as_latex(results: Sequence[Path], **facts: Unpack[Facts]) -> str:
    """Format the table of models × datasets as a ``tabular`` for the package booktabs.

    Tasks are separated by rules, means followed by a space, and the best model of each row is in bold.

    Raises:
        DataError: a file cannot be read, or there are no scores.
    """

    def row(names: Sequence[str], texts: Sequence[str]) -> str:
        escaped = ["".join(_LATEX.get(letter, letter) for letter in _one_line(name)) for name in names]
        return " & ".join([*escaped, *texts]) + r" \\"

    columns, tables = _text_tables(results, facts)
    lines = [
        "% needs \\usepackage{booktabs}; numbers are percentages",
        f"\\begin{{tabular}}{{lll{'r' * len(columns)}}}",
        "\\toprule",
        row([*_HEADER, *columns], []),
    ]
    for rows in tables:
        lines.append("\\midrule")
        after_mean = False
        for one, texts in rows:
            is_mean = isinstance(one, Average)
            lines += ["\\addlinespace"] if after_mean and not is_mean else []
            after_mean = is_mean
            bold = [f"\\textbf{{{text}}}" if i in one.best else text or "--" for i, text in enumerate(texts)]
            lines.append(row(one.names, bold))
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", ""])


def as_markdown(results: Sequence[Path], **facts: Unpack[Facts]) -> str:
    """Format the table of models × datasets for GitHub, with the best model of each row in bold.

    Raises:
        DataError: a file cannot be read, or there are no scores.
    """

    def row(names: Sequence[str], texts: Sequence[str]) -> str:
        escaped = ["".join(_MARKDOWN.get(letter, letter) for letter in _one_line(name)) for name in names]
        return f"| {' | '.join([*escaped, *texts])} |"

    columns, tables = _text_tables(results, facts)
    lines = [row([*_HEADER, *columns], []), row([], ["---"] * len(_HEADER) + ["---:"] * len(columns))]
    for one, texts in chain.from_iterable(tables):
        lines.append(
            row(one.names, [f"**{text}**" if i in one.best else text for i, text in enumerate(texts)])
        )
    return "\n".join([*lines, ""])


def _text_tables(
    results: Sequence[Path], facts: Facts
) -> tuple[list[str], list[list[tuple[Line | Average, list[str]]]]]:
    """Format models and published numbers as columns; each task has its means, then its lines."""
    found = read_scores(results)
    tables = task_tables(found, curves=True, **facts).values()
    published = list(dict.fromkeys(name for table in tables for name in table.published))
    rows: list[list[tuple[Line | Average, list[str]]]] = []
    for table in tables:
        rows.append([])
        own: list[Line | Average] = [*table.averages, *table.lines]
        for one in own:
            values = (*one.values, *map(one.published.get, published))
            rows[-1].append((one, [one.text(value) for value in values]))
    return [*(model.label for model in found.models), *(f"{name} (published)" for name in published)], rows


def _one_line(text: str) -> str:
    """Replace line breaks by spaces, and control characters and halves of surrogate pairs by "?"."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", "?", " ".join(text.encode("utf-8", "replace").decode().split()))
