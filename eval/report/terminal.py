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
from eval.metrics import is_fraction, is_informative, is_rank, metric_title
from eval.report.tables import PLAIN
from eval.results.records import Score

WIDTH = 80
_NAME = 20  # characters of a line of a dataset's name
LEAST_NAME = 7  # on a narrow terminal
_METRIC = 9  # minimum width of a metric, so that it breaks only between words
GAP = 2  # characters between columns
_SHOTS = re.compile(r"(\d+)-shot ?(.*)")
_create_table = partial(Table, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))


@dataclass(frozen=True)
class Fitted:
    """Content that depends on the width of the terminal."""

    render: Callable[[int], RenderableType]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield self.render(options.max_width)


def score_table(scores: Sequence[Score]) -> RenderableType:
    """Show a section per dataset and task and a row per score, or per metric for few-shot scores."""
    shown = [score for score in scores if is_informative(score.metric, score.n)]
    few = [score for score in shown if score.task == "few-shot" and _SHOTS.fullmatch(score.setting)]
    others = [score for score in shown if score not in few]
    plain = [Fitted(partial(_tabulate_plain, others))] if others or not few else []
    return Group(*plain, Fitted(lambda width: Group(*_tabulate_few_shot(few, min(width, WIDTH)))))


def _tabulate_plain(scores: Sequence[Score], width: int) -> Table:
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
        value: [_format_value(score, score.value) for score in scores],
        "95% interval": [_format_interval(score) for score in scores],
        chance: [
            "" if score.chance is None else _format_value(score, score.chance, digits=2) for score in scores
        ],
        "n": [f"{score.n:,}" for score in scores],
    }
    words = [word for score in scores for word in format_metric(score.metric).split()]
    metric = max(cell_len("metric"), min(_METRIC, max(map(cell_len, words), default=0)))
    lines = [line for name in names for line in break_name(name).plain.split("\n")]
    widest = max(map(cell_len, ["dataset", *lines]))

    def room() -> int:
        """The width left for names."""
        others = [metric, *(max(map(cell_len, [head, *texts])) for head, texts in cells.items())]
        return width - GAP - sum(column + GAP for column in others)

    for head in (chance, "n", "95% interval"):
        if room() < widest:
            del cells[head]
    most = max(LEAST_NAME, min(_NAME, room()))
    table = _create_table()
    table.add_column("dataset", no_wrap=True)
    table.add_column("metric", overflow="fold", min_width=metric)
    for head in cells:
        table.add_column(head, justify="right", no_wrap=True)
    for i, score in enumerate(scores):
        if i in sections:
            table.add_section()
        texts = (column[i] for column in cells.values())  # Text is not read as markup
        table.add_row(break_name(names[i], most), Text(format_metric(score.metric)), *texts)
    return table


def _tabulate_few_shot(scores: Sequence[Score], width: int) -> Iterator[RenderableType]:
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
            name = f"{format_metric(score.metric)}, {printable(match[2]) or PLAIN}"
            datasets.setdefault(score.dataset, {}).setdefault(name, {})[int(match[1])] = score

    def mean_and_spread(score: Score | None) -> str:
        if score is None:
            return "–"
        std = spread.get((score.dataset, score.setting, score.metric))
        value = _format_value(score, score.value) + (f" ±{_format_value(std, std.value)}" if std else "")
        return f"{value}\n{_format_interval(score)}".rstrip()

    chance = width >= WIDTH // 2  # left out on a narrower terminal
    room = width - _METRIC - 2 * GAP - (len("chance") if chance else 0)
    for dataset, rows in datasets.items():
        sizes = sorted({score.n for row in rows.values() for score in row.values()})
        parts: list[list[int]] = [[]]  # whose columns fit next to each other
        free = room
        for k in sorted({k for row in rows.values() for k in row}):
            cells = [mean_and_spread(row[k]) for row in rows.values() if k in row]
            wide = GAP + max(len(line) for cell in (*cells, f"{k}-shot") for line in cell.split("\n"))
            if parts[-1] and wide > free:
                parts.append([])
                free = room
            parts[-1].append(k)
            free -= wide
        for shots in parts:
            size = f" few-shot, n = {' or '.join(f'{n:,}' for n in sizes)}"
            table = _create_table(
                title=Text.assemble((printable(dataset), "bold"), size), title_justify="left"
            )
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


def format_metric(metric: str) -> str:
    """Format the recorded name of a metric as words between which a table may break."""
    return printable(metric.replace("_", " ") if metric.endswith(("acc1", "acc5")) else metric_title(metric))


def break_name(name: str, most: int = _NAME) -> Text:
    """Break a name between its parts into lines of at most so many characters."""
    lines = [""]
    for piece in re.findall(r"[^-_/. ]*[-_/. ]?", printable(name)):
        if lines[-1].strip() and cell_len(lines[-1] + piece.rstrip()) > most:
            lines.append("")
        first, *more = chop_cells(piece, most) or [""]
        lines[-1] += first
        lines += more
    return Text("\n".join(line.rstrip() for line in lines))


def _format_value(score: Score, value: float, *, digits: int = 1) -> str:
    if is_fraction(score.metric):
        return f"{100 * value:.{digits}f}"
    return f"{value:,.1f}" if is_rank(score.metric) else f"{value:.3f}"


def _format_interval(score: Score) -> str:
    if score.low is None or score.high is None:
        return ""
    return f"{_format_value(score, score.low)}–{_format_value(score, score.high)}"
