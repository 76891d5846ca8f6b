"""Mistakes that a user can make and mend: each is one line on the terminal and exit status 1.

A mistake of our own is an ``assert`` or an ordinary exception with its traceback.
"""

import os
import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import NoReturn

__all__ = ["CheckpointError", "ClipkitError", "ConfigError", "DataError", "nearest", "run_command"]


class ClipkitError(Exception):
    """A mistake in what was given to clipkit; the message is one line that says what to do."""


class ConfigError(ClipkitError):
    """A setting that is unknown, has a wrong value, or does not go with another one."""


class DataError(ClipkitError):
    """Data that are missing, broken, or not what the task needs."""


class CheckpointError(ClipkitError):
    """A checkpoint or run folder that is missing, incomplete, or belongs to something else."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for an unknown name: the nearest known one if there is one, else all of them."""
    names = sorted(known)
    close = get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else "known: " + ", ".join(names)


def run_command(command: Callable[[], int | None]) -> NoReturn:
    """Run a program's main function; a user's mistake becomes one line on stderr and exit status 1."""
    try:
        status = command()
        sys.stdout.flush()
    except ClipkitError as error:
        rank = os.environ.get("RANK", "0")  # the same mistake may be reported by every process of a job
        who = "error" if rank == "0" else f"error (rank {rank})"
        print(f"{who}: " + " ".join(str(error).split()), file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:  # the reader of our output has left, as in `… | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still to be flushed
        sys.exit(1)
    sys.exit(status or 0)
