"""Scores as text for other programs: CSV, LaTeX and Markdown. The same results give the same bytes.

LaTeX and Markdown are the table of models × datasets, means over several tasks first, then task by task: columns
are the models in the order of the results, then published numbers; rows are averages, then the primary metric of
each dataset and setting, in percent.
CSV is for programs that compute: a row a score, every metric with its interval and chance, numbers as
they are. A name that a program for tables would take for a formula begins with an apostrophe there.
"""

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from clipkit.files.table import safe_cell
from eval.datasets.dataset import some
from eval.report.draw import figure, number, scrolling
from eval.report.result_set import DataGroup, Model, ResultSet, Row, by_data
from eval.report.scores import (
    Average,
    Line,
    Published,
    ScoreTable,
    Suites,
    is_share,
    lower_is_better,
    metric_name,
    read_scores,
    setting_name,
    task_tables,
)

__all__ = ["all_scores", "as_csv", "as_latex", "as_markdown", "model_facts", "score_table_html"]

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


# --------------------------------------------------------------------------------------------------------------
# The tables of the page over many models: scores, every number, and where they come from.

_FEW = 3  # up to so many models, a cell shows its interval
_BREAKS = "/-_: @"
_TOLD_APART = (
    "model",
    "weights",
    "architecture",
    "gflops",
    "prompts",
    "prompt_count",
    "data_revision",
    "captions",
    "choices",
    "time",
    "options",
    "train_overlap",
)
_FOR_PROGRAMS = ("model_hash", "inputs", "lines")  # by which a program finds what was scored already
_OPTION = re.compile(r"(\w+)=(\([^()]*\)|[^\s()]+)(?: |$)")
_SAID = {"True": "yes", "False": "no"}
_MARKS = re.compile(r"[()']|,(?=\))")


def broken(name: str) -> str:
    """A long name, escaped, that may be broken where its parts meet."""
    return "".join(f"{escape(letter)}<wbr>" if letter in _BREAKS else escape(letter) for letter in name)


def score_table_html(title: str, table: ScoreTable) -> str:
    """Averages, then a line a dataset; the best model of each line in bold."""
    if not table.lines and not table.averages:
        return ""
    few = len(table.models) <= _FEW
    heads = "".join(
        f'<th scope="col" title="{escape(model.name)}">{broken(model.label)}</th>' for model in table.models
    )
    heads += "".join(
        f'<th scope="col" class="pub">{broken(name)} <small>published</small></th>'
        for name in table.published
    )
    averages = "".join(_average_row(average) for average in table.averages)
    usual = _usual_metric(table)
    lines = "".join(_line_row(line, few, usual) for line in table.lines)
    body = (
        f'<tbody class="means">{averages}</tbody>' if averages else ""
    ) + f"<tbody>{lines}</tbody>" * bool(lines)
    what = f"Dataset <small>{escape(metric_name(usual))}</small>" if lines else "Suite"
    whole = f'<table><thead><tr><th scope="col">{what}</th>{heads}</tr></thead>{body}</table>'
    kind = "grid few" if few else "grid"
    return scrolling(f"{title}: models and datasets", whole, kind=kind)


def _usual_metric(table: ScoreTable) -> str:
    """The metric of most lines, which only the others name."""
    metrics = [line.metric for line in table.lines]
    return max(dict.fromkeys(metrics), key=metrics.count, default="")


def _average_row(average: Average) -> str:
    cells = _numbers(average.cells, share=True)
    published = "".join(
        f'<td class="pub">{"" if one is None else f"{100 * one:.1f}"}</td>' for one in average.published
    )
    tasks = f": {average.task}" if len(average.tasks) > 1 else ""
    name = f"{broken(average.name)} <small>over {average.label}{escape(tasks)}</small>"
    return f'<tr><th scope="row">{name}</th>{cells}{published}</tr>'


