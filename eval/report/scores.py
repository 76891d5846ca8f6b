"""Names of metrics and settings, and the table of models × datasets with averages and published numbers."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from eval.datasets import Published as PublishedScores
from eval.datasets.dataset import TEST
from eval.metrics import METRICS
from eval.report.result_set import Model, ResultSet, Row, by_data, read_result_set

__all__ = [
    "AS_TRAINED",
    "PLAIN",
    "SEVERAL_TASKS",
    "Average",
    "Headline",
    "Line",
    "ScoreTable",
    "is_rank",
    "is_share",
    "lower_is_better",
    "metric_name",
    "read_scores",
    "score_table",
    "setting_name",
    "task_tables",
    "tells",
]

PLAIN = "ridge"  # the estimator of few-shot whose setting names none

_STD = "_std"  # behind the name of a metric, its deviation over seeds
_SHOTS = re.compile(r"\d+-shot")


def metric_name(metric: str) -> str:
    """A metric as a person says it; a deviation goes by the name of what it is of."""
    if metric.endswith(_STD):
        return f"{metric_name(metric.removesuffix(_STD))} std"
    known = METRICS.get(metric)
    return (known and known.title) or metric.replace("_", " ")


def setting_name(task: str, setting: str) -> str:
    """A setting as a person says it: one epoch in the singular, few-shot with the estimator where that is ridge."""
    if setting == "1 epochs":
        return "1 epoch"
    return f"{setting} {PLAIN}" if task == "few-shot" and _SHOTS.fullmatch(setting) else setting


def tells(metric: str, n: int | None) -> bool:
    """Whether a score says anything: the deviation over a single seed does not."""
    return not metric.endswith(_STD) or n is None or n > 1


def is_rank(metric: str) -> bool:
    """Whether a metric counts from 1."""
    return metric in METRICS and METRICS[metric].highest is None


def lower_is_better(metric: str) -> bool:
    """Whether the best model is the one of the least value."""
    return metric in METRICS and not METRICS[metric].larger_is_better


def is_share(metric: str, *values: float | None) -> bool:
    """Whether numbers of a metric lie in 0–1 and are told in percent; the rank 1 is none of them."""
    return not is_rank(metric) and all(0 <= one <= 1 for one in values if one is not None)


@dataclass(frozen=True, kw_only=True)
class Headline:
    """A score in a large figure.

    Attributes:
        what: what is scored.
        dataset: shown in bold before it.
        figure: the value as text, without its unit.
        unit: "%" or "".
        details: shown below.
        value: on the gauge, in 0–1; None draws no gauge.
        interval: on the gauge.
        chance: on the gauge.
    """

    what: str
    dataset: str = ""
    figure: str
    unit: str = "%"
    details: Sequence[str]
    value: float | None
    interval: tuple[float, float] | None = None
    chance: float | None = None


# --------------------------------------------------------------------------------------------------------------
# The table of models × datasets: one score a dataset, averages over suites, published numbers beside them.
#
# A dataset's score is its primary metric, of its main task and the prompt set that most models were scored
# with. An average is taken over the datasets that every model has, of those that have any, so that its columns
# compare; how many they are is said. A suite's is of the main task of each dataset, whichever that is; a suite
# of which they are less than half has none. What is in no suite has averages of one task and one metric alone.
# What is trained with several settings has an average of each. Scores of other data under the same name stand
# in a line of their own, which no average counts.

AS_TRAINED = (
    "zero-shot",
    "retrieval",
    "compositional",
)  # nothing is trained on the dataset; the first is the main task, unless the primary metric is of another
SEVERAL_TASKS = "several tasks"
_ALL = "all datasets"
_MOST_PUBLISHED = 4
_DIRECTIONS = ("image_to_text_R@1", "text_to_image_R@1")  # of retrieval
_RETRIEVAL = (*_DIRECTIONS, "mean_R@1")
_CURVES = ("-shot", "layer ")  # settings that are points of a curve, not rows

# by dataset, then model or architecture, in 0 … 1, beside the dataset's first line; or several, each beside the
# line of its task, metric and prompts
Published = Mapping[str, Mapping[str, float] | Sequence[PublishedScores]]
Suites = Mapping[str, Sequence[str]]
_Kind = tuple[str, str, str, str]  # task, split, prompt set, setting


@dataclass(frozen=True, kw_only=True)
class Line:
    """One dataset's score of every model.

    Attributes:
        dataset: its name.
        task: of all cells.
        note: the task, prompt set, split, setting or data, where the dataset has several; or "".
        setting: that averages tell apart, as in the scores; "" where nothing is trained.
        metric: of all cells.
        cells: a score a model; None where it has none.
        published: a number for each of the table's published columns.
        counted: whether averages of its task count it.
        main: whether suites' averages count it: it is of the dataset's main task.
    """

    dataset: str
    task: str
    note: str
    setting: str
    metric: str
    cells: tuple[Row | None, ...]
    published: tuple[float | None, ...]
    counted: bool
    main: bool


@dataclass(frozen=True, kw_only=True)
class Average:
    """The mean over the ``over`` datasets of a suite of ``of`` that every model has (of those that have any).

    ``tasks`` are those of the scores; ``metric`` is theirs where their task has other means, else "";
    ``setting`` is that of all, "" where nothing is trained.
    """

    suite: str
    tasks: tuple[str, ...]
    metric: str
    setting: str
    over: int
    of: int
    cells: tuple[float | None, ...]
    published: tuple[float | None, ...]

    @property
    def name(self) -> str:
        """What it is called among those of its tasks."""
        metric = metric_name(self.metric) if self.metric else ""
        return (
            f"mean of {', '.join(filter(None, (self.suite, metric, setting_name(self.task, self.setting))))}"
        )

    @property
    def task(self) -> str:
        """Its tasks, as in the scores."""
        return ", ".join(self.tasks)

    @property
    def title(self) -> str:
        """What it is called alone."""
        return self.name if self.suite == self.task or len(self.tasks) > 1 else f"{self.name}, {self.task}"

    @property
    def label(self) -> str:
        """How many datasets the mean is of."""
        return f"{self.over} of {self.of}" if self.over < self.of else f"{self.of}"


@dataclass(frozen=True, kw_only=True)
class ScoreTable:
    """Lines in the order of the suites, then of the results; ``published`` names columns of published numbers."""

    models: tuple[Model, ...]
    published: tuple[str, ...]
    lines: tuple[Line, ...]
    averages: tuple[Average, ...]


def read_scores(results: Sequence[Path]) -> ResultSet:
    """Read results files, without scores that say nothing unless all do; raises as ``read_result_set`` does."""
    found = read_result_set(results)
    return replace(found, rows=tuple(row for row in found.rows if tells(row.metric, row.n)) or found.rows)


def task_tables(
    results: ResultSet,
    *,
    suites: Suites,
    primary: Mapping[str, str],
    published: Published,
    curves: bool = False,
) -> dict[str, ScoreTable]:
    """A table for each task that there are scores of, before them the means over several; published numbers stand
    beside what is not trained on a dataset alone.

    With ``curves`` the points of curves, by pictures a class and by layer, have lines too: where no chart has them.
    """
    whole = score_table(results, suites=suites, primary=primary, published=published, curves=curves)
    tables = {SEVERAL_TASKS: _part(whole, (), [one for one in whole.averages if len(one.tasks) > 1])}
    for task in AS_TRAINED:
        lines = [line for line in whole.lines if line.task == task]
        tables[task] = _part(whole, lines, [one for one in whole.averages if one.tasks == (task,)])
    for task in dict.fromkeys(row.task for row in results.rows if row.task not in AS_TRAINED):
        tables[task] = score_table(results, tasks=(task,), suites=suites, primary=primary, curves=curves)
    return {name: table for name, table in tables.items() if table.lines or table.averages}


def _part(whole: ScoreTable, lines: Sequence[Line], averages: Sequence[Average]) -> ScoreTable:
    """A part of a table, without published columns of no number."""
    numbers = [line.published for line in lines] + [one.published for one in averages]
    kept = [i for i in range(len(whole.published)) if any(own[i] is not None for own in numbers)]
    return ScoreTable(
        models=whole.models,
        published=tuple(whole.published[i] for i in kept),
        lines=tuple(replace(line, published=tuple(line.published[i] for i in kept)) for line in lines),
        averages=tuple(replace(one, published=tuple(one.published[i] for i in kept)) for one in averages),
    )


def score_table(
    results: ResultSet,
    *,
    tasks: Sequence[str] = AS_TRAINED,
    suites: Suites | None = None,
    primary: Mapping[str, str] | None = None,
    published: Published | None = None,
    curves: bool = False,
) -> ScoreTable:
    """The table of some tasks.

    Args:
        results: of all models.
        tasks: which; averages of a suite count a dataset once, in its main task.
        suites: by name, their datasets.
        primary: by dataset, its primary metric; by default the first that was recorded.
        published: by dataset, then model or architecture, what others measured, in 0 … 1.
        curves: whether points of curves have lines.
    """
    suites, primary, published = suites or {}, primary or {}, published or {}
    rows = [
        row for row in results.having(*tasks) if curves or not any(mark in row.setting for mark in _CURVES)
    ]
    order = {
        name: i for i, name in enumerate(dict.fromkeys(name for suite in suites.values() for name in suite))
    }
    by_dataset: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: order.get(row.dataset, len(order))):
        by_dataset.setdefault(row.dataset, []).append(row)
    columns = _published_columns(results.models, published, by_dataset)
    lines: list[Line] = []
    for dataset, own in by_dataset.items():
        lines += _dataset_lines(
            own,
            len(results.models),
            tasks,
            primary.get(dataset),
            partial(_beside, published.get(dataset, {}), columns),
        )
    averages = _averages(lines, suites)
    return ScoreTable(models=results.models, published=columns, lines=tuple(lines), averages=averages)


def _dataset_lines(
    rows: Sequence[Row],
    models: int,
    tasks: Sequence[str],
    primary: str | None,
    published: Callable[..., tuple[float | None, ...]],
) -> list[Line]:
    """The lines of one dataset; each prompt set, split, setting and data has one, the fullest counts."""
    kinds: dict[_Kind, list[Row]] = {}
    for row in rows:
        kinds.setdefault((row.task, row.split, row.prompt_set, row.setting), []).append(row)
    # of each task the split and prompts that most models have
    chiefs: dict[tuple[str, str], _Kind] = {}
    for kind in sorted(kinds, key=lambda kind: -len({row.model for row in kinds[kind]})):
        chiefs.setdefault((kind[0], _setting(kind)), kind)
    # the task of the primary metric, else the first
    mains: dict[str, str] = {}
    for kind in sorted(
        kinds, key=lambda kind: (all(row.metric != primary for row in kinds[kind]), tasks.index(kind[0]))
    ):
        mains.setdefault(_setting(kind), kind[0])
    lines = []
    for kind, own in kinds.items():
        metrics = list(dict.fromkeys(row.metric for row in own))
        metric = primary if primary in metrics else metrics[0]
        for one in _shown(metric, metrics):
            for i, group in enumerate(by_data(row for row in own if row.metric == one)):
                first = kind == chiefs[kind[0], _setting(kind)] and i == 0
                main = mains[_setting(kind)] == kind[0]
                in_mean = one == metric or {one, metric} <= set(_DIRECTIONS)
                cells: list[Row | None] = [None] * models
                for row in group.rows:
                    cells[row.model] = row
                chief = first and main and one == metric and primary in (None, one)
                counted = first and in_mean and is_share(one, *(row.value for row in group.rows))
                lines.append(
                    Line(
                        dataset=rows[0].dataset,
                        task=kind[0],
                        note=", ".join(filter(None, (_note(kind, list(kinds)), group.note))),
                        setting=_setting(kind),
                        metric=one,
                        cells=tuple(cells),
                        published=published(kind if i == 0 else (), one, chief=chief),
                        counted=counted,
                        main=counted and main,
                    )
                )
    return lines


def _setting(kind: _Kind) -> str:
    """What averages are taken apart by."""
    return "" if kind[0] in AS_TRAINED else kind[3]


def _shown(metric: str, metrics: Sequence[str]) -> list[str]:
    """The metric that counts, and those that stand with it: retrieval has two directions and their mean."""
    others = _RETRIEVAL if metric in _RETRIEVAL else ()
    return [metric, *(one for one in others if one != metric and one in metrics)]


def _note(kind: _Kind, kinds: Sequence[_Kind]) -> str:
    """In what this line differs from the dataset's others, and any split but the usual one."""
    task, split, prompts, setting = (
        kind[i] if len({other[i] for other in kinds}) > 1 else "" for i in range(len(kind))
    )
    parts = [
        task,
        split or (kind[1] if kind[1] != "test" else ""),
        prompts and f"prompts {prompts}",
        setting_name(kind[0], setting or kind[3]),
    ]
    return ", ".join(part for part in parts if part)


