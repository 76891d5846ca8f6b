"""Mistakes that a user can make and mend: each is one line on the terminal and exit status 1.

What the machine refuses is told in the same way. A mistake of our own is an ``assert`` or an ordinary exception
with its traceback.
"""

import argparse
import io
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from types import FrameType
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
    "StopRequest",
    "Stopped",
    "end_with_launcher",
    "launcher_of",
    "leaving_at_once",
    "let_go_if_broken",
    "loss_after",
    "nearest",
    "number",
    "run_command",
    "whole",
]


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


# --------------------------------------------------------------------------------------------------------------
# What all command lines share: mistakes in one line, and numbers that are checked where they are parsed.

MOST_BATCH = 65_536
MOST_SEED = 2**63 - 1
MOST_WORKERS = 512
_SHOWN = 40  # characters of a value in a message


class Parser(argparse.ArgumentParser):
    """A parser whose mistakes are one line and exit status 1, like every other mistake of a user."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError instead of printing the usage and leaving."""
        raise ConfigError(f"{message} (see {self.prog} --help)")


def whole(least: int, most: int) -> Callable[[str], int]:
    """The type of an option that takes a whole number from ``least`` to ``most``."""

    def parse(text: str) -> int:
        digits = text.removeprefix("-")
        value = int(text) if digits.isdecimal() and len(digits) < 20 else None
        if value is None or not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"{text[:_SHOWN]!r} is not a whole number from {least:,} to {most:,}"
            )
        return value

    return parse


def number(least: float, most: float, *, above: bool = False) -> Callable[[str], float]:
    """The type of an option that takes a number from ``least``, or only ``above`` it, to ``most``."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (least < value if above else least <= value) or not value <= most:
            bounds = f"above {least:,g} and up to" if above else f"from {least:,g} to"
            raise argparse.ArgumentTypeError(f"{text[:_SHOWN]!r} is not a number {bounds} {most:,g}")
        return value

    return parse


# --------------------------------------------------------------------------------------------------------------
# How a program is asked to stop, what leaving costs, and that a rank ends with its launcher.

_KEPT = "the last checkpoint is kept, and the same command resumes"
_PARENT_SECONDS = 0.2  # between two checks that the launcher is alive


@contextmanager
def leaving_at_once(stopped: str) -> Iterator[None]:
    """Ctrl-C while torch is imported, which takes seconds: an import that is interrupted ends in any error.

    Args:
        stopped: what that costs, for the one line it says.
    """

    def leave(*_: object) -> None:
        os.write(2, f"stopped; {stopped}\n".encode())
        os._exit(130)

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # ignored, or ours to leave alone
        yield
        return
    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def loss_after(saved: int) -> str:
    """What leaving at once costs where the last checkpoint is of step ``saved``."""
    return f"what was trained after step {saved} is lost; the same command goes on from there"


class StopRequest:
    """Ctrl-C, SIGTERM, the end of an ssh session (SIGHUP) or SIGUSR1 asks to save and leave after the step.

    SIGUSR1 is what a cluster's scheduler is told to send before the job's time is up.

    A second Ctrl-C leaves at once; so does the first where there is nothing to save.

    Attributes:
        number: of the signal that has asked, 0 if none has. The program's exit status is 128 + this number.
    """

    def __init__(self) -> None:
        self.number, self.saves = 0, False
        self.otherwise = "no step was made; the same command begins again"  # said where nothing is saved
        self._owner = os.getpid()  # a loader process leaves signals to the trainer
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
                signal.signal(number, self._ask)

    @property
    def asked(self) -> bool:
        """Whether a signal has asked."""
        return self.number > 0

    def save_first(self, saves: bool, otherwise: str) -> None:
        """From now on there is something to save before leaving, or nothing any more."""
        self.saves, self.otherwise = saves, otherwise
        if self.asked and not saves:
            raise Stopped(self.number, otherwise)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:
            return
        if not self.saves or (self.asked and number == signal.SIGINT):
            raise Stopped(number, self.otherwise)
        self.number = number


def launcher_of(parent: int) -> int | None:
    """The process ID of torchrun, if torchrun (torch.distributed.elastic) started this process.

    Args:
        parent: ID of the parent process, read when this process started.
    """
    return parent if "TORCHELASTIC_RUN_ID" in os.environ else None


def end_with_launcher(parent: int, *, leaving: Callable[[], bool]) -> None:
    """From now on, end this process as ``kill -9`` would as soon as its launcher has died.

    Without its launcher a rank is neither stopped nor restarted, and it holds its run folder. A process without a
    launcher is left alone: under ``nohup`` or ``setsid`` it outlives its parent on purpose. Nothing is saved: the
    next start ignores what is half written, and resume is exact.

    Args:
        parent: ID of the parent process, read when this process started.
        leaving: whether this process is about to save and exit by itself, which it may finish.
    """
    launcher = launcher_of(parent)
    if launcher is None:
        return

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(_PARENT_SECONDS)
        while leaving():
            time.sleep(_PARENT_SECONDS)
        _end_at_once()

    if _store_is_refused():
        _end_at_once()
    threading.Thread(target=watch, name="launcher", daemon=True).start()


def _store_is_refused() -> bool:
    """Whether torchrun died before ``parent`` was read: its store is then closed, where it is on this host."""
    environment = os.environ
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or environment.get("GROUP_RANK") != "0":
        return False
    try:
        address = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        socket.create_connection(address, timeout=10).close()
    except ConnectionRefusedError:
        return True
    except (OSError, KeyError, ValueError):  # what is wrong with it is reported where the ranks meet
        return False
    return False


def _end_at_once() -> None:
    if os.environ.get("LOCAL_RANK") == "0":
        with suppress(OSError):
            os.write(2, f"error: torchrun has died, so its ranks end; {_KEPT}\n".encode())
    os._exit(1)
