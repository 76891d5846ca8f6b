"""Tables of scores for the terminal, at most 80 columns wide; control characters in names are escaped.

On a narrower terminal the less important columns are left out, so that the metric and its value stay readable.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from rich import box
from rich.cells import cell_len, chop_cells
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from clipkit.files import printable
from eval.compare import LEVEL, Difference, ModelComparison
from eval.metrics import is_fraction, is_informative, is_rank, lower_is_better, metric_title
from eval.report.tables import PLAIN, format_setting, join_words
from eval.results.scores import Score
from eval.results.table import group_by

_WIDTH = 80
_NAME = 20  # characters of a line of a dataset's name
_LEAST_NAME = 7  # on a narrow terminal
_METRIC = 9  # minimum width of a metric, so that it breaks only between words
_GAP = 2  # characters between columns
_SHOTS = re.compile(r"(\d+)-shot ?(.*)")
_HEADS = ("A", "B", "B − A [95%]", "p", "better")
_LEFT_OUT = ("p", "A", "B", "better")  # in this order on a narrow terminal
_table = partial(Table, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))


@dataclass(frozen=True)
class _Fitted:
    """Content that depends on the width of the terminal."""

    render: Callable[[int], RenderableType]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield self.render(options.max_width)


def score_table(scores: Sequence[Score]) -> RenderableType:
    """Show a section per dataset and task and a row per score, or per metric for few-shot scores."""
    shown = [score for score in scores if is_informative(score.metric, score.n)]
    few = [score for score in shown if score.task == "few-shot" and _SHOTS.fullmatch(score.setting)]
    others = [score for score in shown if score not in few]
    plain = [_Fitted(partial(_plain, others))] if others or not few else []
    return Group(*plain, _Fitted(lambda width: Group(*_few_shot(few, min(width, _WIDTH)))))


def _plain(scores: Sequence[Score], width: int) -> Table:
    """Show one row per score; chance, n and then the interval are left out if they do not fit."""
    several = len({score.task for score in scores}) > 1
    before: tuple[str, ...] = ()
    names: list[str] = []
    sections: set[int] = set()  # rows before which one begins
    for i, score in enumerate(scores):
        group = (score.dataset, score.task, score.setting, score.prompt_set)
        name = ""
        if group != before:
            prompts = f"prompts {score.prompt_set}" if score.prompt_set not in ("", "own") else ""
            if group[:2] != before[:2]:
                sections |= {i} if before else set()
                start = (score.dataset, score.task if several else "")
            else:
                start = (" ", "")
            name = " ".join(filter(None, (*start, prompts, score.setting)))
        before = group
        names.append(name)
    plain = [score.metric for score in scores if not is_fraction(score.metric)]
    value = "value %" if not plain else "% or rank" if all(map(is_rank, plain)) else "% or value"
    chance = "chance %" if value != "% or value" else "chance"
    cells = {
        value: [_value(score, score.value) for score in scores],
        "95% interval": [_interval(score) for score in scores],
        chance: ["" if score.chance is None else _value(score, score.chance, digits=2) for score in scores],
        "n": [f"{score.n:,}" for score in scores],
    }
    words = [word for score in scores for word in _metric(score.metric).split()]
    metric = max(cell_len("metric"), min(_METRIC, max(map(cell_len, words), default=0)))
    lines = [line for name in names for line in _broken(name).plain.split("\n")]
    widest = max(map(cell_len, ["dataset", *lines]))

    def room() -> int:
        """The width left for names."""
        others = [metric, *(max(map(cell_len, [head, *own])) for head, own in cells.items())]
        return width - _GAP - sum(column + _GAP for column in others)

    for head in (chance, "n", "95% interval"):
        if room() < widest:
            del cells[head]
    most = max(_LEAST_NAME, min(_NAME, room()))
    table = _table()
    table.add_column("dataset", no_wrap=True)
    table.add_column("metric", overflow="fold", min_width=metric)
    for head in cells:
        table.add_column(head, justify="right", no_wrap=True)
    for i, score in enumerate(scores):
        if i in sections:
            table.add_section()
        own = (column[i] for column in cells.values())  # Text is not read as markup
        table.add_row(_broken(names[i], most), Text(_metric(score.metric)), *own)
    return table


def _few_shot(scores: Sequence[Score], width: int) -> Iterator[RenderableType]:
    """Show a table per dataset: a row per metric and estimator, a column per number of images per class."""
    spread = {
        (score.dataset, score.setting, score.metric.removesuffix("_std")): score
        for score in scores
        if score.metric.endswith("_std")
    }
    datasets: dict[str, dict[str, dict[int, Score]]] = {}
    for score in scores:
        match = _SHOTS.fullmatch(score.setting)
        if match and not score.metric.endswith("_std"):
            name = f"{_metric(score.metric)}, {printable(match[2]) or PLAIN}"
            datasets.setdefault(score.dataset, {}).setdefault(name, {})[int(match[1])] = score

    def mean_and_spread(score: Score | None) -> str:
        if score is None:
            return "–"
        std = spread.get((score.dataset, score.setting, score.metric))
        value = _value(score, score.value) + (f" ±{_value(std, std.value)}" if std else "")
        return f"{value}\n{_interval(score)}".rstrip()

    chance = width >= _WIDTH // 2  # left out on a narrower terminal
    room = width - _METRIC - 2 * _GAP - (len("chance") if chance else 0)
    for dataset, rows in datasets.items():
        sizes = sorted({score.n for row in rows.values() for score in row.values()})
        parts: list[list[int]] = [[]]  # whose columns fit next to each other
        free = room
        for k in sorted({k for row in rows.values() for k in row}):
            cells = [mean_and_spread(row[k]) for row in rows.values() if k in row]
            wide = _GAP + max(len(line) for cell in (*cells, f"{k}-shot") for line in cell.split("\n"))
            if parts[-1] and wide > free:
                parts.append([])
                free = room
            parts[-1].append(k)
            free -= wide
        for shots in parts:
            size = f" few-shot, n = {' or '.join(f'{n:,}' for n in sizes)}"
            table = _table(title=Text.assemble((printable(dataset), "bold"), size), title_justify="left")
            table.add_column("metric", overflow="fold")
            for head in (*(f"{k}-shot" for k in shots), *(["chance"] if chance else [])):
                table.add_column(head, justify="right", no_wrap=True)
            for name, row in rows.items():
                cells = [mean_and_spread(row.get(k)) for k in shots]
                if chance:
                    value = next(score.chance for score in row.values())
                    cells.append("" if value is None else f"{100 * value:.2f}")
                table.add_row(Text(name), *cells)
            yield table
    if datasets:
        draws = max((score.n for score in spread.values()), default=1)
        mean = f"mean of {draws} draws ± standard deviation; below it its 95% interval"
        yield Text(f"Percent by images per class: {mean if draws > 1 else 'of one draw'}.\n")


def _metric(metric: str) -> str:
    """Format the recorded name of a metric as words between which a table may break."""
    return printable(metric.replace("_", " ") if metric.endswith(("acc1", "acc5")) else metric_title(metric))


def _broken(name: str, most: int = _NAME) -> Text:
    """Break a name between its parts into lines of at most so many characters."""
    lines = [""]
    for piece in re.findall(r"[^-_/. ]*[-_/. ]?", printable(name)):
        if lines[-1].strip() and cell_len(lines[-1] + piece.rstrip()) > most:
            lines.append("")
        first, *more = chop_cells(piece, most) or [""]
        lines[-1] += first
        lines += more
    return Text("\n".join(line.rstrip() for line in lines))


def _value(score: Score, value: float, *, digits: int = 1) -> str:
    if is_fraction(score.metric):
        return f"{100 * value:.{digits}f}"
    return f"{value:,.1f}" if is_rank(score.metric) else f"{value:.3f}"


def _interval(score: Score) -> str:
    if score.low is None or score.high is None:
        return ""
    return f"{_value(score, score.low)}–{_value(score, score.high)}"


def comparison_table(comparison: ModelComparison) -> RenderableType:
    """Show the differences of two models; A is the first and B the second.

    A section has the datasets over which p was corrected (one task, setting and metric), or all metrics of a single
    dataset. Narrow terminals show fewer columns; the difference is the last to be left out.
    """
    return _Fitted(lambda width: _differences(comparison, min(width, _WIDTH)))


def _differences(comparison: ModelComparison, width: int) -> Group:
    differences = comparison.differences
    columns = {
        head: max(len(row[i]) for row in (_HEADS, *map(_texts, differences))) for i, head in enumerate(_HEADS)
    }
    for head in _LEFT_OUT:
        if _LEAST_NAME + sum(column + _GAP for column in columns.values()) > width:
            del columns[head]
    kept = [i for i, head in enumerate(_HEADS) if head in columns]

    def grid(rows: Sequence[tuple[Text, Sequence[str], str]]) -> Table:
        """Rows of name, texts and style, whose columns are aligned with those of other grids."""
        table = Table.grid(padding=(0, 2, 0, 0))
        name_width = max(_LEAST_NAME, width - sum(columns.values()) - _GAP * len(columns))
        table.add_column(overflow="fold", width=name_width)
        for column in columns.values():
            table.add_column(justify="right", no_wrap=True, width=column)
        for name, texts, style in rows:
            table.add_row(name, *(Text(texts[i]) for i in kept), style=style)
        return table

    sections: dict[str, list[tuple[Text, Difference]]] = {}
    for kind, same_kind in group_by(differences, _describe_kind).items():
        single = len({difference.dataset for difference in same_kind}) == 1
        for metric, same_metric in group_by(same_kind, lambda difference: difference.metric).items():
            title = f"{kind} on {same_kind[0].dataset}" if single else f"{kind}: {_metric(metric)}"
            for difference in same_metric:
                name = Text(_metric(metric)) if single else _broken(difference.dataset)
                sections.setdefault(title, []).append((name, difference))
    shown: list[RenderableType] = []
    for title, rows in sections.items():
        shown.append(Text(("\n" if shown else "") + printable(title), style="bold"))
        texts = []
        for name, difference in rows:
            texts.append((name, _texts(difference), "bold" if difference.beyond_chance else ""))
        shown.append(grid(texts))
    count = sum(difference.beyond_chance for difference in differences)
    return Group(
        Text(f"A: {printable(comparison.first)}\nB: {printable(comparison.second)}\n"),
        grid([(Text(""), _HEADS, "")]),
        Text("─" * width),
        *shown,
        Text(
            f"\n{count} of {len(differences)} differences are beyond chance (p < {LEVEL:g}, corrected\n"
            "by Holm's procedure over the datasets of each task, setting and metric).\n"
            "Intervals, in percentage points or ranks, are of one difference each, uncorrected."
        ),
    )


def _describe_kind(difference: Difference) -> str:
    return join_words(
        difference.task,
        format_setting(difference.task, difference.setting),
        f"prompts {difference.prompt_set}" if difference.prompt_set else "",
    )


def _texts(difference: Difference) -> tuple[str, ...]:
    """Format a row without its name."""
    factor, unit = 1, ""
    if is_fraction(difference.metric, difference.first, difference.second):
        factor, unit = 100, "%"
    test = difference.test
    low, high = factor * test.low, factor * test.high
    better = "–"
    if difference.beyond_chance:
        better = "B" if (test.difference > 0) != lower_is_better(difference.metric) else "A"
    return (
        f"{factor * difference.first:,.1f}{unit}",
        f"{factor * difference.second:,.1f}{unit}",
        f"{factor * test.difference:+,.1f} [{low:+,.1f}, {high:+,.1f}]".replace("-", "−"),
        "<0.001" if difference.p < 0.001 else f"{difference.p:.3f}",
        better,
    )
