"""The table of models × datasets: one score a dataset, averages over suites, published numbers beside them.

A dataset's score is its primary metric, of its main task and the prompt set that most models were scored with. An
average is taken over the datasets that every model has, so that its columns compare; how many those are is said. A
suite of which they are less than half has no average. What is trained with several settings has an average of each.
Scores of other data under the same name stand in a line of their own, which no average counts.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from eval.cards import Published as PublishedScores
from eval.dataset import TEST
from eval.report.result_set import Model, ResultSet, Row, read_result_set
from eval.report.same_data import by_data
from eval.report.scores import is_share, setting_name, tells

__all__ = [
    "AS_TRAINED",
    "Average",
    "Line",
    "ScoreTable",
    "read_scores",
    "score_table",
    "task_tables",
]

AS_TRAINED = (
    "zero-shot",
    "retrieval",
    "compositional",
)  # nothing is trained on the dataset; the first counts
_ALL = "all datasets"
_MOST_PUBLISHED = 4
_DIRECTIONS = ("image_to_text_R@1", "text_to_image_R@1")  # of retrieval
_RETRIEVAL = (*_DIRECTIONS, "mean_R@1")
_CURVES = ("-shot", "layer ")  # settings that are points of a curve, not rows

# by dataset, then model or architecture, in 0 … 1, beside the dataset's first line; or several, each beside the
# line of its task, metric and prompts
Published = Mapping[str, Mapping[str, float] | Sequence[PublishedScores]]
Suites = Mapping[str, Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Line:
    """One dataset's score of every model.

    Attributes:
        dataset: its name.
        note: the task, prompt set, split, setting or data, where the dataset has several; or "".
        setting: that averages tell apart, as in the scores; "" where nothing is trained.
        metric: of all cells.
        cells: a score a model; None where it has none.
        published: a number for each of the table's published columns.
        counted: whether averages count it.
    """

    dataset: str
    note: str
    setting: str
    metric: str
    cells: tuple[Row | None, ...]
    published: tuple[float | None, ...]
    counted: bool


@dataclass(frozen=True, kw_only=True)
class Average:
    """The mean over the ``over`` datasets of a suite of ``of`` that every model has (of those that have any).

    ``task`` is that of the first scores, ``setting`` that of all; "" where nothing is trained.
    """

    suite: str
    task: str
    setting: str
    over: int
    of: int
    cells: tuple[float | None, ...]
    published: tuple[float | None, ...]

    @property
    def name(self) -> str:
        """What it is called."""
        return f"mean of {', '.join(filter(None, (self.suite, setting_name(self.task, self.setting))))}"

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
    """A table for each kind of task that there are scores of; published numbers stand beside the first alone.

    With ``curves`` the points of curves, by pictures a class and by layer, have lines too: where no chart has them.
    """
    others = dict.fromkeys(row.task for row in results.rows if row.task not in AS_TRAINED)
    kinds: dict[str, tuple[str, ...]] = {"zero-shot": AS_TRAINED, **{task: (task,) for task in others}}
    tables = {
        name: score_table(
            results,
            tasks=tasks,
            suites=suites,
            primary=primary,
            published=published if tasks == AS_TRAINED else {},
            curves=curves,
        )
        for name, tasks in kinds.items()
    }
    return {name: table for name, table in tables.items() if table.lines}


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
        tasks: which; averages count a dataset once, in the first of them that it has.
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
    averages = _averages(lines, tasks[0], suites)
    return ScoreTable(models=results.models, published=columns, lines=tuple(lines), averages=averages)


def _dataset_lines(
    rows: Sequence[Row],
    models: int,
    tasks: Sequence[str],
    primary: str | None,
    published: Callable[..., tuple[float | None, ...]],
) -> list[Line]:
    """The lines of one dataset; each prompt set, split, setting and data has one, the fullest counts."""
    kinds: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in rows:
        kinds.setdefault((row.task, row.split, row.prompt_set, row.setting), []).append(row)
    # the first task; of that the split and prompts that most models have
    chiefs: dict[str, tuple[str, str, str, str]] = {}
    for kind in sorted(
        kinds, key=lambda kind: (tasks.index(kind[0]), -len({row.model for row in kinds[kind]}))
    ):
        chiefs.setdefault(_setting(kind), kind)
    lines = []
    for kind, own in kinds.items():
        metrics = list(dict.fromkeys(row.metric for row in own))
        metric = primary if primary in metrics else metrics[0]
        for one in _shown(metric, metrics):
            for i, group in enumerate(by_data(row for row in own if row.metric == one)):
                first = kind == chiefs[_setting(kind)] and i == 0
                in_mean = one == metric or {one, metric} <= set(_DIRECTIONS)
                cells: list[Row | None] = [None] * models
                for row in group.rows:
                    cells[row.model] = row
                chief = first and one == metric and primary in (None, one)
                lines.append(
                    Line(
                        dataset=rows[0].dataset,
                        note=", ".join(filter(None, (_note(kind, list(kinds)), group.note))),
                        setting=_setting(kind),
                        metric=one,
                        cells=tuple(cells),
                        published=published(kind if i == 0 else (), one, chief=chief),
                        counted=first and in_mean and is_share(one, *(row.value for row in group.rows)),
                    )
                )
    return lines


def _setting(kind: tuple[str, str, str, str]) -> str:
    """What averages are taken apart by."""
    return "" if kind[0] in AS_TRAINED else kind[3]


def _shown(metric: str, metrics: Sequence[str]) -> list[str]:
    """The metric that counts, and those that stand with it: retrieval has two directions and their mean."""
    others = _RETRIEVAL if metric in _RETRIEVAL else ()
    return [metric, *(one for one in others if one != metric and one in metrics)]


def _note(kind: tuple[str, str, str, str], kinds: Sequence[tuple[str, str, str, str]]) -> str:
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


def _averages(lines: Sequence[Line], task: str, suites: Suites) -> tuple[Average, ...]:
    """Suite by suite, in each by setting."""
    by_setting: dict[str, dict[str, list[Line]]] = {}
    for line in lines:
        if line.counted:
            by_setting.setdefault(line.setting, {}).setdefault(line.dataset, []).append(line)
    found = [
        one
        for setting, counted in by_setting.items()
        for one in _of_setting((task, setting), counted, suites)
    ]
    order = [*suites, _ALL]
    return tuple(sorted(found, key=lambda one: order.index(one.suite)))


def _of_setting(kind: tuple[str, str], counted: Mapping[str, list[Line]], suites: Suites) -> list[Average]:
    found = (_average(name, kind, list(dict.fromkeys(own)), counted) for name, own in suites.items())
    # of a suite that is mostly missing, a mean says nothing
    averages = [one for one in found if one is not None and one.over > 1 and 2 * one.over >= one.of]
    if not any(set(counted) <= set(suites[one.suite]) for one in averages):
        every = _average(_ALL, kind, list(counted), counted)
        averages += [every] if every is not None and every.over > 1 else []
    return averages


def _average(
    suite: str, kind: tuple[str, str], datasets: Sequence[str], counted: Mapping[str, list[Line]]
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
        task=kind[0],
        setting=kind[1],
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
