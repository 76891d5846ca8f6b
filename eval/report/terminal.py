"""What a terminal is shown: scores as tables of 80 columns, and names from data made harmless to it.

On a narrower terminal the less important columns are left out, so that the metric and its value stay readable.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from rich import box
from rich.cells import cell_len, chop_cells
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from clipkit.files.terminal import printable
from eval.compare import LEVEL, Difference, ModelComparison
from eval.report.tables import PLAIN, is_fraction, is_rank, lower_is_better, metric_name, setting_name, tells
from eval.results.scores import Score

__all__ = ["comparison_table", "score_table", "shown_value"]

_WIDTH = 80
_NAME = 20  # letters of a line of a dataset's name, so that the metric beside it breaks between words alone
_PIECE = re.compile(r"[^-_/. ]*[-_/. ]?")
_SHOTS = re.compile(r"(\d+)-shot ?(.*)")
_METRIC = 9  # letters beside few-shot scores, so that a metric breaks between words alone
_GAP = 2  # letters between columns
_LEAST_NAME = 7  # letters of a dataset's name on a narrow terminal
_HEADS = ("A", "B", "B − A [95%]", "p", "better")
_HEADS_LEFT_OUT = ("p", "A", "B", "better")  # in this order, where the terminal is narrow


@dataclass(frozen=True)
class _Fitted:
    """Content that depends on the width of the terminal."""

    made: Callable[[int], RenderableType]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield self.made(options.max_width)


def score_table(scores: Sequence[Score]) -> RenderableType:
    """A section a dataset and task, a row a score; few-shot folds all its scores of one metric into a row."""
    told = [score for score in scores if tells(score.metric, score.n)]
    few = [score for score in told if score.task == "few-shot" and _SHOTS.fullmatch(score.setting)]
    others = [score for score in told if score not in few]
    plain = [_Fitted(partial(_plain, others))] if others or not few else []
    return Group(*plain, _Fitted(lambda width: Group(*_few_shot(few, min(width, _WIDTH)))))


def _plain(scores: Sequence[Score], width: int) -> Table:
    """One row a score; what does not fit in the width is left out: chance, n, and then the interval."""
    value = "% or rank" if any(is_rank(score.metric) for score in scores) else "value %"
    cells = {
        value: [shown_value(score, score.value) for score in scores],
        "95% interval": [_interval(score) for score in scores],
        "chance %": ["" if score.chance is None else f"{100 * score.chance:.2f}" for score in scores],
        "n": [f"{score.n:,}" for score in scores],
    }
    names, sections = _names(scores)
    words = [word for score in scores for word in _metric(score.metric).split()]
    least_metric = max(cell_len("metric"), min(_METRIC, max(map(cell_len, words), default=0)))
    lines = [line for name in names for line in _broken(name).plain.split("\n")]
    widest = max(map(cell_len, ["dataset", *lines]))

    def room() -> int:
        """What is left for the names."""
        others = [least_metric, *(max(map(cell_len, [head, *own])) for head, own in cells.items())]
        return width - _GAP - sum(column + _GAP for column in others)

    for head in ("chance %", "n", "95% interval"):
        if room() < widest:
            del cells[head]
    most = max(_LEAST_NAME, min(_NAME, room()))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("dataset", no_wrap=True)
    table.add_column("metric", overflow="fold", min_width=least_metric)
    for head in cells:
        table.add_column(head, justify="right", no_wrap=True)
    for i, score in enumerate(scores):
        if i in sections:
            table.add_section()
        # not a string, which would be read as markup
        table.add_row(
            _broken(names[i], most), Text(_metric(score.metric)), *(own[i] for own in cells.values())
        )
    return table


def _names(scores: Sequence[Score]) -> tuple[list[str], set[int]]:
    """What stands in the first column of each row, and the rows before which a section begins."""
    several = len({score.task for score in scores}) > 1
    before: tuple[str, ...] = ()
    names: list[str] = []
    sections: set[int] = set()
    for score in scores:
        group = (score.dataset, score.task, score.setting, score.prompt_set)
        name = score.dataset if group[:2] != before[:2] else ""
        if name and before:
            sections.add(len(names))
        if group != before:
            prompts = score.prompt_set if score.prompt_set not in ("", "own") else ""
            parts = (
                name,
                score.task if several and name else "",
                prompts and f"prompts {prompts}",
                score.setting,
            )
            name = ("" if name else "  ") + " ".join(filter(None, parts))
        before = group
        names.append(name)
    return names, sections


def _few_shot(scores: Sequence[Score], width: int) -> Iterator[RenderableType]:
    """A table a dataset: a row a metric and estimator, a column for each number of pictures a class."""
    spread = {
        (one.dataset, one.setting, one.metric.removesuffix("_std")): one
        for one in scores
        if one.metric.endswith("_std")
    }
    datasets: dict[str, dict[str, dict[int, Score]]] = {}
    for one in scores:
        match = _SHOTS.fullmatch(one.setting)
        if match and not one.metric.endswith("_std"):
            name = f"{_metric(one.metric)}, {printable(match[2]) or PLAIN}"
            datasets.setdefault(one.dataset, {}).setdefault(name, {})[int(match[1])] = one
    for dataset, rows in datasets.items():
        shots = sorted({k for row in rows.values() for k in row})
        chance = width >= _WIDTH // 2  # on a narrower terminal it is left out
        room = width - _METRIC - 2 * _GAP - (len("chance") if chance else 0)
        for part in _side_by_side(rows, shots, spread, room):
            yield _shots_table(dataset, rows, part, spread, chance=chance)
    if datasets:
        draws = max((one.n for one in spread.values()), default=1)
        mean = f"mean of {draws} draws ± standard deviation; below it its 95% interval"
        yield Text(f"Percent by pictures a class: {mean if draws > 1 else 'of one draw'}.\n")


def _side_by_side(
    rows: Mapping[str, dict[int, Score]],
    shots: Sequence[int],
    spread: dict[tuple[str, str, str], Score],
    room: int,
) -> list[list[int]]:
    """The numbers of pictures a class in parts whose columns fit beside each other."""
    parts: list[list[int]] = [[]]
    free = room
    for k in shots:
        cells = [_mean_and_spread(row[k], spread) for row in rows.values() if k in row]
        wide = _GAP + max(len(line) for cell in (*cells, f"{k}-shot") for line in cell.split("\n"))
        if parts[-1] and wide > free:
            parts.append([])
            free = room
        parts[-1].append(k)
        free -= wide
    return parts


def _shots_table(
    dataset: str,
    rows: dict[str, dict[int, Score]],
    shots: Sequence[int],
    spread: dict[tuple[str, str, str], Score],
    *,
    chance: bool,
) -> Table:
    sizes = sorted({score.n for row in rows.values() for score in row.values()})
    size = f"n = {' or '.join(f'{n:,}' for n in sizes)}"
    title = Text.assemble((printable(dataset), "bold"), f" few-shot, {size}")
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title=title, title_justify="left"
    )
    table.add_column("metric", overflow="fold")
    for k in shots:
        table.add_column(f"{k}-shot", justify="right", no_wrap=True)
    if chance:
        table.add_column("chance", justify="right", no_wrap=True)
    for name, row in rows.items():
        cells = []
        for k in shots:
            score = row.get(k)
            cells.append("–" if score is None else _mean_and_spread(score, spread))
        by_chance = next((score.chance for score in row.values()), None)
        if chance:
            cells.append("" if by_chance is None else f"{100 * by_chance:.2f}")
        table.add_row(Text(name), *cells)
    return table


def _mean_and_spread(score: Score, spread: dict[tuple[str, str, str], Score]) -> str:
    own = spread.get((score.dataset, score.setting, score.metric))
    value = shown_value(score, score.value) + ("" if own is None else f" ±{shown_value(own, own.value)}")
    return f"{value}\n{_interval(score)}".rstrip()


def _metric(metric: str) -> str:
    """Its name in the scores in words, which a table may break between."""
    return printable(metric.replace("_", " ") if metric.endswith(("acc1", "acc5")) else metric_name(metric))


def _broken(name: str, most: int = _NAME) -> Text:
    """A name in lines of so many letters that end where its parts meet."""
    lines = [""]
    for piece in _PIECE.findall(printable(name)):
        if lines[-1].strip() and cell_len(lines[-1] + piece.rstrip()) > most:
            lines.append("")
        first, *more = chop_cells(piece, most) or [""]
        lines[-1] += first
        lines += more
    return Text("\n".join(line.rstrip() for line in lines))


def shown_value(score: Score, value: float) -> str:
    """A share in percent, a rank as it is."""
    return f"{value:,.1f}" if is_rank(score.metric) else f"{100 * value:.1f}"


def _interval(score: Score) -> str:
    if score.low is None or score.high is None:
        return ""
    return f"{shown_value(score, score.low)}–{shown_value(score, score.high)}"


def comparison_table(comparison: ModelComparison) -> RenderableType:
    """The differences, at most 80 columns wide; A is the first model and B the second.

    A section holds what p was corrected over, the datasets of one task, setting and metric; of one dataset alone,
    all its metrics. On a narrow terminal columns are left out, last the difference.
    """
    return _Fitted(lambda width: _differences(comparison, min(width, _WIDTH)))


def _differences(comparison: ModelComparison, width: int) -> Group:
    count = sum(one.beyond_chance for one in comparison.differences)
    kinds: dict[str, list[Difference]] = {}
    for one in comparison.differences:
        parts = one.task, setting_name(one.task, one.setting), one.prompt_set and f"prompts {one.prompt_set}"
        kinds.setdefault(", ".join(filter(None, parts)), []).append(one)
    texts = [_HEADS, *(_texts(one) for one in comparison.differences)]
    columns = {head: max(len(row[i]) for row in texts) for i, head in enumerate(_HEADS)}
    for head in _HEADS_LEFT_OUT:
        if _LEAST_NAME + sum(column + _GAP for column in columns.values()) > width:
            del columns[head]
    kept = [i for i, head in enumerate(_HEADS) if head in columns]

    def grid(rows: Sequence[tuple[Text, Sequence[str], str]]) -> Table:
        shown_rows = [(name, [row[i] for i in kept], style) for name, row, style in rows]
        return _grid([*columns.values()], shown_rows, width)

    shown: list[RenderableType] = []
    for kind, own in kinds.items():
        for title, rows in _sections(kind, own):
            shown.append(Text(("\n" if shown else "") + printable(title), style="bold"))
            told = [(name, _texts(one), "bold" if one.beyond_chance else "") for name, one in rows]
            shown.append(grid(told))
    return Group(
        Text(f"A: {printable(comparison.first)}\nB: {printable(comparison.second)}\n"),
        grid([(Text(""), _HEADS, "")]),
        Text("─" * width),
        *shown,
        Text(
            f"\n{count} of {len(comparison.differences)} differences are beyond chance (p < {LEVEL:g}, corrected\n"
            "by Holm's procedure over the datasets of each task, setting and metric).\n"
            "Intervals are of one difference each, in percentage points or ranks."
        ),
    )


def _sections(
    kind: str, differences: Sequence[Difference]
) -> Iterator[tuple[str, list[tuple[Text, Difference]]]]:
    """Titles and named rows."""
    datasets = {one.dataset for one in differences}
    if len(datasets) == 1:
        title = f"{kind} on {differences[0].dataset}"
        yield title, [(Text(_metric(one.metric)), one) for one in differences]
        return
    for metric in dict.fromkeys(one.metric for one in differences):
        rows = [(_broken(one.dataset), one) for one in differences if one.metric == metric]
        yield f"{kind}: {_metric(metric)}", rows


def _grid(widths: Sequence[int], rows: Sequence[tuple[Text, Sequence[str], str]], room: int) -> Table:
    """Rows whose columns stand below those of other grids."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(overflow="fold", width=max(_LEAST_NAME, room - sum(widths) - _GAP * len(widths)))
    for width in widths:
        table.add_column(justify="right", no_wrap=True, width=width)
    for name, texts, style in rows:
        table.add_row(name, *map(Text, texts), style=style)
    return table


def _texts(one: Difference) -> tuple[str, ...]:
    """The row behind its name."""
    factor, unit = (100, "%") if is_fraction(one.metric, one.first, one.second) else (1, "")
    low, high = factor * one.test.low, factor * one.test.high
    better = "–"
    if one.beyond_chance:
        up = one.test.difference > 0
        better = "B" if up != lower_is_better(one.metric) else "A"
    return (
        f"{factor * one.first:,.1f}{unit}",
        f"{factor * one.second:,.1f}{unit}",
        f"{factor * one.test.difference:+,.1f} [{low:+,.1f}, {high:+,.1f}]",
        "<0.001" if one.p < 0.001 else f"{one.p:.3f}",
        better,
    )
