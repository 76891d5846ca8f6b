"""Locks among the threads and processes of one machine."""

import errno
import fcntl
import os
import threading
from pathlib import Path

__all__ = ["NodeLock"]

_held: set[str] = set()  # by threads of this process, which record locks do not tell apart
_guard = threading.Lock()


def _forget() -> None:
    global _held, _guard
    _held, _guard = set(), threading.Lock()  # a forked process holds nothing of its parent's


os.register_at_fork(after_in_child=_forget)


class NodeLock:
    """A lock that one thread of one process has at a time, named by a file.

    It ends with the process that holds it, even by ``kill -9``: it is a record lock, which a child does not inherit
    as it would one of flock. Closing any descriptor of such a file gives the lock away, so nobody else opens it.
    """

    def __init__(self, path: Path) -> None:
        self._path = str(path.absolute())
        self._descriptor = -1

    def try_acquire(self) -> bool:
        """Take it if nobody has it. Raises OSError where there can be no such file."""
        with _guard:
            if self._path in _held:
                return False
            _held.add(self._path)
        taken = False
        try:
            while (descriptor := self._try_file()) is None:
                pass  # its file was removed between our opening and locking it
            taken = descriptor >= 0
            self._descriptor = descriptor
        finally:
            if not taken:
                with _guard:
                    _held.discard(self._path)
        return taken

    def _try_file(self) -> int | None:
        """A locked descriptor, -1 where another process has the lock, None where it was of a removed file."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        kept = False
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            kept = os.path.samestat(os.fstat(descriptor), Path(self._path).stat())
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            return -1
        finally:
            if not kept:
                os.close(descriptor)
        return descriptor if kept else None

    def release(self) -> None:
        """Give it back, and remove its file."""
        Path(self._path).unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = -1
        with _guard:
            _held.discard(self._path)