def _beside(
    given: Mapping[str, float] | Sequence[PublishedScores],
    columns: Sequence[str],
    kind: Sequence[str],
    metric: str,
    *,
    chief: bool,
) -> tuple[float | None, ...]:
    """The published numbers beside a line: the only ones beside the chief, else those of its metric and prompts."""
    if isinstance(given, Mapping):
        values = given if chief else {}
    else:
        own = [*kind, metric]
        lists = (one.values for one in given if own == [one.task, TEST, one.prompts, "", one.metric])
        values = next(lists, {})
    return tuple(values.get(name) for name in columns)


def _published_columns(
    models: Sequence[Model], published: Published, datasets: Iterable[str]
) -> tuple[str, ...]:
    """The published models that are one of those shown, by name or architecture; if none is, the first few."""
    names = list(dict.fromkeys(name for dataset in datasets for name in _names(published.get(dataset, {}))))
    shown = {_plain(one) for model in models for one in (model.name, model.label, model.architecture) if one}
    same = [name for name in names if _plain(name) in shown]
    return tuple(same or names[:_MOST_PUBLISHED])


def _names(given: Mapping[str, float] | Sequence[PublishedScores]) -> Iterable[str]:
    return given if isinstance(given, Mapping) else (name for one in given for name in one.values)


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum()).removesuffix("quickgelu")


