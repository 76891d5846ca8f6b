"""Scores as text for other programs: CSV, LaTeX and Markdown. The same results give the same bytes.

LaTeX and Markdown are the table of models × datasets, means over several tasks first, then task by task: columns
are the models in the order of the results, then published numbers; rows are averages, then the primary metric of
each dataset and setting, in percent.
CSV is for programs that compute: a row a score, every metric with its interval and chance, numbers as
they are. A name that a program for tables would take for a formula begins with an apostrophe there.
"""

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from clipkit.files.table import safe_cell
from eval.report.charts import number
from eval.report.result_set import ResultSet
from eval.report.scores import (
    Published,
    ScoreTable,
    Suites,
    is_share,
    lower_is_better,
    metric_name,
    read_scores,
    task_tables,
)

__all__ = ["as_csv", "as_latex", "as_markdown"]

_LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "[": "{[}",  # at the start of a row it would belong to the end of the one before
}  # fmt: skip
_MARKDOWN = str.maketrans({mark: f"\\{mark}" for mark in "\\`*_[]<>|#"})
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]")  # a terminal may obey them
_NAMES = ("Dataset", "Task", "Metric")
_TABLE_COLUMNS = (
    "kind", "model", "dataset", "split", "task", "prompt_set", "setting", "metric", "value", "n", "low", "high",
    "chance",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Row:
    """One row: what was measured, a number a model and a published model; an average is of no one metric."""

    names: tuple[str, str, str]
    values: tuple[float | None, ...]
    published: tuple[float | None, ...]
    average: bool = False
    metric: str = ""
    opens: bool = False  # whether it is the first of its task

    def texts(self) -> list[str]:
        """Percentages, or plain numbers where one is not within 0 and 1; "" for what is not there."""
        values = (*self.values, *self.published)
        share = is_share(self.metric, *values)
        return ["" if one is None else f"{100 * one:.1f}" if share else number(one) for one in values]

    def best(self) -> set[int]:
        """The places of the best of several models' numbers, as they are told."""
        texts = self.texts()[: len(self.values)]
        known = {text: value for text, value in zip(texts, self.values, strict=True) if value is not None}
        sign = -1 if lower_is_better(self.metric) else 1
        top = max(known, key=lambda text: sign * known[text], default="")
        return {i for i, text in enumerate(texts) if text == top} if len(known) > 1 else set()


@dataclass(frozen=True, kw_only=True)
class _Table:
    """What LaTeX and Markdown write."""

    columns: tuple[str, ...]
    rows: tuple[_Row, ...]


def as_csv(
    results: Sequence[Path],
    *,
    suites: Suites | None = None,
    published: Published | None = None,
    primary: Mapping[str, str] | None = None,
) -> str:
    """Comma-separated values below a line of column names: kind, model, dataset, split, task, prompt_set, setting,
    metric, value, n, low, high, chance.

    ``kind`` is "score" for what was measured, in the names and numbers of results.jsonl; "mean" for an average over
    a suite, which ``dataset`` names, whose ``task`` may be several with commas between them, and whose ``n`` are
    datasets; and "published" for what others measured.

    Args:
        results: ``results.jsonl`` files.
        suites: by name, the datasets to take averages over.
        published: by dataset, then model or architecture, what others measured, in 0 … 1.
        primary: by dataset, its primary metric; by default the first that was recorded.

    Raises:
        DataError: a file cannot be read, or there are no scores.
    """
    found, tables = _tables(results, suites, published, primary)
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(_TABLE_COLUMNS)
    for row in found.rows:
        numbers = (row.value, row.n, row.low, row.high, row.chance)
        own = ("score", found.models[row.model].label, *row.what)
        writer.writerow([*map(_cell, own), *map(_exact, numbers)])
    for table in tables.values():
        for names, value, over in _means(table):
            writer.writerow([*map(_cell, ("mean", *names)), _exact(value), _exact(over), "", "", ""])
    for table in tables.values():
        for names, value in _others(table):
            writer.writerow([*map(_cell, ("published", *names)), _exact(value), "", "", "", ""])
    return file.getvalue()


def _means(table: ScoreTable) -> Iterator[tuple[tuple[str, ...], float, int]]:
    for average in table.averages:
        for model, value in zip(table.models, average.cells, strict=True):
            if value is not None:
                names = (model.label, average.suite, "", average.task, "", average.setting, average.metric)
                yield names, value, average.over


def _others(table: ScoreTable) -> Iterator[tuple[tuple[str, ...], float]]:
    for line in table.lines:
        for model, value in zip(table.published, line.published, strict=True):
            cell = next((cell for cell in line.cells if cell), None)
            if value is not None and cell is not None:
                prompts = cell.prompt_set if cell.task == "retrieval" else ""  # of others they may be any
                yield (model, line.dataset, cell.split, cell.task, prompts, "", line.metric), value


def _exact(value: float | None) -> str:
    return "" if value is None else str(value) if isinstance(value, int) else f"{value:.6g}"


def as_latex(
    results: Sequence[Path],
    *,
    suites: Suites | None = None,
    published: Published | None = None,
    primary: Mapping[str, str] | None = None,
) -> str:
    """A ``tabular`` for the package booktabs: a rule before each task, a space after its means, the best model of
    each row in bold; see ``as_csv``."""
    table = _table(results, suites, published, primary)
    lines = [
        "% needs \\usepackage{booktabs}; numbers are percentages",
        f"\\begin{{tabular}}{{lll{'r' * len(table.columns)}}}",
        "\\toprule",
        " & ".join(map(_latex, [*_NAMES, *table.columns])) + r" \\",
        "\\midrule",
    ]
    for i, row in enumerate(table.rows):
        if i and row.opens:
            lines.append("\\midrule")
        elif i and table.rows[i - 1].average and not row.average:
            lines.append("\\addlinespace")
        best = row.best()
        texts = [f"\\textbf{{{text}}}" if j in best else text or "--" for j, text in enumerate(row.texts())]
        lines.append(" & ".join([*map(_latex, row.names), *texts]) + r" \\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", ""])


