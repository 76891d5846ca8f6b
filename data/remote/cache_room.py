"""Room in the folder of a shard cache: what its files may take together, and which of them go."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from clipkit.errors import DataError
from data.remote.node_lock import NodeLock

__all__ = ["STILL_SECONDS", "CacheRoom", "NoRoom"]

STILL_SECONDS = 900.0  # for which others may stand in our way without getting on; beyond all tries of a store
_POLL_SECONDS = 0.05


class NoRoom(Exception):
    """Everything is in use or on its way."""


class CacheRoom:
    """The bound on the bytes of ``FOLDER/??/*.tar`` and ``*.part`` together.

    A part file counts with the size that it is going to have, which it has from its beginning. A ``.tar`` is used
    when its time of change is set.

    Args:
        folder: the cache's.
        max_bytes: the bound.
        in_use_seconds: how long after its last use a file goes for urgent needs only.
    """

    def __init__(self, folder: Path, max_bytes: int, in_use_seconds: float) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._in_use_seconds = in_use_seconds

    def grow(self, part: Path, size: int, *, of: str, urgent: bool, has: int) -> None:
        """Give a part file its size once there is room for it.

        Args:
            part: the file, which is made if there is none. Its lock is held by the caller.
            size: in bytes.
            of: names the shard in messages.
            urgent: whether files in use go too, and parts of others are waited for.
            has: the size that it has by now.

        Raises:
            NoRoom: nothing may go, and it is neither urgent nor begun.
            DataError: it is larger than the cache, the disk is full, or others do not get on.
        """
        if size > self._max_bytes:
            raise DataError(
                f"{of} has {size} bytes or more, but the shard cache may hold {self._max_bytes} in all: raise "
                "data.cache_gb"
            )
        until = time.monotonic() + STILL_SECONDS
        while True:
            with self._locked():
                if self._make_room(part, size, urgent):
                    with part.open("ab") as file:
                        file.truncate(size)
                    return
            if not urgent and not has:
                raise NoRoom
            if time.monotonic() > until:
                raise DataError(
                    f"the shard cache {self._folder} is full of shards that are being fetched, {self._max_bytes} "
                    "bytes: raise data.cache_gb"
                )
            time.sleep(_POLL_SECONDS)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        lock = NodeLock(self._folder / "lock")
        until = time.monotonic() + STILL_SECONDS
        while not lock.try_acquire():
            if time.monotonic() > until:
                raise DataError(f"another process holds {self._folder / 'lock'} and stands still: end it")
            time.sleep(_POLL_SECONDS / 10)
        try:
            yield
        finally:
            lock.release()

    def _make_room(self, part: Path, size: int, urgent: bool) -> bool:
        """Remove what was used least recently until ``part`` may have its size; whether that could be."""
        files, parts, unwritten = [], 0, 0
        for path, status in self._files():
            if path == part:
                continue
            if path.suffix == ".tar":
                files.append((status.st_mtime_ns, path, status.st_size))
            elif not _was_left(path):
                parts += status.st_size
                unwritten += max(0, status.st_size - status.st_blocks * 512)
        total = size + parts + sum(one[2] for one in files)
        before = time.time_ns() - int(self._in_use_seconds * 1e9)
        removable = sorted(one for one in files if urgent or one[0] < before)
        if total - sum(one[2] for one in removable) > self._max_bytes:
            return False
        for _, path, bytes_of_file in removable:
            if total <= self._max_bytes:
                break
            path.unlink(missing_ok=True)
            total -= bytes_of_file
        self._check_disk(part, size, unwritten)
        return True

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        for folder in self._folder.glob("??"):
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.name.endswith((".tar", ".part")):
                        with suppress(FileNotFoundError):
                            yield Path(entry.path), entry.stat()

    def _check_disk(self, part: Path, size: int, unwritten: int) -> None:
        disk = os.statvfs(self._folder)
        free = disk.f_bavail * disk.f_frsize - unwritten
        with suppress(FileNotFoundError):
            free += part.stat().st_blocks * 512
        if size > free:
            raise DataError(
                f"the disk of the shard cache {self._folder} has no room for {size} bytes ({max(free, 0)} are "
                "free): lower data.cache_gb, or name another folder by CLIPKIT_CACHE"
            )


def _was_left(part: Path) -> bool:
    """Whether nobody works at a part file any more; it is removed then."""
    lock = NodeLock(part.with_suffix(".lock"))
    if not lock.try_acquire():
        return False
    part.unlink(missing_ok=True)
    lock.release()
    return True
