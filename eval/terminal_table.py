"""What a terminal is shown: scores as a table of 80 columns, and names from data made harmless to it."""

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from eval.results import Score

__all__ = ["printable", "score_table", "shown_value"]


def printable(text: str) -> str:
    """Text on one line whose characters all show; others, which may command the terminal, as Python writes them."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def score_table(scores: Sequence[Score]) -> Table:
    """One row a score, a section a dataset."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("dataset", overflow="fold")
    table.add_column("metric", overflow="fold")
    for heading in ("value %", "95% interval", "chance %", "n"):
        table.add_column(heading, justify="right", no_wrap=True)
    several = len({score.task for score in scores}) > 1
    before = ("", "")
    for score in scores:
        group = (score.dataset, score.task)
        if before[0] and group != before:
            table.add_section()
        name = "" if group == before else f"{score.dataset} {score.task}" if several else score.dataset
        before = group
        table.add_row(
            Text(printable(name)),  # not a string, which would be read as markup
            Text(printable(f"{score.metric} {score.setting}".strip())),
            shown_value(score, score.value),
            _interval(score),
            "" if score.chance is None else f"{100 * score.chance:.2f}",
            f"{score.n:,}",
        )
    return table


def shown_value(score: Score, value: float) -> str:
    """A share in percent, a rank as it is."""
    return f"{value:,.1f}" if score.metric.endswith("_rank") else f"{100 * value:.1f}"


def _interval(score: Score) -> str:
    if score.low is None or score.high is None:
        return ""
    return f"{shown_value(score, score.low)}–{shown_value(score, score.high)}"