def as_markdown(
    results: Sequence[Path],
    *,
    suites: Suites | None = None,
    published: Published | None = None,
    primary: Mapping[str, str] | None = None,
) -> str:
    """A table as GitHub reads it, the best model of each row in bold; see ``as_csv``."""
    table = _table(results, suites, published, primary)
    lines = [
        _piped(map(_markdown, [*_NAMES, *table.columns])),
        _piped(["---"] * len(_NAMES) + ["---:"] * len(table.columns)),
    ]
    for row in table.rows:
        best = row.best()
        texts = [f"**{text}**" if i in best else text for i, text in enumerate(row.texts())]
        lines.append(_piped([*map(_markdown, row.names), *texts]))
    return "\n".join([*lines, ""])


def _table(
    results: Sequence[Path],
    suites: Suites | None,
    published: Published | None,
    primary: Mapping[str, str] | None,
) -> _Table:
    """All tasks' tables, one below the other."""
    found, tables = _tables(results, suites, published, primary)
    columns = [model.label for model in found.models]
    published_names = list(dict.fromkeys(name for table in tables.values() for name in table.published))
    columns += [f"{name} (published)" for name in published_names]
    rows = [row for table in tables.values() for row in _rows(table, published_names)]
    return _Table(columns=tuple(columns), rows=tuple(rows))


def _tables(
    results: Sequence[Path],
    suites: Suites | None,
    published: Published | None,
    primary: Mapping[str, str] | None,
) -> tuple[ResultSet, dict[str, ScoreTable]]:
    found = read_scores(results)
    tables = task_tables(
        found, suites=suites or {}, primary=primary or {}, published=published or {}, curves=True
    )
    return found, tables


def _rows(table: ScoreTable, published: Sequence[str]) -> list[_Row]:
    """The rows of one table, with the published numbers of these names."""
    places = [table.published.index(name) if name in table.published else None for name in published]

    def beside(own: Sequence[float | None]) -> tuple[float | None, ...]:
        return tuple(None if i is None else own[i] for i in places)

    rows = [
        _Row(
            names=(average.name, average.task, f"over {average.label}"),
            values=average.cells,
            published=beside(average.published),
            average=True,
        )
        for average in table.averages
    ]
    rows += [
        _Row(
            names=(
                f"{line.dataset} ({line.note})" if line.note else line.dataset,
                line.task,
                metric_name(line.metric),
            ),
            values=tuple(None if cell is None else cell.value for cell in line.cells),
            published=beside(line.published),
            metric=line.metric,
        )
        for line in table.lines
    ]
    return [replace(row, opens=i == 0) for i, row in enumerate(rows)]


def _plain_text(text: str) -> str:
    """One line of whole characters that show: a name may hold half of a surrogate pair, which no file can."""
    return _CONTROLS.sub("?", " ".join(text.encode("utf-8", "replace").decode().split()))


def _cell(text: str) -> str:
    """A name in a CSV file."""
    return safe_cell(_plain_text(text))


def _latex(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in _plain_text(text))


def _markdown(text: str) -> str:
    return _plain_text(text).translate(_MARKDOWN)


def _piped(texts: Iterable[str]) -> str:
    return f"| {' | '.join(texts)} |"
