"""Progress of counted work: a bar on a terminal, elsewhere a line every ten seconds."""

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["CountProgress"]

_PLAIN_EVERY_SECONDS = 10.0


class CountProgress:
    """Show on stderr how many images, texts or shards are done.

    Args:
        what: the work, at the start of the line.
        total: how many items there are; None if unknown.
        shown: False prints nothing.
    """

    def __init__(self, what: str, *, total: int | None, shown: bool) -> None:
        console = Console(file=sys.stderr, highlight=False)
        self._what, self._total, self._shown = what, total, shown
        self._live = shown and console.is_terminal
        self._began = self._last_line = time.monotonic()
        known = "/{task.total:,}" if total is not None else ""
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),  # a line as wide as the terminal could not be erased after Ctrl-C
            TextColumn("{task.completed:,}" + known),
            TextColumn("{task.fields[note]}"),
            *((TimeRemainingColumn(compact=True),) if total is not None else ()),
            console=console,
            transient=True,
            refresh_per_second=4,
            disable=not self._live,
        )
        self._task = self._bar.add_task(what, total=total, note="")

    def __enter__(self) -> "CountProgress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, done: int, failed: int = 0) -> None:
        """Report how many items are done so far, and how many of these failed."""
        if not self._shown:
            return
        now = time.monotonic()
        rate = done / max(1e-9, now - self._began)
        comma = " " if self._live else ", "
        note = f"{rate:,.1f}/s" + (f"{comma}{failed:,} failed" if failed else "")
        if self._live:
            self._bar.update(self._task, completed=done, note=note)
        elif now - self._last_line >= _PLAIN_EVERY_SECONDS:
            self._last_line = now
            line = f"{self._what} {done:,}"
            if self._total is not None:
                left = round((self._total - done) / max(1e-9, rate))
                line += f" of {self._total:,}, {note}, left {left // 60}m{left % 60:02d}s"
            print(line, file=sys.stderr, flush=True)
