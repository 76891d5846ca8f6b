"""The shards of stores on the disk of this machine, shared by its processes.

    FOLDER/lock                     held for moments, while room is made
    FOLDER/ab/abcd….tar             a whole shard; the name is of its full URL, size and version
    FOLDER/ab/abcd….part            one on its way, from its beginning as long as it is going to be
    FOLDER/ab/abcd….lock            who fetches it
    FOLDER/ab/abcd….json            the size and CRC-32 that it had when it first came; stays when the shard goes
    FOLDER/ab/abcd….fault           why it could not be fetched, for those who wait

The sizes of all ``.tar`` and ``.part`` together never exceed a bound; what was used least recently goes first. A
process that has a file open keeps reading it when it goes, as POSIX has it; one that only has the path must open it
at once, or ask again.
"""

import hashlib
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clipkit.errors import DataError
from clipkit.files.atomic import FileLock, sync, write_atomic
from data.remote.shard_file import ShardFile
from data.remote.store import download, has_answered, shown

__all__ = ["STILL_SECONDS", "CacheRoom", "NoRoom", "ShardCache"]


# --------------------------------------------------------------------------------------------------------------
# Room in the folder of a shard cache: what its files may take together, and which of them go.

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
        lock = FileLock(self._folder / "lock")
        until = time.monotonic() + STILL_SECONDS
        while not lock.try_acquire():
            if time.monotonic() > until:
                raise DataError(
                    f"{lock.holder or 'another process'} holds {self._folder / 'lock'} without progress: end it"
                )
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
    lock = FileLock(part.with_suffix(".lock"))
    if not lock.try_acquire():
        return False
    part.unlink(missing_ok=True)
    lock.release()
    return True


# --------------------------------------------------------------------------------------------------------------

_TOUCH_SECONDS = 60.0  # uses within a minute count once
_LATER_SECONDS = 0.3  # until a shard is looked at again that cannot be fetched now
_STEP = 16 << 20  # bytes by which a file of unknown size grows


class _Closed(Exception):
    """Nobody wants it any more."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a shard lies."""

    stem: Path

    @property
    def file(self) -> Path:
        return self.stem.with_suffix(".tar")

    @property
    def part(self) -> Path:
        return self.stem.with_suffix(".part")

    @property
    def lock(self) -> Path:
        return self.stem.with_suffix(".lock")

    @property
    def about(self) -> Path:
        return self.stem.with_suffix(".json")

    @property
    def fault(self) -> Path:
        return self.stem.with_suffix(".fault")


