"""Write files: atomically, as lines of JSON, and under locks; and paths that users give."""

import errno
import fcntl
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from clipkit.errors import ConfigError, DataError


def name_order(name: str) -> tuple[int, str]:
    """Sort key of file names in a folder: shorter ones first, so that 2.tar precedes 10.tar."""
    return len(name), name


def user_path(text: str) -> Path:
    """Expand ``~``; if there is no home folder, keep it as part of the name."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def resolve_output(path: Path) -> Path:
    """Resolve a folder to write to."""
    try:
        return path.expanduser().resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"cannot create the folder {str(path)[:200]!r}: {error}") from error


@contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yield a temporary path next to ``path`` and rename it to ``path`` when the block ends.

    If the block fails, the temporary file is removed.

    Args:
        path: the file to create or replace; its folder exists.
        durable: whether to ``fsync``, so that the content and the new name survive a power failure.
    """
    temporary = temporary_path(path)
    try:
        yield temporary
        if durable:
            sync_to_disk(temporary)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    if durable:
        sync_to_disk(path.parent)


def write_atomic(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Write a file as ``replacing`` does; unpaired surrogates in text become question marks."""
    with replacing(path, durable=durable) as temporary:
        temporary.write_bytes(content.encode("utf-8", "replace") if isinstance(content, str) else content)


def write_lines(path: Path, records: Iterable[Mapping[str, Any]], *, append: bool = False) -> None:
    """Write records as lines of JSON, or append them."""
    try:
        with path.open("a" if append else "w", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}") from error


def drop_lines_after(path: Path, step: int) -> None:
    """Remove lines of steps after ``step``, and lines cut short by a kill, from a JSONL file."""
    if not path.is_file():
        return
    lines = []
    # split at "\n" only: text in a line may contain other separators, at which splitlines would cut
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        with suppress(ValueError, AttributeError, TypeError):
            if (json.loads(line).get("step") or 0) <= step:
                lines.append(line + "\n")
    write_atomic(path, "".join(lines))


def temporary_path(path: Path) -> Path:
    """Return a hidden name next to ``path`` that no other process on any host uses."""
    start = path.name[:50]  # the name may already have the maximum length
    return path.with_name(f".{start}.{os.urandom(4).hex()}.partial")


def sync_to_disk(path: Path) -> None:
    """Flush a file's content, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # of filesystems without locks
_without_locks: set[str] = set()  # folders about which a warning was printed
_held: set[str] = set()  # locks held by threads of this process, which record locks do not distinguish
_guard = threading.Lock()


def _reset_locks() -> None:
    global _held, _guard
    _held, _guard = set(), threading.Lock()  # a forked process does not inherit its parent's locks


os.register_at_fork(after_in_child=_reset_locks)


class FileLock:
    """Lock held by at most one thread of one process, identified by a file in an existing folder.

    It is a record lock (``fcntl.lockf``), which the operating system releases when the process ends, even after
    ``kill -9``. The filelock library uses ``flock``, whose locks forked data workers would inherit. Closing any
    descriptor of the file also releases the lock, so other code in the process must not open the file.

    Args:
        path: the lock file; it contains the name of the holder and is removed on release.
        note: text appended to the name of this process.
        optional: whether a filesystem without locks, such as Lustre without ``flock``, causes a warning instead of
            an error; then nothing is locked against other processes.

    Attributes:
        holder: the holder when ``try_acquire`` returned False, such as "process 17 on node3"; may be empty.
    """

    def __init__(self, path: Path, *, note: str = "", optional: bool = False) -> None:
        self._path = str(path.absolute())
        self._note = note
        self._optional = optional
        self._descriptor = -1
        self.holder = ""

    def try_acquire(self) -> bool:
        """Take the lock if it is free, without waiting."""
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

    def acquire(self, waiting: Callable[[], object], *, timeout: float = math.inf, poll: float = 0.1) -> bool:
        """Take the lock, waiting at most ``timeout`` seconds while another process holds it; return whether it did.

        Args:
            waiting: called once if the lock is not free at first; ``holder`` is known then.
        """
        until, first = time.monotonic() + timeout, True
        while not self.try_acquire():
            if time.monotonic() >= until:
                return False
            if first:
                waiting()
                first = False
            time.sleep(poll)
        return True

    def _lock_file(self) -> int | None:
        """Return a locked descriptor, -1 if another process holds the lock, or None if the file was removed."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        is_locked = False
        try:
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in _NO_LOCKS or not self._optional:
                    raise
                self._warn()
            is_locked = os.path.samestat(os.fstat(descriptor), Path(self._path).stat())
            if is_locked:
                with suppress(OSError):  # a full disk; the name is only for messages
                    os.ftruncate(descriptor, 0)
                    name = f"process {os.getpid()} on {os.uname().nodename}{self._note}\n"
                    os.pwrite(descriptor, name.encode(), 0)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            self.holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
            return -1
        finally:
            if not is_locked:
                os.close(descriptor)
        return descriptor if is_locked else None

    def _warn(self) -> None:
        folder = str(Path(self._path).parent)
        if folder not in _without_locks:
            _without_locks.add(folder)
            print(
                f"warning: {folder} is on a filesystem without file locks: make sure that no other process writes "
                "there",
                file=sys.stderr,
            )

    def release(self) -> None:
        """Remove the file and release the lock; does nothing if this object does not hold it."""
        if self._descriptor < 0:
            return
        try:
            Path(self._path).unlink(missing_ok=True)
        finally:
            os.close(self._descriptor)
            self._descriptor = -1
            with _guard:
                _held.discard(self._path)


@contextmanager
def lock_output(out: Path, command: str, *, lock: Path | None = None, timeout: float = 0.0) -> Iterator[None]:
    """Lock a file or folder while a command writes it. A filesystem without locks causes a warning.

    Args:
        lock: the lock file, in an existing folder; by default a hidden file beside ``out``.
        timeout: seconds to wait for another process.
    """
    file_lock = FileLock(lock or out.with_name(f".{out.name[:200]}.lock"), optional=True)
    if not file_lock.acquire(lambda: None, timeout=timeout):
        holder = f" ({file_lock.holder})" if file_lock.holder else ""
        raise ConfigError(
            f"another {command}{holder} is writing to {out}: wait for it, or use another output"
        )
    try:
        yield
    finally:
        with suppress(OSError):
            file_lock.release()
