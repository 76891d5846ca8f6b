"""How a program is asked to stop, and what leaving costs."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["StopRequest", "leaving_at_once", "loss_after"]


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
    """

    def __init__(self) -> None:
        self.asked, self.saves = False, False
        self.otherwise = "no step was made; the same command begins again"  # said where nothing is saved
        self._owner = os.getpid()  # a loader process leaves signals to the trainer
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
                signal.signal(number, self._ask)

    def save_first(self, saves: bool, otherwise: str) -> None:
        """From now on there is something to save before leaving, or nothing any more."""
        self.saves, self.otherwise = saves, otherwise
        if self.asked and not saves:
            raise KeyboardInterrupt(otherwise)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:
            return
        if not self.saves or (self.asked and number == signal.SIGINT):
            raise KeyboardInterrupt(self.otherwise)
        self.asked = True
