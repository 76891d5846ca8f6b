"""Exclusive locks among the threads and processes of the hosts that share a file system.

They are record locks (``fcntl.lockf``). The filelock library uses ``flock``, whose locks are inherited by forked
children: after ``kill -9``, a loader process that outlives the trainer for a moment would still hold its lock.
"""

import errno
import fcntl
import os
import socket
import threading
from contextlib import suppress
from pathlib import Path

__all__ = ["FileLock"]

_held: set[str] = set()  # by threads of this process, which record locks do not tell apart
_guard = threading.Lock()


def _forget() -> None:
    global _held, _guard
    _held, _guard = set(), threading.Lock()  # a forked process holds nothing of its parent's


os.register_at_fork(after_in_child=_forget)


class FileLock:
    """Lock that one thread of one process holds at a time, named by a file in an existing folder.

    The operating system releases it when its process ends, even by ``kill -9``. Closing any descriptor of the file
    releases it too, so no other code in a process that holds the lock may open the file.

    Args:
        path: the file; it contains the name of the holder and is removed on release.
        note: text to add to the name of this process.

    Attributes:
        holder: who had the lock when ``try_acquire`` returned False, such as "process 17 on node3"; may be empty.
    """

    def __init__(self, path: Path, *, note: str = "") -> None:
        self._path = str(path.absolute())
        self._note = note
        self._descriptor = -1
        self.holder = ""

    def try_acquire(self) -> bool:
        """Take the lock if it is free, without waiting.

        Raises:
            OSError: the file cannot be made, or the file system has no locks.
        """
        with _guard:
            if self._path in _held:
                self.holder = f"process {os.getpid()}"
                return False
            _held.add(self._path)
        try:
            while (descriptor := self._lock_file()) is None:
                pass  # the file was removed between opening and locking it
            self._descriptor = descriptor
        finally:
            if self._descriptor < 0:
                with _guard:
                    _held.discard(self._path)
        return self._descriptor >= 0

    def _lock_file(self) -> int | None:
        """Return a locked descriptor, -1 if another process has the lock, None if the file was removed."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        kept = False
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            kept = os.path.samestat(os.fstat(descriptor), Path(self._path).stat())
            if kept:
                with suppress(OSError):  # a full disk; the name only helps
                    os.ftruncate(descriptor, 0)
                    name = f"process {os.getpid()} on {socket.gethostname()}{self._note}\n"
                    os.pwrite(descriptor, name.encode(), 0)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            self.holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
            return -1
        finally:
            if not kept:
                os.close(descriptor)
        return descriptor if kept else None

    def release(self) -> None:
        """Remove the file and let others take the lock; does nothing if this object does not hold it."""
        if self._descriptor < 0:
            return
        try:
            Path(self._path).unlink(missing_ok=True)
        finally:
            os.close(self._descriptor)
            self._descriptor = -1
            with _guard:
                _held.discard(self._path)
