"""What a terminal is shown: scores as tables of 80 columns, and names from data made harmless to it."""

import re
from collections.abc import Iterator, Mapping, Sequence

from rich import box
from rich.cells import cell_len, chop_cells
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from eval.comparison import LEVEL, Difference, ModelComparison
from eval.report.scores import PLAIN, is_rank, is_share, lower_is_better, metric_name, setting_name, tells
from eval.results import Score

__all__ = ["comparison_table", "printable", "score_table", "shown_value"]

_WIDTH = 80
_NAME = 20  # letters of a line of a dataset's name, so that the metric beside it breaks between words alone
_PIECE = re.compile(r"[^-_/. ]*[-_/. ]?")
_SHOTS = re.compile(r"(\d+)-shot ?(.*)")
_METRIC = 9  # letters beside few-shot scores, so that a metric breaks between words alone
_GAP = 2  # letters between columns
_HEADS = ("A", "B", "B − A [95%]", "p", "better")


def printable(text: str) -> str:
    """Text on one line whose characters all show; others, which may command the terminal, as Python writes them."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def score_table(scores: Sequence[Score]) -> RenderableType:
    """A section a dataset and task, a row a score; few-shot folds all its scores of one metric into a row."""
    told = [score for score in scores if tells(score.metric, score.n)]
    few = [score for score in told if score.task == "few-shot" and _SHOTS.fullmatch(score.setting)]
    others = [score for score in told if score not in few]
    return Group(*([_plain(others)] if others or not few else []), *_few_shot(few))


def _plain(scores: Sequence[Score]) -> Table:
    """One row a score."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("dataset", no_wrap=True)
    table.add_column("metric", overflow="fold")
    ranks = any(is_rank(score.metric) for score in scores)
    for heading in ("% or rank" if ranks else "value %", "95% interval", "chance %", "n"):
        table.add_column(heading, justify="right", no_wrap=True)
    several = len({score.task for score in scores}) > 1
    before: tuple[str, ...] = ()
    for score in scores:
        group = (score.dataset, score.task, score.setting, score.prompt_set)
        name = score.dataset if group[:2] != before[:2] else ""
        if name and before:
            table.add_section()
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
        table.add_row(
            _broken(name),
            Text(_metric(score.metric)),  # not a string, which would be read as markup
            shown_value(score, score.value),
            _interval(score),
            "" if score.chance is None else f"{100 * score.chance:.2f}",
            f"{score.n:,}",
        )
    return table


def _few_shot(scores: Sequence[Score]) -> Iterator[RenderableType]:
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
        for part in _side_by_side(rows, shots, spread):
            yield _shots_table(dataset, rows, part, spread)
    if datasets:
        draws = max((one.n for one in spread.values()), default=1)
        mean = f"mean of {draws} draws ± standard deviation; below it its 95% interval"
        yield Text(f"Percent by pictures a class: {mean if draws > 1 else 'of one draw'}.\n")


def _side_by_side(
    rows: Mapping[str, dict[int, Score]], shots: Sequence[int], spread: dict[tuple[str, str, str], Score]
) -> list[list[int]]:
    """The numbers of pictures a class in parts whose columns fit beside each other."""
    parts: list[list[int]] = [[]]
    room = free = _WIDTH - _METRIC - len("chance") - 2 * _GAP
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
    table.add_column("chance", justify="right", no_wrap=True)
    for name, row in rows.items():
        cells = []
        for k in shots:
            score = row.get(k)
            cells.append("–" if score is None else _mean_and_spread(score, spread))
        chance = next((score.chance for score in row.values()), None)
        table.add_row(Text(name), *cells, "" if chance is None else f"{100 * chance:.2f}")
    return table


def _mean_and_spread(score: Score, spread: dict[tuple[str, str, str], Score]) -> str:
    own = spread.get((score.dataset, score.setting, score.metric))
    value = shown_value(score, score.value) + ("" if own is None else f" ±{shown_value(own, own.value)}")
    return f"{value}\n{_interval(score)}".rstrip()


def _metric(metric: str) -> str:
    """Its name in the scores in words, which a table may break between."""
    return printable(metric.replace("_", " ") if metric.endswith(("acc1", "acc5")) else metric_name(metric))


def _broken(name: str) -> Text:
    """A name in lines that end where its parts meet."""
    lines = [""]
    for piece in _PIECE.findall(printable(name)):
        if lines[-1].strip() and cell_len(lines[-1] + piece.rstrip()) > _NAME:
            lines.append("")
        first, *more = chop_cells(piece, _NAME) or [""]
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
    all its metrics.
    """
    count = sum(one.beyond_chance for one in comparison.differences)
    kinds: dict[str, list[Difference]] = {}
    for one in comparison.differences:
        parts = one.task, setting_name(one.task, one.setting), one.prompt_set and f"prompts {one.prompt_set}"
        kinds.setdefault(", ".join(filter(None, parts)), []).append(one)
    texts = [_HEADS, *(_texts(one) for one in comparison.differences)]
    widths = [max(len(row[i]) for row in texts) for i in range(len(_HEADS))]
    shown: list[RenderableType] = []
    for kind, own in kinds.items():
        for title, rows in _sections(kind, own):
            shown.append(Text(("\n" if shown else "") + printable(title), style="bold"))
            told = [(name, _texts(one), "bold" if one.beyond_chance else "") for name, one in rows]
            shown.append(_grid(widths, told))
    return Group(
        Text(f"A: {printable(comparison.first)}\nB: {printable(comparison.second)}\n"),
        _grid(widths, [(Text(""), _HEADS, "")]),
        Text("─" * _WIDTH),
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


def _grid(widths: Sequence[int], rows: Sequence[tuple[Text, Sequence[str], str]]) -> Table:
    """Rows whose columns stand below those of other grids."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(overflow="fold", width=max(8, _WIDTH - sum(widths) - 2 * len(widths)))
    for width in widths:
        table.add_column(justify="right", no_wrap=True, width=width)
    for name, texts, style in rows:
        table.add_row(name, *map(Text, texts), style=style)
    return table


def _texts(one: Difference) -> tuple[str, ...]:
    """The row behind its name."""
    factor, unit = (100, "%") if is_share(one.metric, one.first, one.second) else (1, "")
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
