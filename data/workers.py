"""The worker processes of a loader: how they start, what happens when one is killed, and how they end.

Workers ignore Ctrl-C and SIGTERM, which may reach the whole process group while the trainer still needs batches
for the step it is in. So nothing but SIGKILL ends them against their will, and it has to come from here.
"""

import atexit
import multiprocessing
import os
import signal
import sys
import threading
import weakref
from collections.abc import Collection, Iterator
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, Generic, TypeVar

from torch.utils.data import DataLoader

from clipkit.errors import DataError
from data.child_process import end_with_parent

__all__ = ["Workers", "leave_signals_to_the_trainer"]

T = TypeVar("T")
_LIKELY_CAUSE = {
    int(signal.SIGKILL): ", often for want of memory: lower data.workers or batch_size",
    int(
        signal.SIGBUS
    ): ", often for want of shared memory (/dev/shm): enlarge it, or lower data.workers or batch_size",
}
# Iterators of which a worker was killed. Torch takes locks when it ends one, and the killed worker may have left
# with such a lock, so they are never ended: they stay here until Python leaves without ending anything.
_abandoned: list[Iterator[Any]] = []


def leave_signals_to_the_trainer(worker: int) -> None:
    """What each worker does first: ignore signals, and end when the trainer does, however that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent()


class Workers(Generic[T]):
    """One iteration over a ``DataLoader``, whose workers never outlive it nor make it wait for ever.

    Torch notices by SIGCHLD that a worker was killed, and raises wherever the main thread is. Here the same
    signal raises in ``next`` only, at once or when it is called, and not where torch clears up after an error
    of its own, which soon comes to ``next``; without a worker all is as in torch.
    """

    def __init__(self, loader: DataLoader[T]) -> None:
        self._iterator: Iterator[T] | None = None
        self._processes: list[BaseProcess] = []
        self._waiting = False
        self._owner = os.getpid()
        self._earlier = signal.getsignal(signal.SIGCHLD)
        others = set(multiprocessing.active_children())
        try:
            self._iterator = iter(loader)
        except BaseException:  # one was killed already, or Ctrl-C
            self._processes = _new_processes(others)
            self._check()
            raise
        finally:
            if self._iterator is None:
                self._kill()
        self._processes = _new_processes(others)
        if self._processes:
            self._handle(self._on_child)
        atexit.register(self.close)  # before multiprocessing's own hook, which waits for the workers

    def next(self) -> T | None:
        """The next batch, None after the last.

        Raises:
            DataError: a worker was killed, or has ended without being asked to.
        """
        assert self._iterator is not None
        self._waiting = True
        try:
            self._check()
            return next(self._iterator, None)
        except Exception:  # whatever a broken connection makes of torch's and multiprocessing's code
            self._wait_for_the_dying()
            self._check()
            raise
        finally:
            self._waiting = False

    def close(self) -> None:
        """End the workers; those that do not end by themselves are killed."""
        atexit.unregister(self.close)
        if self._iterator is None or os.getpid() != self._owner:
            return
        if self._processes:
            self._handle(self._earlier)
        if self._killed():
            _abandoned.append(self._iterator)
        still = weakref.ref(self._iterator)
        self._iterator = None  # torch ends the workers when it goes
        if (held := still()) is not None:  # a traceback holds it too
            _abandoned.append(held)
        self._kill()

    def _on_child(self, number: int, frame: FrameType | None) -> None:
        if self._waiting and sys.exception() is None:
            self._check()
        if callable(self._earlier):
            with suppress(RuntimeError):  # torch's own handler, which knows our workers too
                self._earlier(number, frame)

    def _check(self) -> None:
        if killed := self._killed():
            for one in self._processes:  # at once: they would complain of connections that break
                one.kill()
            status = killed[0].exitcode or 0
            what = f"was killed (signal {-status})" if status < 0 else f"ended (status {status})"
            raise DataError(f"a loader process {what}{_LIKELY_CAUSE.get(-status, '')}") from None

    def _wait_for_the_dying(self) -> None:
        # connections of a worker that is killed break first, and its exit status is known some time later
        sentinels = {one.sentinel: one for one in self._processes}
        for broken in wait(list(sentinels), timeout=1) if sentinels else []:
            assert type(broken) is int
            sentinels[broken].join(timeout=5)

    def _killed(self) -> list[BaseProcess]:
        return [one for one in self._processes if one.exitcode]  # None of the living, 0 of those torch ended

    def _kill(self) -> None:
        for one in self._processes:
            one.kill()
        for one in self._processes:
            one.join(timeout=10)

    @staticmethod
    def _handle(handler: Any) -> None:
        # only the main thread may, and only a handler that Python knows can be put back
        if threading.current_thread() is threading.main_thread() and handler is not None:
            signal.signal(signal.SIGCHLD, handler)


def _new_processes(others: Collection[BaseProcess]) -> list[BaseProcess]:
    return [one for one in multiprocessing.active_children() if one not in others]
