"""Worker processes of a loader: how they start, end, and are killed.

Workers ignore Ctrl-C and SIGTERM, which may reach the whole process group while the trainer still needs batches for
the current step. Only SIGKILL ends them early.
"""

import atexit
import gc
import multiprocessing
import os
import signal
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, Generic, TypeVar

from torch.utils.data import DataLoader

from clipkit.errors import DataError
from clipkit.files import end_with_parent

T = TypeVar("T")
_LIKELY_CAUSE = {
    int(signal.SIGKILL): ", probably out of memory: lower data.workers or batch_size",
    int(
        signal.SIGBUS
    ): ", probably out of shared memory (/dev/shm): enlarge it, or lower data.workers or batch_size",
}
# Iterators with a killed worker. Torch takes locks when it ends an iterator, and the killed worker may have held
# one, so these are kept until Python exits.
_abandoned: list[Iterator[Any]] = []


def ignore_signals(worker: int) -> None:
    """Initialize a worker: ignore signals, and exit when the trainer exits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent()


class Workers(Generic[T]):
    """One iteration over a ``DataLoader`` that ends its workers and never waits for a killed one.

    Torch detects a killed worker by SIGCHLD and raises wherever the main thread is. Here the signal raises only in
    ``next``, and not while torch cleans up after an error of its own, which ``next`` raises soon after.
    """

    def __init__(self, loader: DataLoader[T]) -> None:
        self._iterator: Iterator[T] | None = None
        self._waiting = False
        self._owner = os.getpid()
        self._earlier = signal.getsignal(signal.SIGCHLD)
        self._processes: list[BaseProcess] = []
        others = set(multiprocessing.active_children())
        if loader.num_workers:
            # A forked worker must not finalize garbage of the trainer: the end of a CUDA event aborts the worker.
            gc.collect()
            gc.freeze()
        try:
            self._iterator = iter(loader)
        finally:
            gc.unfreeze()
            self._processes = [
                process for process in multiprocessing.active_children() if process not in others
            ]
            if self._iterator is None:  # a worker was killed already, or Ctrl-C
                try:
                    self._check()
                finally:
                    self._kill()
        if self._processes:
            self._handle(self._on_child)
        atexit.register(self.close)  # runs before multiprocessing's own hook, which waits for the workers

    def next(self) -> T | None:
        """Return the next batch, None after the last."""
        assert self._iterator is not None
        self._waiting = True
        try:
            self._check()
            return next(self._iterator, None)
        except Exception:  # a broken connection raises various errors in torch and multiprocessing
            # the connections of a killed worker break before its exit status is known
            sentinels = {process.sentinel: process for process in self._processes}
            if sentinels:
                for broken in wait(list(sentinels), timeout=1):
                    assert type(broken) is int
                    sentinels[broken].join(timeout=5)
            self._check()
            raise
        finally:
            self._waiting = False

    def close(self) -> None:
        """End the workers; kill those that do not end by themselves."""
        atexit.unregister(self.close)
        if self._iterator is None or os.getpid() != self._owner:
            return
        if self._processes:
            self._handle(self._earlier)
        if any(process.exitcode for process in self._processes):
            _abandoned.append(self._iterator)
        still = weakref.ref(self._iterator)
        self._iterator = None  # torch ends the workers with it
        held = still()
        if held is not None:  # a traceback refers to it, too
            _abandoned.append(held)
        self._kill()

    def _on_child(self, signal_number: int, frame: FrameType | None) -> None:
        if self._waiting and sys.exception() is None:
            self._check()
        if callable(self._earlier):
            with suppress(RuntimeError):  # torch's handler, which also knows our workers
                self._earlier(signal_number, frame)

    def _check(self) -> None:
        killed = [
            process for process in self._processes if process.exitcode
        ]  # None while alive, 0 if torch ended it
        if killed:
            for process in self._processes:  # at once: they would print errors about broken connections
                process.kill()
            status = killed[0].exitcode or 0
            how = f"was killed (signal {-status})" if status < 0 else f"ended (status {status})"
            raise DataError(f"a loader process {how}{_LIKELY_CAUSE.get(-status, '')}") from None

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(timeout=10)

    @staticmethod
    def _handle(handler: Any) -> None:
        # only in the main thread, and only a handler known to Python can be restored
        if threading.current_thread() is threading.main_thread() and handler is not None:
            signal.signal(signal.SIGCHLD, handler)
