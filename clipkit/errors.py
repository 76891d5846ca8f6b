"""User errors, and how programs report them: one line on the terminal and exit status 1. Imports no torch.

Errors of the operating system are reported the same way. A bug in clipkit is an ``assert`` or an ordinary exception
with its traceback.
"""

import argparse
import io
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn, TextIO

__all__ = [
    "MOST_BATCH",
    "MOST_SEED",
    "MOST_WORKERS",
    "CheckpointError",
    "ClipkitError",
    "ConfigError",
    "DataError",
    "Parser",
    "Stopped",
    "leaving_at_once",
    "let_go_if_broken",
    "nearest",
    "number",
    "report_errors",
    "run_command",
    "tell_torchrun",
    "whole",
]


class ClipkitError(Exception):
    """A user error; the message is one line that says what to do."""


class ConfigError(ClipkitError):
    """A setting that is unknown, invalid, or incompatible with another one."""


class DataError(ClipkitError):
    """Data that is missing, damaged, or unsuitable for the task."""


class CheckpointError(ClipkitError):
    """A checkpoint or run folder that is missing, incomplete, or belongs to another run or model."""


class Stopped(KeyboardInterrupt):
    """Raised when a signal asks the program to stop; ``number`` is the signal's number."""

    def __init__(self, number: int, *message: str) -> None:
        super().__init__(*message)
        self.number = number


_MAX_LISTED = 1200  # characters of known names in a message
_FIRST_NAMES = 12  # listed where there are more
_MAX_SHOWN = 40  # characters of a value in a message


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown name: the closest known one, else all of them, or the first of many."""
    names = sorted(known)
    folded = {one.casefold(): one for one in names}
    if close := get_close_matches(name.casefold(), folded, n=1):
        return f"did you mean {folded[close[0]]!r}?"
    shown = len(names) if len(", ".join(names)) <= _MAX_LISTED else _FIRST_NAMES
    more = f" and {len(names) - shown:,} more" if shown < len(names) else ""
    return f"known: {', '.join(names[:shown])}{more}"


@contextmanager
def report_errors() -> Iterator[None]:
    """Report user errors and errors of the operating system as one line on stderr, and exit.

    The exit status is 1 for an error; 130 for Ctrl-C and 128 + the signal's number for ``Stopped``, whose arguments
    say what stopping costs.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # an ASCII terminal or pipe must not end a training at the first "–"
            stream.reconfigure(errors="backslashreplace")
    try:
        yield
        if sys.stdout is not None:  # None where it was closed at the start, as by `>&-`
            sys.stdout.flush()
        return
    except ClipkitError as error:
        status = _complain(str(error))
    except BrokenPipeError:  # the reader of our output has exited, as in `… | head`
        status = 1
    except OSError as error:
        names = [str(name) for name in (error.filename, error.filename2) if name is not None]
        status = _complain(": ".join([*names, error.strerror or str(error)]))
    except UnicodeError as error:
        status = _complain(f"text cannot be read or written: {error}")
    except KeyboardInterrupt as stop:
        if os.environ.get("RANK", "0") == "0":
            _to_stderr("; ".join(["stopped", *map(str, stop.args)]))
        status = 128 + (stop.number if isinstance(stop, Stopped) else signal.SIGINT)
    _exit(status)


def run_command(command: Callable[[], int | None]) -> NoReturn:
    """Run a program's main function, report its errors (see ``report_errors``), and exit with its status."""
    status = 0
    with report_errors():
        status = command() or 0
    _exit(status)


def _exit(status: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        let_go_if_broken(stream)
    # After Ctrl-C within exec(text), which creating a dataclass is, `python -m` dies of SIGINT at its end although
    # the exception was caught; another exec resets that.
    exec("")
    sys.exit(status)


def let_go_if_broken(stream: TextIO | None) -> bool:
    """Redirect a stream that cannot be written to /dev/null; returns whether it was broken.

    Python would otherwise try again at exit, complain, and exit with another status.
    """
    if stream is None:
        return True
    try:
        stream.flush()
    except ValueError:  # closed
        return True
    except OSError:
        with suppress(OSError):  # a stream without a descriptor is not flushed at exit
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
        return True
    return False


def tell_torchrun(line: str, *, late: bool = False) -> None:
    """Make torchrun's report of a failed job end with this error.

    Args:
        line: the error.
        late: whether it only follows from another rank's error; torchrun shows the earliest.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        when = {"py_callstack": line, "timestamp": str(int(time.time()) + late)}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": line, "extraInfo": when}}))


def _complain(message: str) -> int:
    rank = os.environ.get("RANK", "0")  # every process of a job may report the same error
    message = " ".join(message.split())
    if not Path(os.environ.get("TORCHELASTIC_ERROR_FILE", os.devnull)).exists():
        tell_torchrun(f"error: {message}")
    _to_stderr(f"error: {message}" if rank == "0" else f"error (rank {rank}): {message}")
    return 1


def _to_stderr(line: str) -> None:
    if sys.stderr is not None:  # print would take None for stdout
        with suppress(OSError):  # nobody reads stderr
            print(line, file=sys.stderr)


@contextmanager
def leaving_at_once(stopped: str) -> Iterator[None]:
    """Exit at once on Ctrl-C while torch is imported: an interrupted import can end in any exception.

    Args:
        stopped: what stopping costs, for the line that is printed.
    """

    def leave(*_: object) -> None:
        os.write(2, f"stopped; {stopped}\n".encode())
        os._exit(130)

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # ignored, or another program's
        yield
        return
    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


# Shared by all command lines: a parser, and types of numbers with bounds.

MOST_BATCH = 65_536
MOST_SEED = 2**63 - 1
MOST_WORKERS = 512


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line and exit status 1, like all user errors."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError instead of printing the usage and exiting."""
        raise ConfigError(f"{message} (see {self.prog} --help)")


def whole(least: int, most: int) -> Callable[[str], int]:
    """Return the type of an option that takes a whole number from ``least`` to ``most``."""

    def parse(text: str) -> int:
        digits = text.removeprefix("-")
        value = int(text) if digits.isdecimal() and len(digits) < 20 else None
        if value is None or not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"{text[:_MAX_SHOWN]!r} is not a whole number from {least:,} to {most:,}"
            )
        return value

    return parse


def number(least: float, most: float, *, above: bool = False) -> Callable[[str], float]:
    """Return the type of an option that takes a number from ``least``, or strictly above it, to ``most``."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (least < value if above else least <= value) or not value <= most:
            bounds = f"above {least:,g} and up to" if above else f"from {least:,g} to"
            raise argparse.ArgumentTypeError(f"{text[:_MAX_SHOWN]!r} is not a number {bounds} {most:,g}")
        return value

    return parse
