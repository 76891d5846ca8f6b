"""When one rank fails, all end, and the mistake is told once: through the store that the ranks met in.

A rank that fails leaves a note. Those that then lose the connection to it, or wait for it in vain, read the note
and end without a word. A mistake that all ranks make is told by the chief alone; one that only some make, by them.
"""

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Protocol, TypeVar

from clipkit.errors import ClipkitError

__all__ = ["Failures", "Store", "failing_together"]

Answer = TypeVar("Answer")

_NOTE = "clipkit/failed"
_POLL_SECONDS = 0.1  # while a rank that has failed waits for others
_WATCH_SECONDS = 2.0  # between looks for a note while all is well
_CHIEF_FIRST_SECONDS = 3.0  # for the chief to meet the same mistake
_NOTE_SECONDS = 5.0  # for the note of a rank whose connection has closed
_END_SECONDS = 5.0  # from the note until a rank that still waits for the others is ended
_END_CHIEF_SECONDS = 30.0  # it may be saving; torchrun gives as long
_NO_WORD = (
    "the connection to another process was lost, and it has left no word: it was killed, often for want of memory; "
    "the last checkpoint is kept, and the same command resumes"
)
_NO_ANSWER = (
    "another process does not answer: it was stopped, or its machine is lost; the last checkpoint is kept, and the "
    "same command resumes"
)
_SILENT = re.compile("(gloo|nccl).*timed out", re.I | re.S)
_LOST = re.compile(
    "(gloo|nccl).*(closed by peer|reset by peer|broken pipe|remote process exited)", re.I | re.S
)


class Store(Protocol):
    """What is used of ``torch.distributed.Store``."""

    def add(self, key: str, value: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes: ...
    def get(self, key: str) -> bytes: ...


class Failures:
    """The notes that ranks leave for each other.

    Args:
        store: which all ranks share. One that cannot be reached any more holds no notes.
        rank: of this process.
        host: whether the store ends with this process, which then waits a while for the others when it fails.
    """

    def __init__(self, store: Store, *, rank: int, host: bool) -> None:
        self._store, self._rank, self._host = store, rank, host
        self._note = ""
        # whether the store is: asked then, torch writes a long C++ stack to stderr each time
        self._gone = False
        self._over = threading.Event()
        threading.Thread(target=self._watch, name="failures", daemon=True).start()

    def close(self) -> None:
        """All has gone well: look for notes no longer."""
        self._over.set()

    def note(self, seconds: float = 0.0) -> str:
        """What the first rank that failed has said; empty where none has within some seconds."""
        self._until(seconds, self._look)
        return self._note

    def leave(self, message: str) -> None:
        """Leave a note that this rank has failed, unless another was before it."""
        who = "error" if self._rank == 0 else f"error (rank {self._rank})"
        self._ask(lambda: self._store.compare_set(_NOTE, "", f"{who}: {message}"))

    def tells(self, message: str) -> bool:
        """Whether it is this rank that tells the user of a mistake: the chief, if it makes the same one soon."""
        key = f"clipkit/told/{message}"
        if self._rank:
            self._until(_CHIEF_FIRST_SECONDS, lambda: bool(self._ask(lambda: self._store.check([key]))))
        times = self._ask(lambda: self._store.add(key, 1))
        return times is None or times == 1

    def wait_for_readers(self) -> None:
        """Before a store ends with this process, let the others see the note."""
        if self._host:
            time.sleep(2 * _WATCH_SECONDS)

    def _look(self) -> bool:
        if not self._note and self._ask(lambda: self._store.check([_NOTE])):
            note = self._ask(lambda: self._store.get(_NOTE))
            self._note = note.decode(errors="replace") if note else ""
        return bool(self._note)

    def _ask(self, question: Callable[[], Answer]) -> Answer | None:
        """What the store answers; None for good once it cannot be reached, as it ended with the chief."""
        if self._gone:
            return None
        try:
            return question()
        except RuntimeError:
            self._gone = True
            return None

    def _until(self, seconds: float, holds: Callable[[], bool]) -> None:
        end = time.monotonic() + seconds
        while not holds() and not self._gone and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)

    def _watch(self) -> None:
        """End a process that waits for one that has failed, as NCCL does for many minutes."""
        while not self._gone and not self._over.wait(_WATCH_SECONDS):
            if self._look():
                if not self._over.wait(_END_SECONDS if self._rank else _END_CHIEF_SECONDS):
                    _tell_torchrun(self._note, late=True)
                    os._exit(1)
                return


def failing_together(
    command: Callable[[], int], failures: Callable[[], Failures | None]
) -> Callable[[], int]:
    """A program's main function, with whose failure on one rank all ranks end.

    Args:
        command: raises what ``clipkit.errors.run_command`` tells of.
        failures: the notes, or None as long as there is no other rank.
    """

    def program() -> int:
        with _FailingTogether(failures):
            return command()

    return program


class _FailingTogether:
    def __init__(self, failures: Callable[[], Failures | None]) -> None:
        self._failures = failures

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, SystemExit):
            return
        failures = self._failures()
        if isinstance(error, KeyboardInterrupt):
            # perhaps by torchrun, because another has ended; then nothing more need be said
            _end_if_another_failed(failures, 0.0)
            return
        # torchrun ends the others as soon as one has ended, and what is left to do here takes seconds
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        told = error
        if failures is not None and isinstance(error, RuntimeError):
            lost = _LOST.search(str(error))
            if lost or _SILENT.search(str(error)):
                _end_if_another_failed(failures, _NOTE_SECONDS)
                told = ClipkitError(_NO_WORD if lost else _NO_ANSWER)
        # what is no user's mistake is ours, and each rank shows its traceback
        mistake = isinstance(told, ClipkitError | OSError)
        message = " ".join((str(told) if mistake else f"{type(told).__name__}: {told}").split())
        _tell_torchrun(f"error: {message}")
        if failures is not None:
            failures.leave(message)
            tells = not mistake or failures.tells(message)
            failures.wait_for_readers()
            if not tells:
                _tell_torchrun(f"error: {message}", late=True)
                raise SystemExit(1)
        if told is not error:
            raise told from None


def _end_if_another_failed(failures: Failures | None, seconds: float) -> None:
    if failures is not None and (note := failures.note(seconds)):
        _tell_torchrun(note, late=True)
        raise SystemExit(1)


def _tell_torchrun(line: str, *, late: bool = False) -> None:
    """Have torchrun's report of a failed job, which is long, end with what went wrong: what was first, not late."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        when = {"py_callstack": line, "timestamp": str(int(time.time()) + late)}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": line, "extraInfo": when}}))
