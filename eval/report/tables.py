"""The table of models × datasets as text: CSV, LaTeX and Markdown. The same results give the same bytes.

Columns are the models in the order of the results, then published numbers; rows are averages, then datasets. CSV
holds the numbers as they are, the others percentages with one decimal. A name that a program for tables would take
for a formula begins with an apostrophe in CSV.
"""

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from eval.report.charts import number
from eval.report.result_set import read_result_set
from eval.report.score_table import Published, ScoreTable, Suites, is_share, task_tables
from eval.report.scores import metric_name

__all__ = ["as_csv", "as_latex", "as_markdown"]

_LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "[": "{[}",  # at the start of a row it would belong to the end of the one before
}  # fmt: skip
_MARKDOWN = str.maketrans({mark: f"\\{mark}" for mark in "\\`*_[]<>|#"})
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]")  # a terminal may obey them
_FORMULA = ("=", "+", "-", "@")
_NAMES = ("dataset", "task", "metric")


@dataclass(frozen=True, kw_only=True)
class _Row:
    """One row: what was measured, a number a model and a published model, and whether it is an average."""

    names: tuple[str, str, str]
    values: tuple[float | None, ...]
    published: tuple[float | None, ...]
    average: bool = False

    def texts(self) -> list[str]:
        """Percentages, or plain numbers where one is not within 0 and 1; "" for what is not there."""
        values = (*self.values, *self.published)
        share = is_share(*values)
        return ["" if one is None else f"{100 * one:.1f}" if share else number(one) for one in values]

    def best(self) -> set[int]:
        """The places of the greatest of several models' numbers, as they are told."""
        texts = self.texts()[: len(self.values)]
        known = {text: value for text, value in zip(texts, self.values, strict=True) if value is not None}
        top = max(known, key=lambda text: known[text], default="")
        return {i for i, text in enumerate(texts) if text == top} if len(known) > 1 else set()


@dataclass(frozen=True, kw_only=True)
class _Table:
    """What all formats write."""

    columns: tuple[str, ...]
    rows: tuple[_Row, ...]


def as_csv(
    results: Sequence[Path],
    *,
    suites: Suites | None = None,
    published: Published | None = None,
    primary: Mapping[str, str] | None = None,
) -> str:
    """Comma-separated values below a line of column names.

    Args:
        results: ``results.jsonl`` files.
        suites: by name, the datasets to take averages over.
        published: by dataset, then model or architecture, what others measured, in 0 … 1.
        primary: by dataset, its primary metric; by default the first that was recorded.

    Raises:
        DataError: a file cannot be read, or there are no scores.
    """
    table = _table(results, suites, published, primary)
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(map(_cell, [*_NAMES, *table.columns]))
    for row in table.rows:
        values = ["" if value is None else f"{value:.6g}" for value in (*row.values, *row.published)]
        writer.writerow([*map(_cell, row.names), *values])
    return file.getvalue()


def as_latex(
    results: Sequence[Path],
    *,
    suites: Suites | None = None,
    published: Published | None = None,
    primary: Mapping[str, str] | None = None,
) -> str:
    """A ``tabular`` for the package booktabs, the best model of each row in bold; see ``as_csv``."""
    table = _table(results, suites, published, primary)
    lines = [
        "% needs \\usepackage{booktabs}; numbers are percentages",
        f"\\begin{{tabular}}{{lll{'r' * len(table.columns)}}}",
        "\\toprule",
        " & ".join(map(_latex, ["Dataset", "Task", "Metric", *table.columns])) + r" \\",
        "\\midrule",
    ]
    for i, row in enumerate(table.rows):
        if i and table.rows[i - 1].average and not row.average:
            lines.append("\\midrule")
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
        _piped(map(_markdown, ["Dataset", "Task", "Metric", *table.columns])),
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
    """All tasks' tables, one below the other; published numbers stand in the first alone."""
    found = read_result_set(results)
    tables = task_tables(found, suites=suites or {}, primary=primary or {}, published=published or {})
    columns = [model.label for model in found.models]
    columns += [f"{name} (published)" for table in tables.values() for name in table.published]
    most = max((len(table.published) for table in tables.values()), default=0)
    rows = [row for task, table in tables.items() for row in _rows(task, table, most)]
    return _Table(columns=tuple(columns), rows=tuple(rows))


def _rows(task: str, table: ScoreTable, published: int) -> list[_Row]:
    more = (None,) * (published - len(table.published))
    rows = [
        _Row(
            names=(f"mean of {average.suite}", task, f"over {average.label}"),
            values=average.cells,
            published=(*average.published, *more),
            average=True,
        )
        for average in table.averages
    ]
    for line in table.lines:
        name = f"{line.dataset} ({line.note})" if line.note else line.dataset
        own = next((cell.task for cell in line.cells if cell), task)
        values = tuple(None if cell is None else cell.value for cell in line.cells)
        published_here = (*line.published, *more)
        rows.append(
            _Row(names=(name, own, metric_name(line.metric)), values=values, published=published_here)
        )
    return rows


def _plain(text: str) -> str:
    """One line of whole characters that show: a name may hold half of a surrogate pair, which no file can."""
    return _CONTROLS.sub("?", " ".join(text.encode("utf-8", "replace").decode().split()))


def _cell(text: str) -> str:
    """A name of a CSV file, which programs for tables would take for a formula if it begins like one."""
    plain = _plain(text)
    return f"'{plain}" if plain.startswith(_FORMULA) else plain


def _latex(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in _plain(text))


def _markdown(text: str) -> str:
    return _plain(text).translate(_MARKDOWN)


def _piped(texts: Iterable[str]) -> str:
    return f"| {' | '.join(texts)} |"
