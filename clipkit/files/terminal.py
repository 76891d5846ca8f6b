"""Format text for terminals, logs and pages: control characters, counts, URLs without secrets, progress."""

import re
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress


def printable(text: str, most: int | None = None) -> str:
    """Escape control characters, including line ends.

    Args:
        most: maximum number of characters; "…" replaces the rest.
    """
    if most is not None and len(text) > most:
        text = text[:most] + "…"
    characters = []
    for character in text:
        if not character.isprintable():
            character = character.encode("unicode_escape", "backslashreplace").decode()
        characters.append(character)
    return "".join(characters)


def counted(count: int, noun: str) -> str:
    """Format a number with a noun that forms its plural with s: ``1 image``, ``2,000 images``."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def format_bytes(count: float) -> str:
    """Format a number of bytes with a unit."""
    for unit, worth in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= worth:
            return f"{count / worth:.3g} {unit}"
    return f"{count:.0f} bytes"


_AUTHORITY = re.compile(r"[\w.\-]*(:[0-9]*)?|\[[0-9a-fA-F:.]*\](:[0-9]*)?")
_TAR_NAME = re.compile(r"[\w.\-]{1,100}\.tar(?!\w)")
_WORD = re.compile(r"[\w./\-]{1,100}")
_QUOTED = re.compile(r'"((?:[^"\\\n]|\\.)*)"')  # a string of TOML or JSON


def redact_url(url: str) -> str:
    """Remove possible secrets from a URL: user, password, query and fragment.

    For ``pipe:`` commands and URLs with an ambiguous authority (such as a password with a slash), keep only the
    program or scheme and the name of the tar.
    """
    tar = [" " + name for name in _TAR_NAME.findall(url)[-1:]]
    if url.startswith("pipe:"):
        words = [word for word in url[5:].split() if "=" not in word]
        program = words[0].rpartition("/")[2] if words and _WORD.fullmatch(words[0]) else ""
        return "".join([f"pipe:{program} …", *tar])
    scheme, mark, rest = url.partition("://")
    if not mark:
        return url
    authority, slash, path = rest.partition("/")
    host = authority.rpartition("@")[2]
    ambiguous = "@" in path and scheme != "hf"  # hf:// has revisions after an @
    if ambiguous or not _AUTHORITY.fullmatch(host) or "?" in authority or "#" in authority:
        return "".join([f"{scheme}://…", *tar])
    path = path.partition("?")[0].partition("#")[0]
    text = " ".join(f"{scheme}://{host}{slash}{path}".split())
    return text if len(text) <= 300 else text[:300] + "…"


def redact_secrets(text: str) -> str:
    """Apply ``redact_url`` to every string in a configuration (TOML or JSON) that is a URL or a command."""

    def redact(match: re.Match[str]) -> str:
        text = match[1]
        if "://" in text or text.startswith("pipe:"):
            text = redact_url(text)
        return f'"{text}"'

    return _QUOTED.sub(redact, text)


_PLAIN_EVERY_SECONDS = 10.0


class CountProgress:
    """Show progress on stderr: a bar on a terminal, otherwise a line every ten seconds."""

    def __init__(self, what: str, *, total: int | None, shown: bool) -> None:
        self._what = what
        self._total = total
        self._shown = shown
        self._began = self._last_line = time.monotonic()
        self._bar: RichProgress | None = None
        if shown and sys.stderr is not None and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            suffix = "/{task.total:,}" if total is not None else ""
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(
                    bar_width=16
                ),  # a line of the terminal's full width could not be erased after Ctrl-C
                TextColumn("{task.completed:,}" + suffix),
                TextColumn("{task.fields[note]}"),
                *((TimeRemainingColumn(compact=True),) if total is not None else ()),
                console=Console(file=sys.stderr, highlight=False),
                transient=True,
                refresh_per_second=4,
            )
            self._task = self._bar.add_task(what, total=total, note="")

    def __enter__(self) -> "CountProgress":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, done: int, failed: int = 0) -> None:
        """Update the number of items processed so far, and how many of these failed."""
        now = time.monotonic()
        rate = done / max(1e-9, now - self._began)
        note = f"{rate:,.1f}/s" + (f"{' ' if self._bar else ', '}{failed:,} failed" if failed else "")
        if self._bar is not None:
            self._bar.update(self._task, completed=done, note=note)
        elif self._shown and now - self._last_line >= _PLAIN_EVERY_SECONDS:
            self._last_line = now
            line = f"{self._what} {done:,}"
            if self._total is None:
                line += f", {note}"
            else:
                left = round((self._total - done) / max(1e-9, rate))
                line += f" of {self._total:,}, {note}, left {left // 60}m{left % 60:02d}s"
            print(line, file=sys.stderr, flush=True)