@dataclass
class _Ahead:
    """What is fetched ahead by the threads of one process."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    wanted: list[ShardFile] = field(default_factory=list)
    busy: set[ShardFile] = field(default_factory=set)
    later: dict[ShardFile, float] = field(default_factory=dict)
    failures: dict[ShardFile, DataError] = field(default_factory=dict)
    threads: list[threading.Thread] = field(default_factory=list)
    limit: int = 0
    closed: bool = False


class ShardCache:
    """Files of shards, fetched when they are needed or before.

    May be pickled and used after a fork; what is fetched ahead belongs to the process that asked for it. Safe from
    several threads.

    Args:
        folder: where the files lie. It is made when it is needed, and may be shared by the processes of a machine.
        max_bytes: of all files together, those on their way included.
        in_use_seconds: how long after its last use a file stays, unless a shard is needed at once.
    """

    def __init__(self, folder: Path, max_bytes: int, *, in_use_seconds: float = 300.0) -> None:
        self.folder = folder.absolute()
        self.max_bytes = max_bytes
        self._touch_seconds = min(_TOUCH_SECONDS, in_use_seconds / 2)
        self._room = CacheRoom(self.folder, max_bytes, in_use_seconds + self._touch_seconds)
        self._by_process: dict[int, _Ahead] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_by_process": {}}

    @property
    def _ahead(self) -> _Ahead:
        return self._by_process.setdefault(os.getpid(), _Ahead())

    def path(self, shard: ShardFile) -> Path | None:
        """The file of a shard if it is here, which counts as a use of it; of a local one its own path.

        Raises:
            DataError: it was to be fetched ahead, and that failed; told once.
        """
        if not shard.is_remote:
            return Path(shard.url)
        ahead = self._ahead
        with ahead.changed:
            failure = ahead.failures.pop(shard, None)
        if failure is not None:
            raise failure
        return self._found(shard, self._place(shard))

    def fetch(self, shard: ShardFile) -> Path:
        """The file of a shard, downloaded now if it is not here; one process does it while the others wait.

        Raises:
            DataError: it cannot be fetched or stored, or is not what it was before.
        """
        found = self.path(shard)
        if found is not None:
            return found
        place = self._place(shard)
        began = time.time()
        with self._usable():
            lock = self._acquire(place)
            try:
                found = self.path(shard)
                if found is not None:
                    return found
                self._raise_fault(place, began)
                self._download(shard, place, urgent=True)
            finally:
                lock.release()
        return place.file

    def prefetch(self, shards: Sequence[ShardFile], *, threads: int) -> None:
        """Fetch these next, in their order, instead of what an earlier call has named.

        Their samples were counted, so a store that cannot be reached now is out of order rather than wrong.
        Failures are kept for who asks for the shard. What is under way is brought to its end.
        """
        ahead = self._ahead
        with ahead.changed:
            ahead.wanted = [shard for shard in dict.fromkeys(shards) if shard.is_remote]
            for shard in ahead.wanted:
                has_answered(shard.url)  # to whoever has counted its samples, if not to this process
            ahead.later.clear()
            ahead.limit = threads
            ahead.threads = [thread for thread in ahead.threads if thread.is_alive()]
            for number in range(len(ahead.threads), threads):
                name = f"shard-cache-{number}"
                thread = threading.Thread(target=self._work, args=(ahead,), name=name, daemon=True)
                ahead.threads.append(thread)
                thread.start()
            ahead.changed.notify_all()

    def close(self) -> None:
        """End the threads of this process; what is under way is dropped."""
        ahead = self._by_process.pop(os.getpid(), None)
        if ahead is None:
            return
        with ahead.changed:
            ahead.closed = True
            ahead.changed.notify_all()
        until = time.monotonic() + 5.0
        for thread in list(ahead.threads):
            thread.join(
                max(0.0, until - time.monotonic())
            )  # daemons: one that waits for a store does not keep us

    # Fetching ahead

    def _work(self, ahead: _Ahead) -> None:
        while (shard := self._next(ahead)) is not None:
            done = True
            with ahead.changed:
                ahead.failures.pop(shard, None)  # of an earlier try, which nobody has asked for
            try:
                done = self._fetch_ahead(shard, ahead)
            except DataError as error:
                self._keep(error, shard, ahead)
            except _Closed:
                pass
            with ahead.changed:
                ahead.busy.discard(shard)
                if not done:
                    ahead.later[shard] = time.monotonic() + _LATER_SECONDS
                elif shard in ahead.wanted:
                    ahead.wanted.remove(shard)
                ahead.changed.notify_all()

    def _keep(self, error: DataError, shard: ShardFile, ahead: _Ahead) -> None:
        with ahead.changed:
            ahead.failures[shard] = error

    def _next(self, ahead: _Ahead) -> ShardFile | None:
        """What to fetch now; None for a thread that is not needed any more."""
        with ahead.changed:
            while not ahead.closed and len(ahead.threads) <= ahead.limit:
                now = time.monotonic()
                for shard in ahead.wanted:
                    if shard not in ahead.busy and ahead.later.get(shard, now) <= now:
                        ahead.busy.add(shard)
                        return shard
                ahead.changed.wait(_LATER_SECONDS if ahead.later else None)
            with suppress(ValueError):
                ahead.threads.remove(threading.current_thread())
        return None

    def _fetch_ahead(self, shard: ShardFile, ahead: _Ahead) -> bool:
        """Whether a shard needs no more care; not so where another process fetches it or nothing may go for it."""
        place = self._place(shard)
        if self._found(shard, place) is not None:
            return True
        with self._usable():
            place.stem.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(place.lock)
            if not lock.try_acquire():
                return False
            try:
                if self._found(shard, place) is None:
                    self._download(shard, place, urgent=False, ahead=ahead)
            except NoRoom:
                return False
            except DataError as error:
                self._keep(error, shard, ahead)  # before who waits for the lock tries again
            finally:
                lock.release()
        return True

    # One shard

    def _place(self, shard: ShardFile) -> _Place:
        identity = f"{shard.url}\n{shard.size}\n{shard.version}"
        digest = hashlib.sha256(os.fsencode(identity)).hexdigest()
        return _Place(self.folder / digest[:2] / digest)

    def _found(self, shard: ShardFile, place: _Place) -> Path | None:
        try:
            status = place.file.stat()
        except OSError:
            return None
        if shard.size >= 0 and status.st_size != shard.size:  # somebody has changed it
            return None
        now = time.time_ns()
        if not 0 <= now - status.st_mtime_ns < self._touch_seconds * 1e9:
            with suppress(OSError):  # gone meanwhile, or it is another user's
                os.utime(place.file, ns=(now, now))
        return place.file

    def _acquire(self, place: _Place) -> FileLock:
        """Wait for the lock of a shard as long as who has it gets on."""
        place.stem.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(place.lock)
        last, since = 0, time.monotonic()
        while not lock.try_acquire():
            time.sleep(_POLL_SECONDS)
            with suppress(OSError):
                if (now := place.part.stat().st_mtime_ns) != last:
                    last, since = now, time.monotonic()
            if time.monotonic() - since > STILL_SECONDS:
                raise DataError(
                    f"another process has been fetching {place.file} without getting on for "
                    f"{STILL_SECONDS:.0f} s: end it, or name another folder by CLIPKIT_CACHE"
                )
        return lock

    def _raise_fault(self, place: _Place, began: float) -> None:
        """What has failed for another one while we waited for it fails for us: else each would try for minutes."""
        with suppress(OSError):
            if place.fault.stat().st_mtime >= began:
                raise DataError(place.fault.read_text(errors="replace"))

    def _download(
        self, shard: ShardFile, place: _Place, *, urgent: bool, ahead: _Ahead | None = None
    ) -> None:
        """Bring a shard here, with its lock held."""
        try:
            size, crc = self._receive(shard, place, urgent, ahead)
            known = _recorded(place)
            if known is not None and known != (size, crc):
                size, crc = self._receive(shard, place, urgent, ahead)
                if known != (size, crc):
                    raise DataError(
                        f"{shown(shard.url)}: the store gives other bytes (CRC-32 {crc:08x}) than before "
                        f"({known[1]:08x}) for the same size and version; remove {place.about} if they are right"
                    )
            if known is None:
                self._record(shard, place, size, crc)
            place.part.replace(place.file)
            sync(place.file.parent)
            place.fault.unlink(missing_ok=True)
        except DataError as error:
            with suppress(OSError):
                place.fault.write_text(str(error))
            raise
        finally:
            with suppress(OSError):
                place.part.unlink(missing_ok=True)

    def _receive(
        self, shard: ShardFile, place: _Place, urgent: bool, ahead: _Ahead | None
    ) -> tuple[int, int]:
        """Fetch a shard into its part file; its size and CRC-32."""
        with suppress(
            FileNotFoundError
        ):  # of someone who was killed, or with other bytes than there should be
            place.part.unlink()
        reserved = 0

        def reserve(size: int) -> None:
            nonlocal reserved
            if ahead is not None and ahead.closed:
                raise _Closed
            if size > reserved or not reserved:
                # the size is known, or there is room for a step more
                wanted = max(size, shard.size if shard.size >= 0 else min(size + _STEP, self.max_bytes))
                self._room.grow(place.part, wanted, of=shown(shard.url), urgent=urgent, has=reserved)
                reserved = wanted

        if shard.size >= 0:
            reserve(shard.size)
        crc = download(shard, place.part, room=reserve)
        os.utime(place.part)
        sync(place.part)
        return place.part.stat().st_size, crc

    def _record(self, shard: ShardFile, place: _Place, size: int, crc: int) -> None:
        about = {"url": shown(shard.url), "version": shard.version, "size": size, "crc32": crc}
        write_atomic(place.about, json.dumps(about) + "\n")

    @contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError(f"the shard cache {self.folder} cannot be used: {error.strerror}") from error


def _recorded(place: _Place) -> tuple[int, int] | None:
    try:
        about = json.loads(place.about.read_text())
        return int(about["size"]), int(about["crc32"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
