"""What a terminal is shown: scores as a table of 80 columns, and names from data made harmless to it."""

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from eval.comparison import LEVEL, Difference, ModelComparison
from eval.report.scores import metric_name
from eval.results import Score

__all__ = ["comparison_table", "printable", "score_table", "shown_value"]


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


def comparison_table(comparison: ModelComparison) -> Table:
    """The differences as a table of at most 80 columns; A is the first model and B the second."""
    count = sum(one.beyond_chance for one in comparison.differences)
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        width=80,
        title=Text(f"A: {printable(comparison.first)}\nB: {printable(comparison.second)}"),
        title_justify="left",
        caption=Text(
            f"{count} of {len(comparison.differences)} differences are beyond chance (p < {LEVEL:g}, corrected by "
            "Holm's procedure over the datasets of each task and metric). Intervals are of one difference each."
        ),
        caption_justify="left",
    )
    table.add_column("dataset", overflow="fold", ratio=3)
    table.add_column("metric", overflow="fold", ratio=3)
    for heading in ("A %", "B %", "B − A [95%]", "p", "better"):
        table.add_column(heading, justify="right", no_wrap=True)
    before: tuple[str, ...] | None = None
    named = ""
    for one in sorted(comparison.differences, key=lambda one: (one.task, one.setting, one.prompt_set)):
        kind = one.task, one.setting, one.prompt_set and f"prompts {one.prompt_set}"
        if kind != before:
            if before is not None:
                table.add_section()
            table.add_row(Text(printable(" ".join(filter(None, kind))), style="bold"))
            before, named = kind, ""
        dataset = one.dataset if one.dataset != named else ""  # named once
        named = one.dataset
        style = "bold" if one.beyond_chance else ""
        table.add_row(*(Text(printable(text)) for text in (dataset, *_texts(one))), style=style)
    return table


def _texts(one: Difference) -> tuple[str, ...]:
    """The row behind the dataset's name."""
    share = all(0 <= value <= 1 for value in (one.first, one.second))
    factor = 100 if share else 1
    low, high = factor * one.test.low, factor * one.test.high
    better = "–"
    if one.beyond_chance:
        up = one.test.difference > 0
        better = "B" if up != _lower_is_better(one.metric) else "A"
    return (
        metric_name(one.metric),
        f"{factor * one.first:.1f}",
        f"{factor * one.second:.1f}",
        f"{factor * one.test.difference:+.1f} [{low:+.1f}, {high:+.1f}]",
        "<0.001" if one.p < 0.001 else f"{one.p:.3f}",
        better,
    )


def _lower_is_better(metric: str) -> bool:
    return metric.endswith("_rank") or metric == "ece"