def _line_row(line: Line, few: bool, usual: str) -> str:
    values = [None if cell is None else cell.value for cell in line.cells]
    share = is_share(
        line.metric,
        *values,
        *(one for cell in line.cells if cell for one in (cell.low, cell.high, cell.chance)),
    )
    said = [_titles(cell, share) for cell in line.cells]
    small = [_interval(cell, share) if few else "" for cell in line.cells]
    cells = _numbers(values, share=share, titles=said, small=small, metric=line.metric)
    published = "".join(
        f'<td class="pub">{"" if one is None else f"{100 * one:.1f}" if share else number(one)}</td>'
        for one in line.published
    )
    own = f"{line.note}, ".removeprefix(f"{line.task}, ").removesuffix(", ")  # the heading names the task
    note = ", ".join(filter(None, (metric_name(line.metric) if line.metric != usual else "", own)))
    small_print = f" <small>{escape(note)}</small>" if note else ""
    return f'<tr><th scope="row">{broken(line.dataset)}{small_print}</th>{cells}{published}</tr>'


def _numbers(
    values: Sequence[float | None],
    *,
    share: bool,
    titles: Sequence[str] = (),
    small: Sequence[str] = (),
    metric: str = "",
) -> str:
    texts = [None if one is None else f"{100 * one:.1f}" if share else number(one) for one in values]
    known = [one for one in values if one is not None]
    most = min if lower_is_better(metric) else max
    best = texts[values.index(most(known))] if share and len(known) > 1 else None
    cells = []
    for i, (value, text) in enumerate(zip(values, texts, strict=True)):
        if value is None or text is None:
            cells.append('<td class="no">–</td>')
            continue
        title = f' title="{titles[i]}"' if titles and titles[i] else ""
        shade = f' style="--v:{value:.3f}"' if share else ""
        more = f"<small>{small[i]}</small>" if small and small[i] else ""
        kind = ' class="best"' if text == best else ""
        cells.append(f"<td{kind}{shade}{title}>{text}{more}</td>")
    return "".join(cells)


def _interval(row: Row | None, share: bool) -> str:
    if row is None or row.low is None or row.high is None:
        return ""
    low, high = (f"{100 * one:.1f}" if share else number(one) for one in (row.low, row.high))
    return f"{low}–{high}"


def _titles(row: Row | None, share: bool) -> str:
    if row is None:
        return ""
    parts = [_interval(row, share) and f"95%: {_interval(row, share)}"]
    parts.append(
        ""
        if row.chance is None
        else f"chance {figure(100 * row.chance, '%') if share else number(row.chance)}"
    )
    parts.append("" if row.n is None else f"n = {number(row.n)}")
    return ", ".join(part for part in parts if part)


def all_scores(results: ResultSet) -> str:
    """Every score with its interval, a table a dataset behind a line to click on."""
    by_dataset: dict[str, dict[tuple[str, ...], list[Row]]] = {}
    for row in results.rows:
        by_dataset.setdefault(row.dataset, {}).setdefault(row.what, []).append(row)
    heads = "".join(f'<th scope="col">{broken(model.label)}</th>' for model in results.models)
    parts = []
    for dataset, rows in by_dataset.items():
        body = "".join(
            _score_row(what, group, len(results.models))
            for what, own in rows.items()
            for group in by_data(own)
        )
        whole = (
            '<table><thead><tr><th scope="col">Score</th><th scope="col">n</th><th scope="col">chance</th>'
            f"{heads}</tr></thead><tbody>{body}</tbody></table>"
        )
        count = f"{len(rows)} {'score' if len(rows) == 1 else 'scores'}"
        opened = " open" if len(by_dataset) == 1 else ""
        parts.append(
            f"<details{opened}><summary><b>{escape(dataset)}</b> <small>{count}</small></summary>"
            f"{scrolling(f'All scores on {dataset}', whole, kind='grid all')}</details>"
        )
    return "".join(parts)


def _score_row(what: tuple[str, ...], group: DataGroup, models: int) -> str:
    _, split, task, prompts, setting, metric = what
    rows = {row.model: row for row in group.rows}
    values = [one for row in rows.values() for one in (row.value, row.low, row.high, row.chance)]
    share = is_share(metric, *values)
    note = ", ".join(
        filter(
            None,
            (
                task,
                setting_name(task, setting),
                prompts and f"prompts {prompts}",
                "" if split == "test" else split,
                group.note,
            ),
        )
    )
    cells = []
    for i in range(models):
        row = rows.get(i)
        if row is None:
            cells.append('<td class="no">–</td>')
            continue
        interval = _interval(row, share)
        text = f"{100 * row.value:.2f}" if share else number(row.value)
        cells.append(f"<td>{text}{f'<small>{interval}</small>' if interval else ''}</td>")
    size = "" if group.n is None else number(group.n)
    chances = [row.chance for row in rows.values() if row.chance is not None]
    chance = "" if not chances else figure(100 * chances[0], "%") if share else number(chances[0])
    name = f"{escape(metric_name(metric))} <small>{escape(note)}</small>"
    return f'<tr><th scope="row">{name}</th><td>{size}</td><td>{chance}</td>{"".join(cells)}</tr>'