def _averages(lines: Sequence[Line], suites: Suites) -> tuple[Average, ...]:
    """Suite by suite, in each by setting; then of each task and metric that no suite has all of."""
    found: list[Average] = []
    for setting in dict.fromkeys(line.setting for line in lines if line.main):
        main = _by_dataset(line for line in lines if line.main and line.setting == setting)
        of_suites = (_average(name, setting, list(dict.fromkeys(own)), main) for name, own in suites.items())
        # of a suite that is mostly missing, a mean says nothing
        found += [one for one in of_suites if one is not None and one.over > 1 and 2 * one.over >= one.of]
    every: list[Average] = []
    for task, setting in dict.fromkeys((line.task, line.setting) for line in lines if line.counted):
        groups = _by_metric(
            _by_dataset(
                line for line in lines if line.counted and (line.task, line.setting) == (task, setting)
            )
        )
        there = [suites[one.suite] for one in found if task in one.tasks and one.setting == setting]
        for metric, group in groups.items():
            one = _average(_ALL, setting, list(group), group, metric if len(groups) > 1 else "")
            if one is not None and one.over > 1 and not any(set(group) <= set(suite) for suite in there):
                every.append(one)
    order = [*suites]
    return (*sorted(found, key=lambda one: order.index(one.suite)), *every)


