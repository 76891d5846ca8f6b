"""User errors, and how programs report them: one line on stderr and exit status 1. Does not import torch.

Operating system errors are reported the same way. Bugs in clipkit raise AssertionError or other exceptions, which
are reported with a traceback.
"""

import gc
import io
import json
import os
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Literal, NoReturn, TextIO


class ClipkitError(Exception):
    """A user error; the message is one line that says what to do."""


class ConfigError(ClipkitError):
    """A setting that is unknown, invalid, or incompatible with another one."""


class DataError(ClipkitError):
    """Data that is missing, damaged, or unsuitable for the task."""


class Unavailable(DataError):
    """Data that are not here, or that lack what a task needs, without being damaged.

    Attributes:
        cause: "missing" if the message says how to get the data, "unsuitable" if they are here.
    """

    def __init__(self, message: str, *, cause: Literal["missing", "unsuitable"] = "unsuitable") -> None:
        super().__init__(message)
        self.cause = cause


class CheckpointError(ClipkitError):
    """A checkpoint or run folder that is missing, incomplete, or belongs to another run or model."""


class UnnamedArchitecture(CheckpointError):
    """A file of weights that does not record their architecture."""


class Stopped(KeyboardInterrupt):
    """Raised when a signal asks the program to stop; ``number`` is the signal's number."""

    def __init__(self, signal_number: int, *message: str) -> None:
        super().__init__(*message)
        self.number = signal_number


_MAX_LISTED = 600  # characters of known names in a message
_FIRST_NAMES = 12  # number of names listed if they would exceed _MAX_LISTED


def nearest(name: str, candidates: Iterable[str]) -> str:
    """Return a hint for an unknown name: the closest known name, or else a list of the known names."""
    names = sorted(candidates)
    folded = {candidate.casefold(): candidate for candidate in names}
    close = get_close_matches(name.casefold(), folded, n=1)
    if close:
        return f"did you mean {folded[close[0]]!r}?"
    if len(", ".join(names)) <= _MAX_LISTED:
        return f"known: {', '.join(names)}"
    first = names[:_FIRST_NAMES]
    return f"known: {', '.join(first)} and {len(names) - len(first):,} more"


@contextmanager
def report_errors() -> Iterator[None]:
    """Report user errors and errors of the operating system as one line on stderr, and exit.

    The exit status is 1 for errors, 130 for Ctrl-C, and 128 + the signal's number for ``Stopped``, whose message
    states what was lost.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # printing "–" to an ASCII terminal or pipe must not raise
            stream.reconfigure(errors="backslashreplace")
    try:
        yield
        if sys.stdout is not None:  # None if it was closed before the start, for example by `>&-`
            sys.stdout.flush()
        return
    except ClipkitError as error:
        status = _report_error(str(error))
    except BrokenPipeError:  # the reader of our output has exited, as in `… | head`
        status = 1
    except OSError as error:
        names = [str(name) for name in (error.filename, error.filename2) if name is not None]
        status = _report_error(": ".join([*names, error.strerror or str(error)]))
    except UnicodeError as error:
        status = _report_error(f"text cannot be read or written: {error}")
    except ModuleNotFoundError as error:
        if not (extra := _find_extra(error.name or "")):
            raise
        status = _report_error(f"{error.name} is not installed: pip install -e '.[{extra}]'")
    except RuntimeError as error:
        if not is_torchvision_mismatch(error):
            raise
        status = _report_error(
            "torchvision does not match the installed torch: pip install --upgrade torch torchvision"
        )
    except KeyboardInterrupt as stop:
        if os.environ.get("RANK", "0") == "0":
            _print_to_stderr("; ".join(["stopped", *map(str, stop.args)]))
        status = 128 + (stop.number if isinstance(stop, Stopped) else signal.SIGINT)
    _exit(status)


def is_torchvision_mismatch(error: BaseException) -> bool:
    """Whether an error is that of importing a torchvision built for another version of torch."""
    return re.fullmatch(r"operator torchvision::\w+ does not exist", str(error)) is not None


def _find_extra(module: str) -> str:
    """Return the extra of clipkit that installs a module of a package of the same name; "" if none does."""
    from importlib.metadata import PackageNotFoundError, requires  # takes 20 ms

    package = module.partition(".")[0]
    with suppress(PackageNotFoundError):
        for requirement in requires("clipkit") or ():
            pattern = rf"{re.escape(package)}\b[^;]*; extra == ['\"](\w+)['\"]"
            if (match := re.fullmatch(pattern, requirement)) is not None:
                return match[1]
    return ""


def run_command(command: Callable[[], int | None]) -> NoReturn:
    """Run a program's main function, report its errors (see ``report_errors``), and exit with its status.

    Each warning is one line.
    """
    warnings.formatwarning = lambda message, *_, **__: f"note: {message}\n"
    status = 0
    with report_errors():
        status = command() or 0
    _exit(status)


def _exit(status: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        silence_if_broken(stream)
    # After Ctrl-C within exec(text), which dataclasses use, `python -m` ends with SIGINT even if the exception was
    # caught; another exec resets that.
    exec("")
    gc.freeze()  # otherwise Python searches all objects for garbage, which takes up to a second
    sys.exit(status)


def silence_if_broken(stream: TextIO | None) -> bool:
    """Redirect a broken stream to /dev/null; return whether it was broken.

    Otherwise Python would flush it again at exit, print an error, and change the exit status.
    """
    if stream is None:
        return True
    try:
        stream.flush()
    except ValueError:  # closed
        return True
    except OSError:
        with suppress(OSError):  # the stream has no file descriptor
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
        return True
    return False


def tell_torchrun(line: str, *, late: bool = False) -> None:
    """Write this error to the file from which torchrun reports a failed job.

    Args:
        line: the error.
        late: whether it is a consequence of another rank's error; torchrun shows the earliest one.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        when = {"py_callstack": line, "timestamp": str(int(time.time()) + late)}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": line, "extraInfo": when}}))


def _report_error(message: str) -> int:
    rank = os.environ.get("RANK", "0")
    message = " ".join(message.split())
    if not Path(os.environ.get("TORCHELASTIC_ERROR_FILE", os.devnull)).exists():
        tell_torchrun(f"error: {message}")
    _print_to_stderr(f"error: {message}" if rank == "0" else f"error (rank {rank}): {message}")
    return 1


def _print_to_stderr(line: str) -> None:
    if sys.stderr is not None:  # print(file=None) would write to stdout
        with suppress(OSError):  # stderr is closed
            print(line, file=sys.stderr)