def model_facts(results: ResultSet, options: Mapping[str, Mapping[str, Sequence[str]]]) -> str:
    """Where the scores come from: a row a model, and below what all of them share.

    Args:
        results: of all models.
        options: by task, then as its lines tell them, the datasets that it was scored on with these.
    """
    shared, own_keys = _shared_facts(results.models)
    steps = any(model.step is not None for model in results.models)
    names = ["Model", "Weights", "Architecture", *(["Step"] if steps else []), "GFLOPs a picture"]
    names += [_words(key) for key in own_keys]
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    rows = []
    for model in results.models:
        cells = [
            f'<th scope="row">{broken(model.name)}</th>',
            f"<td>{broken(model.weights)}</td><td>{broken(model.architecture)}</td>",
            f"<td>{'' if model.step is None else number(model.step)}</td>" if steps else "",
            f"<td>{'' if model.gflops is None else number(model.gflops)}</td>",
            *(f"<td>{escape(_shown(model.provenance.get(key)))}</td>" for key in own_keys),
        ]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    whole = f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    facts = "".join(
        f"<dt>{escape(_words(key))}</dt><dd>{escape(_shown(value))}</dd>" for key, value in shared.items()
    )
    heading = "The same for all" if len(results.models) > 1 else "Settings and versions"
    listed = f'<h3>{heading}</h3><dl class="facts">{facts}</dl>' if facts else ""
    facts = "".join(
        f"<dt>{escape(task)}</dt><dd>{escape(_options_told(own))}</dd>" for task, own in options.items()
    )
    listed += f'<h3>Options of the tasks</h3><dl class="facts">{facts}</dl>' if facts else ""
    return scrolling("Models", whole, kind="models") + listed + _dataset_revisions(results)


def _shared_facts(models: Sequence[Model]) -> tuple[dict[str, Any], list[str]]:
    """What all models' provenance says alike, and the names of what it does not."""
    shared: dict[str, Any] = {}
    own: list[str] = []
    for key in dict.fromkeys(key for model in models for key in model.provenance):
        values = [model.provenance.get(key) for model in models]
        if key in (*_TOLD_APART, *_FOR_PROGRAMS) or all(value is None for value in values):
            continue
        if all(value == values[0] for value in values):
            shared[key] = values[0]
        else:
            own.append(key)
    return shared, own


def _dataset_revisions(results: ResultSet) -> str:
    """Revisions of pictures and prompts, by dataset."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for row in results.rows:
        seen = found.setdefault((row.dataset, row.split), {})
        if row.data_revision:
            seen[f"pictures {row.data_revision}"] = None
        if row.prompts and row.task == "zero-shot":
            seen[f"prompts {' '.join(filter(None, (row.prompt_set, row.prompts)))}"] = None
    facts = "".join(
        f"<dt>{escape(name if split == 'test' else f'{name}, {split}')}</dt><dd>{escape('; '.join(seen))}</dd>"
        for (name, split), seen in found.items()
        if seen
    )
    return (
        f'<details><summary>Revisions of the datasets</summary><dl class="facts">{facts}</dl></details>'
        if facts
        else ""
    )


def _options_told(options: Mapping[str, Sequence[str]]) -> str:
    """The options of a task, with their datasets where these differ in them."""
    told = []
    for text, datasets in options.items():
        pairs = _OPTION.findall(text)
        whole = "".join(match[0] for match in _OPTION.finditer(text)) == text
        words = [f"{_words(name)} {_SAID.get(value, _MARKS.sub('', value))}" for name, value in pairs]
        shown = "; ".join(words) if whole else text
        told.append(f"{shown} ({some(list(datasets))})" if len(options) > 1 else shown)
    return " – ".join(told)


def _words(key: str) -> str:
    return key.replace("_", " ")


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_shown(one)}" for key, one in value.items())
    if value is None:
        return ""
    if isinstance(value, float):
        return number(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
