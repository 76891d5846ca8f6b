"""The cache folder, and the cache of remote shards in it that the processes of a machine share.

    FOLDER/lock                     held briefly while space is reserved
    FOLDER/total                    total size of all files, or more
    FOLDER/ab/abcd….tar             a complete shard; the name is a hash of its full URL, size and version
    FOLDER/ab/abcd….part            a download in progress, with its final size from the start
    FOLDER/ab/abcd….lock            held by the process that downloads
    FOLDER/ab/abcd….json            size and CRC-32 at the first download; stays when the shard is removed
    FOLDER/ab/abcd….fault           why the download failed, for processes that wait for it

The total size of all ``.tar`` and ``.part`` files never exceeds a limit; the least recently used shards are
removed first. A process that has a file open can still read it after removal (POSIX). One that only has the path
must open it at once, or fetch again.
"""

import hashlib
import json
import math
import os
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clipkit.errors import ConfigError, DataError
from clipkit.files import FileLock, redact_url, sync_to_disk, write_atomic
from clipkit.samples.remote.store import ShardFile, download, is_remote
from clipkit.samples.remote.transfer import answered

STILL_SECONDS = 900.0  # limit for waiting for a process without progress; longer than all retries of a store
_POLL_SECONDS = 0.05
_TOUCH_SECONDS = 60.0  # uses within this time count once
_LATER_SECONDS = 0.3  # before a shard that cannot be downloaded now is tried again
_STEP = 16 << 20  # bytes by which a file of unknown size grows
_TOTAL = "total"  # name of a file
_AT_ONCE = 256  # downloads of all processes of a machine
_FULL_SECONDS = 2.0  # until a folder that is full of files in use is listed again


def cache_folder() -> Path:
    """Return ``$CLIPKIT_CACHE``, else ``$XDG_CACHE_HOME/clipkit``, else ``~/.cache/clipkit``, without creating
    it."""
    folder = os.environ.get("CLIPKIT_CACHE")
    if folder:
        return Path(folder).expanduser()
    xdg = os.environ.get("XDG_CACHE_HOME")
    if xdg:
        return Path(xdg) / "clipkit"
    return Path.home() / ".cache" / "clipkit"


def index_folder() -> Path:
    """Return the folder of indexes and manifests: ``$CLIPKIT_INDEX_CACHE``, else that of ``cache_folder``.

    Indexes are small and the same for all machines: on a cluster, this folder is shared, and the cache, which holds
    downloaded shards, is on each machine's own disk.
    """
    folder = os.environ.get("CLIPKIT_INDEX_CACHE")
    return Path(folder).expanduser() if folder else cache_folder()


def created_once(folder: Path, make: Callable[[Path], object], *, name: str) -> None:
    """Create a folder of the cache unless it exists; only one of several processes does, and others wait.

    Args:
        folder: the folder; it is complete when it exists.
        make: creates it under a temporary name, ``.NAME.partial-…``, and renames it.
        name: of the content, for messages.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if folder.is_dir():
            return
        lock = FileLock(folder.with_name(f".{folder.name}.lock"))
        lock.acquire(lambda: print(f"waiting for {lock.holder} to create {name}", file=sys.stderr))
        try:
            if not folder.is_dir():
                for left in folder.parent.glob(f".{folder.name}.partial-*"):  # left by a killed process
                    shutil.rmtree(left, ignore_errors=True)
                make(folder)
        finally:
            lock.release()
    except OSError as error:
        raise DataError(f"cannot create {name} in {folder.parent} ({error}): set CLIPKIT_CACHE") from error


def shard_cache(sources: Sequence[str], gigabytes: float) -> "ShardCache | None":
    """Return this machine's cache of remote shards; None if no source is remote or caching is disabled."""
    if not gigabytes and any(source.startswith("pipe:") for source in sources):
        raise ConfigError(
            "the output of pipe: can be read only once and needs a cache: set data.cache_gb (or --cache-gb) above 0"
        )
    if not gigabytes or not any(map(is_remote, sources)):
        return None
    return ShardCache(cache_folder() / "shards", int(gigabytes * 1e9))


class _NoSpace(Exception):
    """All files are in use or being downloaded."""


class _Closed(Exception):
    """The cache was closed during a download."""


