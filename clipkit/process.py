"""How a program is asked to stop, what leaving costs, and that a rank ends with its launcher."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from clipkit.errors import Stopped

__all__ = ["StopRequest", "end_with_launcher", "launcher_of", "leaving_at_once", "loss_after"]

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
