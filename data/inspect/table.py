"""The findings on a terminal."""

import sys
from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from data.inspect.findings import Findings, Histogram
from data.inspect.notes import notes
from data.inspect.told import Part, headline, parts

__all__ = ["print_table"]

_WIDTH = 80
_LABEL = 20
_BAR = 30


def print_table(found: Findings) -> None:
    """Print all parts, at most 80 columns wide; what should be mended comes last, where one looks first."""
    console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False, soft_wrap=False)
    console.width = min(console.width, _WIDTH) if console.is_terminal else _WIDTH
    with console.capture() as captured:
        for renderable in _report(found):
            console.print(renderable)
    for line in captured.get().splitlines():
        print(line.rstrip())


def _report(found: Findings) -> Iterator[RenderableType]:
    for part in parts(found):
        yield Text(part.title, style="bold")
        yield _rows(part)
        yield from map(_chart, part.charts)
        yield ""
    yield Text(headline(found), style="bold")
    listed = notes(found)
    for note in listed:
        line = Table.grid(padding=(0, 1))
        line.add_row(Text(" !" if note.grave else " ·", style="red" if note.grave else ""), Text(note.text))
        yield line
    if not listed:
        yield Text(" · nothing stands out")


def _rows(part: Part) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=_LABEL, overflow="fold")
    table.add_column(overflow="fold")
    for row in part.rows:
        lines: list[RenderableType] = [Text(line, overflow="fold") for line in row.lines]
        table.add_row(Text(f"  {row.label}", style="dim"), Group(*lines))
    return table


def _chart(chart: Histogram) -> RenderableType:
    """The bins from the first to the last that hold something, as bars."""
    there = [number for number, count in enumerate(chart.counts) if count]
    if not there:
        return Text("")
    most = max(chart.counts)
    table = Table.grid(padding=(0, 1))
    table.add_column(width=_LABEL, justify="right")
    table.add_column()
    table.add_column(justify="right")
    for number in range(there[0], there[-1] + 1):
        count = chart.counts[number]
        bar = "█" * round(_BAR * count / most) or ("▏" if count else "")
        table.add_row(
            Text(chart.labels[number], style="dim"), Text(bar.ljust(_BAR), style="cyan"), Text(f"{count:,}")
        )
    return Group(Text(f"  {chart.title}", style="dim"), table)