def _by_dataset(lines: Iterable[Line]) -> dict[str, list[Line]]:
    found: dict[str, list[Line]] = {}
    for line in lines:
        found.setdefault(line.dataset, []).append(line)
    return found


def _by_metric(counted: Mapping[str, list[Line]]) -> dict[str, dict[str, list[Line]]]:
    """Datasets whose scores are of one metric; that of both directions of retrieval is their mean."""
    found: dict[str, dict[str, list[Line]]] = {}
    for dataset, lines in counted.items():
        metric = _RETRIEVAL[-1] if len(lines) > 1 else lines[0].metric
        found.setdefault(metric, {})[dataset] = lines
    return found


def _average(
    suite: str, setting: str, datasets: Sequence[str], counted: Mapping[str, list[Line]], metric: str = ""
) -> Average | None:
    own = [counted[name] for name in datasets if name in counted]
    if not own:
        return None
    columns = range(len(own[0][0].cells))
    having = [i for i in columns if any(line.cells[i] for lines in own for line in lines)]
    common = [lines for lines in own if all(line.cells[i] for line in lines for i in having)]
    cells: list[float | None] = [None] * len(columns)
    for i in having:
        cells[i] = _mean([[cell.value for line in lines if (cell := line.cells[i])] for lines in common])
    published = tuple(
        _mean([[value for line in lines if (value := line.published[i]) is not None] for lines in common])
        for i in range(len(own[0][0].published))
    )
    return Average(
        suite=suite,
        tasks=tuple(dict.fromkeys(line.task for lines in common for line in lines)),
        metric=metric,
        setting=setting,
        over=len(common),
        of=len(datasets),
        cells=tuple(cells),
        published=published,
    )


def _mean(values: Sequence[Sequence[float]]) -> float | None:
    """The mean of the datasets' means; None if one has no value."""
    if not values or not all(values):
        return None
    return sum(sum(own) / len(own) for own in values) / len(values)
