"""Stop a training: signals ask to save and exit, and a rank ends with its launcher."""

import os
import signal
import socket
import threading
import time
from contextlib import suppress
from types import FrameType

from clipkit.errors import Stopped

_PARENT_SECONDS = 0.2  # between two checks that the launcher is alive
_ARRIVAL_SECONDS = 0.5  # within which a signal that was sent before the launcher died has arrived
_STUCK_SECONDS = 20.0  # after SIGTERM until a rank that does not react is ended
_PROBE_SECONDS = 1.0  # between two checks that it reacts


class StopRequest:
    """Save and exit within a few steps on Ctrl-C, SIGTERM, SIGHUP (end of an ssh session) or SIGUSR1.

    Cluster schedulers usually send SIGUSR1 before a job's time is up. A second Ctrl-C exits at once, and so does
    the first signal if there is nothing to save.

    A rank that waits in C++ for a rank that has died cannot react to SIGTERM, which torchrun sends in this case.
    ``is_stuck`` detects such a rank by sending SIGURG, which is handled as soon as the main thread runs Python code
    or waits in it.

    Attributes:
        number: number of the signal received, or 0. The program's exit status is 128 + this number.
        agreed: whether all ranks have agreed to stop after this step, whichever of them received a signal.
    """

    def __init__(self) -> None:
        self.number = 0
        self.agreed = False
        self._saves = False
        self._message = "no step was made; the same command starts again"  # if this process exits at once
        self._signalled = False
        self._owner = os.getpid()  # loader processes leave signals to the trainer
        self._terminated = False
        self._reacted = self._probed = time.monotonic()
        self._step_began: float | None = None
        self._step_seconds = 0.0
        signal.signal(signal.SIGURG, self._react)
        for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(signal_number, self._ask)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # which nohup sets
            signal.signal(signal.SIGHUP, self._ask)
        # Python calls ``_ask`` only between two instructions of the main thread, which may spend seconds in a
        # backward pass; the number of a signal arrives in this pipe at once.
        self._arrived, write_end = os.pipe()
        for end in (self._arrived, write_end):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)

    def leaving(self) -> bool:
        """Return whether this process is about to save and exit, for the thread that watches the launcher."""
        with suppress(BlockingIOError):
            numbers = os.read(self._arrived, 4096)  # of other signals too, such as SIGCHLD
            self._signalled |= any(signal.getsignal(signal_number) == self._ask for signal_number in numbers)
            if signal.SIGTERM in numbers and not self._terminated:
                self._terminated = True
                self._reacted = time.monotonic()
        return self._signalled or self.agreed

    def begin_step(self) -> None:
        """State that a step begins, in which ranks wait for each other only briefly."""
        self._step_began = self._reacted = time.monotonic()

    def finish_step(self, *, agreed: bool) -> None:
        """State that a step is done, and whether all ranks have agreed to stop after it."""
        self.agreed = agreed
        if self._step_began is not None:
            self._step_seconds = time.monotonic() - self._step_began
        self._step_began = None

    def is_stuck(self) -> bool:
        """Return whether the main thread has not reacted since SIGTERM, for longer than three steps take.

        Never true between steps: ranks may wait for minutes while rank 0 saves or scores. The thread that watches
        the launcher calls this often, after ``leaving``.
        """
        now = time.monotonic()
        if not self._terminated or self._step_began is None:
            return False
        if now - self._probed > _PROBE_SECONDS:
            self._probed = now
            main_thread = threading.main_thread().ident
            assert main_thread is not None
            signal.pthread_kill(main_thread, signal.SIGURG)
        return now - self._reacted > max(_STUCK_SECONDS, 3 * self._step_seconds)

    def save_on_signal(self, saved: int) -> None:
        """Save before exiting from now on; ``saved`` is the step of the newest checkpoint, 0 if there is none."""
        self._saves = True
        self._message = f"training after step {saved} is lost; the same command resumes from there"

    def exit_on_signal(self, message: str) -> None:
        """Exit with a message on a signal from now on, and also if one has arrived."""
        self._saves = False
        self._message = message
        if self.number:
            raise Stopped(self.number, message)

    def _react(self, signal_number: int, frame: FrameType | None) -> None:
        self._reacted = time.monotonic()

    def _ask(self, signal_number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:
            return
        if not self._saves or (self.number and signal_number == signal.SIGINT):
            raise Stopped(signal_number, self._message)
        self.number = signal_number


def launcher_of(parent: int) -> int | None:
    """Return the process ID of torchrun (torch.distributed.elastic), or None if it did not start this process."""
    return parent if "TORCHELASTIC_RUN_ID" in os.environ else None


def end_with_launcher(parent: int, stop: StopRequest) -> None:
    """End this process, as ``kill -9`` would, as soon as its launcher has died, or if it is stuck after SIGTERM.

    Without its launcher a rank is neither stopped nor restarted, and it keeps its run folder locked. A process
    without a launcher is not affected: under ``nohup`` or ``setsid`` it outlives its parent on purpose. Nothing is
    saved: the next start ignores incomplete checkpoints, and resume is exact.

    Args:
        parent: ID of the parent process, read when this process started.
        stop: whether this process is about to save and exit, which it may finish, and whether it is stuck.
    """
    launcher = launcher_of(parent)
    environment = os.environ
    if launcher is None and environment.get("WORLD_SIZE", "1") == "1":
        return

    def end(reason: str = "torchrun has died, so its ranks end", *, status: int = 1) -> None:
        if environment.get("LOCAL_RANK") == "0":
            with suppress(OSError):
                advice = "the last checkpoint is kept, and the same command resumes"
                os.write(2, f"error: {reason}; {advice}\n".encode())
        os._exit(status)

    def watch() -> None:
        while True:
            has_died = launcher is not None and os.getppid() != launcher
            if has_died:
                time.sleep(_ARRIVAL_SECONDS)
            if not stop.leaving() and has_died:
                end()
            if stop.is_stuck():
                end("SIGTERM while waiting for another rank", status=128 + signal.SIGTERM)
            time.sleep(_PARENT_SECONDS)

    # if torchrun died before ``parent`` was read, its store on this host is closed
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and environment.get("GROUP_RANK") == "0":
        try:
            address = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
            socket.create_connection(address, timeout=10).close()
        except ConnectionRefusedError:
            end()
        except (OSError, KeyError, ValueError):
            pass  # reported when the ranks meet
    threading.Thread(target=watch, name="launcher", daemon=True).start()


def describe_stop(step: int, steps: int, *, trained: bool) -> str:
    """Describe a run that was stopped; ``trained``: only scores and the report remain."""
    remaining = "scores and reports" if trained else "resumes"
    return f"stopped and saved at step {step} of {steps}; the same command {remaining}"
