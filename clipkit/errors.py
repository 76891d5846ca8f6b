"""Mistakes that a user can make and mend: each is one line on the terminal and exit status 1.

What the machine refuses is told in the same way. A mistake of our own is an ``assert`` or an ordinary exception
with its traceback.
"""

import io
import os
import signal
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from difflib import get_close_matches
from typing import NoReturn, TextIO

__all__ = [
    "CheckpointError", "ClipkitError", "ConfigError", "DataError", "Stopped", "let_go_if_broken", "nearest",
    "run_command",
]  # fmt: skip


class ClipkitError(Exception):
    """A mistake in what was given to clipkit; the message is one line that says what to do."""


class ConfigError(ClipkitError):
    """A setting that is unknown, has a wrong value, or does not go with another one."""


class DataError(ClipkitError):
    """Data that are missing, broken, or not what the task needs."""


class CheckpointError(ClipkitError):
    """A checkpoint or run folder that is missing, incomplete, or belongs to something else."""


class Stopped(KeyboardInterrupt):
    """A signal has asked the program to stop; ``number`` is the signal's."""

    def __init__(self, number: int, *message: str) -> None:
        super().__init__(*message)
        self.number = number


_MOST_NAMES = 1200  # characters of known names that a message may list
_SOME = 12  # of them, where there are more


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for an unknown name: the nearest known one if there is one, else all of them, or the first of many."""
    names = sorted(known)
    folded = {one.casefold(): one for one in names}
    if close := get_close_matches(name.casefold(), folded, n=1):
        return f"did you mean {folded[close[0]]!r}?"
    shown = len(names) if len(", ".join(names)) <= _MOST_NAMES else _SOME
    more = f" and {len(names) - shown:,} more" if shown < len(names) else ""
    return f"known: {', '.join(names[:shown])}{more}"


def run_command(command: Callable[[], int | None]) -> NoReturn:
    """Run a program's main function and leave with its status.

    A user's mistake, and what the machine refuses (a full disk, a file that may not be read), is one line on
    stderr and exit status 1. Ctrl-C is one line and exit status 130, ``Stopped`` one line and 128 + its number; an
    argument of the ``KeyboardInterrupt`` says what it means.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # a terminal or a pipe that is set to ASCII must not end a training at the first "–"
            stream.reconfigure(errors="backslashreplace")
    try:
        status = command() or 0
        if sys.stdout is not None:  # None where it was closed before we began, as by `>&-`
            sys.stdout.flush()
    except ClipkitError as error:
        status = _complain(str(error))
    except BrokenPipeError:  # the reader of our output has left, as in `… | head`
        status = 1
    except OSError as error:
        names = [str(name) for name in (error.filename, error.filename2) if name is not None]
        status = _complain(": ".join([*names, error.strerror or str(error)]))
    except UnicodeError as error:
        status = _complain(f"text that cannot be read or written: {error}")
    except KeyboardInterrupt as stop:
        if os.environ.get("RANK", "0") == "0":
            _to_stderr("; ".join(["stopped", *map(str, stop.args)]))
        status = 128 + (stop.number if isinstance(stop, Stopped) else signal.SIGINT)
    for stream in (sys.stdout, sys.stderr):
        let_go_if_broken(stream)
    # Ctrl-C within exec(text), which making a dataclass is, has `python -m` die of SIGINT at its end although it
    # was caught; the next exec forgets it.
    exec("")
    sys.exit(status)


def let_go_if_broken(stream: TextIO | None) -> bool:
    """Send what a stream still holds, and all that follows, nowhere if it cannot be written; whether it was so.

    Python would otherwise try again at its exit, complain, and leave with another status.
    """
    if stream is None:
        return True
    try:
        stream.flush()
    except ValueError:  # closed
        return True
    except OSError:
        with suppress(OSError):  # a stream without a descriptor has nobody behind it who writes at the exit
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
        return True
    return False


def _complain(message: str) -> int:
    rank = os.environ.get("RANK", "0")  # the same mistake may be reported by every process of a job
    who = "error" if rank == "0" else f"error (rank {rank})"
    _to_stderr(f"{who}: " + " ".join(message.split()))
    return 1


def _to_stderr(line: str) -> None:
    if sys.stderr is not None:  # print would take None for stdout
        with suppress(OSError):  # nobody is left to tell
            print(line, file=sys.stderr)
