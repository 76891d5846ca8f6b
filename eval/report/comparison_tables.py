"""The tables of the page over many models: scores, every number, and where they come from."""

import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from eval.dataset import some
from eval.report.charts import figure, number
from eval.report.page_frame import scrolling
from eval.report.result_set import Model, ResultSet, Row
from eval.report.same_data import DataGroup, by_data
from eval.report.score_table import Average, Line, ScoreTable
from eval.report.scores import is_share, lower_is_better, metric_name, setting_name

__all__ = ["all_scores", "model_facts", "score_table_html"]

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
            *(f"<td>{escape(_told(model.provenance.get(key)))}</td>" for key in own_keys),
        ]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    whole = f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    facts = "".join(
        f"<dt>{escape(_words(key))}</dt><dd>{escape(_told(value))}</dd>" for key, value in shared.items()
    )
    heading = "The same for all" if len(results.models) > 1 else "Settings and versions"
    listed = f'<h3>{heading}</h3><dl class="facts">{facts}</dl>' if facts else ""
    facts = "".join(
        f"<dt>{escape(task)}</dt><dd>{escape(_options_told(own))}</dd>" for task, own in options.items()
    )
    listed += f'<h3>Options of the tasks</h3><dl class="facts">{facts}</dl>' if facts else ""
    return scrolling("Models", whole, kind="models") + listed + _datasets(results)


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


def _datasets(results: ResultSet) -> str:
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


def _told(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_told(one)}" for key, one in value.items())
    if value is None:
        return ""
    if isinstance(value, float):
        return number(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