@dataclass
class _Prefetch:
    """The shards that the threads of one process prefetch."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    queue: list[ShardFile] = field(default_factory=list)
    busy: set[ShardFile] = field(default_factory=set)
    later: dict[ShardFile, float] = field(default_factory=dict)
    failures: dict[ShardFile, DataError] = field(default_factory=dict)
    threads: list[threading.Thread] = field(default_factory=list)
    closed: bool = False


class ShardCache:
    """Local copies of shards, downloaded when needed or ahead of time.

    Thread-safe. Can be pickled and used after a fork; downloads ahead belong to the process that requested them.

    Args:
        folder: created when needed; may be shared by the processes of a machine.
        max_bytes: limit for all files together, including downloads in progress.
        in_use_seconds: files are kept this long after their last use, unless another shard is needed immediately.
    """

    def __init__(self, folder: Path, max_bytes: int, *, in_use_seconds: float = 300.0) -> None:
        self.folder = folder.absolute()
        self.max_bytes = max_bytes
        self._touch_seconds = min(_TOUCH_SECONDS, in_use_seconds / 2)
        self._in_use_seconds = in_use_seconds + self._touch_seconds
        self._by_process: dict[int, _Prefetch] = {}
        # modification time, path and size of listed shards, the least recently used first; see ``_make_space``
        self._oldest: deque[tuple[int, Path, int]] = deque()
        self._full_until = -math.inf

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_by_process": {}, "_oldest": deque()}

    @property
    def _ahead(self) -> _Prefetch:
        return self._by_process.setdefault(os.getpid(), _Prefetch())

    def path(self, shard: ShardFile) -> Path | None:
        """Return the file of a shard if it is present, and mark it as used; for a local shard its own path."""
        if not shard.is_remote:
            return Path(shard.url)
        ahead = self._ahead
        with ahead.changed:
            failure = ahead.failures.pop(shard, None)
        if failure is not None:
            raise failure
        return self._find(shard)

    def fetch(self, shard: ShardFile) -> Path:
        """Return the file of a shard, downloading it if needed; one process downloads while the others wait."""
        path = self.path(shard) or self._fetch(shard)
        assert path is not None
        return path

    def prefetch(self, shards: Sequence[ShardFile], *, threads: int, were_counted: bool = True) -> None:
        """Download these shards next, in their order, instead of those of an earlier call.

        If their samples ``were_counted``, in this or another process, failures to reach the store are treated as
        outages. Failures are raised by ``path`` and ``fetch``. Downloads in progress are completed.
        """
        ahead = self._ahead
        with ahead.changed:
            ahead.queue = [shard for shard in dict.fromkeys(shards) if shard.is_remote]
            if were_counted:
                for shard in ahead.queue:
                    answered(shard.url)
            ahead.later.clear()
            ahead.threads = [thread for thread in ahead.threads if thread.is_alive()]
            for index in range(len(ahead.threads), threads):
                name = f"shard-cache-{index}"
                thread = threading.Thread(target=self._work, args=(ahead,), name=name, daemon=True)
                ahead.threads.append(thread)
                thread.start()
            ahead.changed.notify_all()

    def close(self) -> None:
        """Stop the threads of this process and drop downloads in progress."""
        ahead = self._by_process.pop(os.getpid(), None)
        if ahead is None:
            return
        with ahead.changed:
            ahead.closed = True
            ahead.changed.notify_all()
        until = time.monotonic() + 5.0
        # daemon threads, which do not block the exit while waiting for a store
        for thread in list(ahead.threads):
            thread.join(max(0.0, until - time.monotonic()))

    def _work(self, ahead: _Prefetch) -> None:
        while True:
            with ahead.changed:
                while not ahead.closed:
                    now = time.monotonic()
                    idle = (shard for shard in ahead.queue if shard not in ahead.busy)
                    shard = next((shard for shard in idle if ahead.later.get(shard, now) <= now), None)
                    if shard is not None:
                        break
                    ahead.changed.wait(_LATER_SECONDS if ahead.later else None)
                else:
                    return
                ahead.busy.add(shard)
                ahead.failures.pop(shard, None)  # of an earlier attempt
            done = True
            try:
                done = self._fetch(shard, ahead) is not None
            except DataError as error:
                ahead.failures[shard] = error
            except _Closed:
                pass
            with ahead.changed:
                ahead.busy.discard(shard)
                if not done:
                    ahead.later[shard] = time.monotonic() + _LATER_SECONDS
                elif shard in ahead.queue:
                    ahead.queue.remove(shard)
                ahead.changed.notify_all()

    def _fetch(self, shard: ShardFile, ahead: _Prefetch | None = None) -> Path | None:
        """Download a shard under its lock and return its file.

        When prefetching, return None while another process downloads it or there is no space for it.
        """
        stem = self._stem(shard)
        began = time.time()
        try:
            stem.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(stem.with_suffix(".lock"))
            if ahead is None:
                self._wait_for(lock, stem)
            elif not lock.try_acquire():
                return None
            try:
                path = self.path(shard) if ahead is None else self._find(shard)
                if path is None:
                    if ahead is None:
                        with suppress(OSError):  # otherwise each waiting process would retry for minutes
                            fault = stem.with_suffix(".fault")
                            if fault.stat().st_mtime >= began:
                                raise DataError(fault.read_text(errors="replace"))
                    self._download(shard, stem, ahead)
            except DataError as error:
                if ahead is not None:
                    ahead.failures[shard] = error  # before a thread that waits for the lock tries again
                raise
            except _NoSpace:
                return None
            finally:
                lock.release()
        except OSError as error:
            raise DataError(
                f"the shard cache {self.folder} cannot be used: {error.strerror}; set CLIPKIT_CACHE to a folder "
                "on a local disk"
            ) from error
        return stem.with_suffix(".tar")

    def _stem(self, shard: ShardFile) -> Path:
        digest = hashlib.sha256(os.fsencode(shard.identity)).hexdigest()
        return self.folder / digest[:2] / digest

    def _find(self, shard: ShardFile) -> Path | None:
        path = self._stem(shard).with_suffix(".tar")
        try:
            status = path.stat()
        except OSError:
            return None
        if shard.size >= 0 and status.st_size != shard.size:  # modified
            return None
        now = time.time_ns()
        if not 0 <= now - status.st_mtime_ns < self._touch_seconds * 1e9:
            with suppress(OSError):  # removed meanwhile, or owned by another user
                os.utime(path, ns=(now, now))
        return path

    def _wait_for(self, lock: FileLock, stem: Path) -> None:
        last = 0
        since = time.monotonic()
        while not lock.try_acquire():
            time.sleep(_POLL_SECONDS)
            with suppress(OSError):
                now = stem.with_suffix(".part").stat().st_mtime_ns
                if now != last:
                    last = now
                    since = time.monotonic()
            if time.monotonic() - since > STILL_SECONDS:
                raise DataError(
                    f"another process has been downloading {stem}.tar without progress for {STILL_SECONDS:.0f} s: "
                    "end it, or set CLIPKIT_CACHE to another folder"
                )

    def _download(self, shard: ShardFile, stem: Path, ahead: _Prefetch | None) -> None:
        part, record, fault = (stem.with_suffix(suffix) for suffix in (".part", ".json", ".fault"))
        earlier: tuple[int, int] | None = None
        with suppress(OSError, ValueError, KeyError, TypeError):
            recorded = json.loads(record.read_text())
            earlier = int(recorded["size"]), int(recorded["crc32"])
        try:
            received = self._receive(shard, part, ahead)
            if earlier is not None and earlier != received:
                received = self._receive(shard, part, ahead)
                if earlier != received:
                    raise DataError(
                        f"{redact_url(shard.url)}: the bytes differ from an earlier download (CRC-32 "
                        f"{received[1]:08x}, before {earlier[1]:08x}) at the same size and "
                        f"version; remove {record} to accept them"
                    )
            if earlier is None:
                size, crc = received
                about = {"url": redact_url(shard.url), "version": shard.version, "size": size, "crc32": crc}
                write_atomic(record, json.dumps(about) + "\n")
            part.replace(stem.with_suffix(".tar"))
            sync_to_disk(stem.parent)
            fault.unlink(missing_ok=True)
        except DataError as error:
            with suppress(OSError):
                fault.write_text(str(error))
            raise
        finally:
            with suppress(OSError):
                part.unlink(missing_ok=True)

    def _receive(self, shard: ShardFile, part: Path, ahead: _Prefetch | None) -> tuple[int, int]:
        part.unlink(missing_ok=True)  # of a killed process, or of a failed check
        reserved = 0

        def reserve(size: int) -> None:
            nonlocal reserved
            if ahead is not None and ahead.closed:
                raise _Closed
            if size > reserved or not reserved:
                total = max(size, shard.size if shard.size >= 0 else min(size + _STEP, self.max_bytes))
                self._reserve(part, total, called=redact_url(shard.url), urgent=ahead is None, has=reserved)
                reserved = total

        if shard.size >= 0:
            reserve(shard.size)
        crc = download(shard, part, reserve=reserve)
        os.utime(part)
        sync_to_disk(part)
        return part.stat().st_size, crc

    def _reserve(self, part: Path, size: int, *, called: str, urgent: bool, has: int) -> None:
        """Give a part file, whose lock is held, its size as soon as there is space.

        Only ``urgent`` downloads remove files in use. One that is neither urgent nor started raises ``_NoSpace``.
        """
        if size > self.max_bytes:
            raise DataError(
                f"{called} has {size} bytes or more, but the shard cache is limited to {self.max_bytes}: raise "
                "data.cache_gb"
            )
        until = time.monotonic() + STILL_SECONDS
        lock = FileLock(self.folder / "lock")
        while True:
            while not lock.try_acquire():
                if time.monotonic() > until:
                    holder = lock.holder or "another process"
                    raise DataError(f"{holder} holds {self.folder / 'lock'} without progress: end it")
                time.sleep(_POLL_SECONDS / 10)
            try:
                if self._make_space(part, size, urgent=urgent, has=has):
                    with part.open("ab") as file:
                        file.truncate(size)
                    return
            finally:
                lock.release()
            if not urgent and not has:
                raise _NoSpace
            if time.monotonic() > until:
                raise DataError(
                    f"the shard cache {self.folder} is full of downloads in progress, {self.max_bytes} bytes: "
                    "raise data.cache_gb"
                )
            time.sleep(_POLL_SECONDS)

    def _make_space(self, part: Path, size: int, *, urgent: bool, has: int) -> bool:
        """Remove files until there is space for a part file of ``size`` bytes, of which it ``has`` some.

        A listing of the folder takes long if it has many shards, so it is used until its files are removed.
        Meanwhile the total size is read from a file, where it may be too large, but never too small.
        """
        total = self._recorded_total()
        if total is None or not self._has_ample_disk(size):
            return self._make_space_by_listing(part, size, urgent)
        total += size - has
        total -= self._remove_oldest(total - self.max_bytes, urgent)
        if total > self.max_bytes:
            return self._make_space_by_listing(part, size, urgent)
        self._record_total(total)
        return True

    def _recorded_total(self) -> int | None:
        try:
            return int((self.folder / _TOTAL).read_text())
        except (OSError, ValueError):
            return None

    def _record_total(self, total: int) -> None:
        write_atomic(self.folder / _TOTAL, str(total))

    def _has_ample_disk(self, size: int) -> bool:
        """Return whether the disk has space for the downloads of all processes, which are not written yet."""
        disk = os.statvfs(self.folder)
        return disk.f_bavail * disk.f_frsize > _AT_ONCE * size

    def _remove_oldest(self, excess: int, urgent: bool) -> int:
        """Remove the least recently used of the listed shards; return the number of bytes."""
        removed = 0
        before = time.time_ns() - int(self._in_use_seconds * 1e9)
        while removed < excess and self._oldest:
            modified, path, size = self._oldest[0]
            if not urgent and modified >= before:
                break
            self._oldest.popleft()
            with suppress(FileNotFoundError):  # removed by another process
                if path.stat().st_mtime_ns == modified:  # not used since
                    path.unlink()
                    removed += size
        return removed

    def _make_space_by_listing(self, part: Path, size: int, urgent: bool) -> bool:
        if not urgent and time.monotonic() < self._full_until:
            return False
        files = list[tuple[int, Path, int]]()
        sizes = dict[Path, int]()
        unwritten = 0
        # parts first: other processes may rename them to shards meanwhile
        for path in self.folder.glob("??/*.part"):
            if path == part:
                continue
            lock = FileLock(path.with_suffix(".lock"))
            if lock.try_acquire():  # of a killed process
                path.unlink(missing_ok=True)
                lock.release()
                continue
            with suppress(FileNotFoundError):
                status = path.stat()
                sizes[path.with_suffix("")] = status.st_size
                unwritten += max(0, status.st_size - status.st_blocks * 512)
        for path in self.folder.glob("??/*.tar"):
            with suppress(FileNotFoundError):
                status = path.stat()
                sizes[path.with_suffix("")] = status.st_size
                files.append((status.st_mtime_ns, path, status.st_size))
        total = size + sum(sizes.values())
        self._oldest = deque(sorted(files))
        before = time.time_ns() - int(self._in_use_seconds * 1e9)
        removable = sum(size for modified, _, size in files if urgent or modified < before)
        if total - removable > self.max_bytes:
            self._full_until = time.monotonic() + min(_FULL_SECONDS, self._in_use_seconds / 4)
            return False
        total -= self._remove_oldest(total - self.max_bytes, urgent)
        if total > self.max_bytes:  # another process has used a file meanwhile
            return False
        self._record_total(total)
        disk = os.statvfs(self.folder)
        free = disk.f_bavail * disk.f_frsize - unwritten
        with suppress(FileNotFoundError):
            free += part.stat().st_blocks * 512
        if size > free:
            raise DataError(
                f"the disk of the shard cache {self.folder} has no space for {size} bytes ({max(free, 0)} are "
                "free): lower data.cache_gb, or set CLIPKIT_CACHE to another folder"
            )
        return True
