"""A process among others: how it was launched, and how a training is asked to stop."""

import os
import signal
from types import FrameType

from clipkit.errors import ConfigError

__all__ = ["StopRequest", "check_launch", "loss_after", "rank_and_world"]


def check_launch() -> None:
    """See that the environment names all that a process needs to find the others, as torchrun sets it.

    Raises:
        ConfigError: it names several processes, but not which one this is, or is no number.
    """
    world = os.environ.get("WORLD_SIZE", "1")
    needed = ("RANK", "MASTER_ADDR", "MASTER_PORT") if world != "1" else ()
    missing = [name for name in needed if not os.environ.get(name)]
    numbers = [
        name for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK") if not os.environ.get(name, "0").isdecimal()
    ]
    if missing or numbers:
        wrong = f"{', '.join(missing)} not set" if missing else f"{numbers[0]} = {os.environ[numbers[0]]!r}"
        raise ConfigError(
            f"the environment says WORLD_SIZE = {world}, but has {wrong}: start with torchrun, or unset WORLD_SIZE"
        )
    rank_and_world()


def rank_and_world() -> tuple[int, int]:
    """This process's number and how many there are, as torchrun says; 0 and 1 where nothing is said.

    Raises:
        ConfigError: the environment says something impossible.
    """
    world = os.environ.get("WORLD_SIZE", "1")
    rank = os.environ.get("RANK", "0" if world == "1" else "not set")
    if rank.isdecimal() and world.isdecimal() and int(rank) < int(world):
        return int(rank), int(world)
    raise ConfigError(
        f"the environment says RANK = {rank} and WORLD_SIZE = {os.environ.get('WORLD_SIZE', 'not set')}: "
        "start with torchrun, or unset both"
    )


def loss_after(saved: int) -> str:
    """What leaving at once costs where the last checkpoint is of step ``saved``."""
    return f"what was trained after step {saved} is lost; the same command goes on from there"


class StopRequest:
    """Ctrl-C, SIGTERM or the end of an ssh session (SIGHUP) asks to save and leave after the step.

    A second Ctrl-C leaves at once; so does the first where there is nothing to save.
    """

    def __init__(self) -> None:
        self.asked, self.saves = False, False
        self.otherwise = "before the first step; the same command begins again"  # said where nothing is saved
        self._owner = os.getpid()  # a loader process leaves signals to the trainer
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
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
