"""Tests of the shard cache shared by processes, with local servers and killed processes."""

import errno
import hashlib
import multiprocessing
import os
import pickle
import signal
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from clipkit.files.writing import FileLock
from clipkit.samples.remote import cache as shard_cache
from clipkit.samples.remote.cache import ShardCache
from clipkit.samples.remote.store import ShardFile, describe_files
from tests.clipkit.samples.remote import servers
from tests.clipkit.samples.remote.servers import S3, Nginx, Unruly, error_of

impatient = servers.impatient
nginx = servers.nginx
s3 = servers.s3
unruly = servers.unruly

# processes are forked while threads run, as in loaders
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

LARGE = 1 << 40


def put(nginx: Nginx, count: int, size: int = 50_000, of: str = "") -> tuple[list[ShardFile], list[bytes]]:
    """Put shards on a server; return them and their contents."""
    contents = [os.urandom(size) for _ in range(count)]
    urls = [nginx.put(f"{number:05d}.tar", data) for number, data in enumerate(contents)]
    if of:
        urls = [nginx.url(f"{number:05d}.tar", of=of) for number in range(count)]
    return describe_files(urls), contents


def downloads(nginx: Nginx) -> list[str]:
    """Return the names of completely downloaded files, in the order in which they finished."""
    return [request.name for request in nginx.requests() if request.range == "-"]


def digests_of(contents: list[bytes]) -> list[str]:
    return [hashlib.sha256(data).hexdigest() for data in contents]


def files(cache: ShardCache, suffix: str = "tar") -> list[Path]:
    return sorted(cache.folder.glob(f"*/*.{suffix}"))


def used_before(path: Path, seconds: float) -> None:
    then = time.time_ns() - int(seconds * 1e9)
    os.utime(path, ns=(then, then))


def started(work: Callable[..., None], *args: Any) -> BaseProcess:
    child = multiprocessing.get_context("fork").Process(target=work, args=args, daemon=True)
    child.start()
    return child


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.005)


def test_each_shard_is_downloaded_once(nginx: Nginx, s3: S3, tmp_path: Path) -> None:
    shards, contents = put(nginx, 3)
    contents.append(os.urandom(70_000))
    shards += describe_files([s3.put("0.tar", contents[-1])])
    cache = ShardCache(tmp_path / "cache", LARGE)
    for _ in range(2):
        for shard, data in zip(shards, contents, strict=True):
            path = cache.fetch(shard)
            assert path.read_bytes() == data and cache.path(shard) == path
    assert sorted(downloads(nginx)) == ["00000.tar", "00001.tar", "00002.tar"]
    assert {path.suffix for path in cache.folder.rglob("*.*")} == {
        ".tar",
        ".json",
    }  # no temporary files are left
    about = cache.fetch(shards[0]).with_suffix(".json").read_text()
    assert f'"crc32": {zlib.crc32(contents[0])}' in about
    local = ShardFile(url=str(tmp_path / "here.tar"), size=1, version="")
    assert cache.path(local) == cache.fetch(local) == tmp_path / "here.tar"
    # another version is another file; a file that was truncated is downloaded again
    changed = ShardFile(url=shards[0].url, size=shards[0].size, version="other")
    assert cache.path(changed) is None
    os.truncate(cache.fetch(shards[1]), 10)
    assert cache.path(shards[1]) is None
    assert cache.fetch(shards[1]).read_bytes() == contents[1]


def test_least_recently_used_shard_is_evicted(nginx: Nginx, tmp_path: Path) -> None:
    shards, contents = put(nginx, 4)
    cache = ShardCache(tmp_path / "cache", 150_000)
    paths = [cache.fetch(shard) for shard in shards[:3]]
    for path, seconds in zip(paths, (100, 300, 200), strict=True):
        used_before(path, seconds)
    with paths[1].open("rb") as file:
        cache.path(shards[1])  # makes another shard the oldest
        last = cache.fetch(shards[3])
        assert files(cache) == sorted([paths[0], paths[1], last])
        used_before(paths[1], 400)  # back in time, so a process that has listed the files would not notice
        cache = ShardCache(tmp_path / "cache", 150_000)
        cache.fetch(shards[2])
        assert not paths[1].exists()
        assert file.read() == contents[1]  # an open file remains readable
    used_before(last, 59)
    before = last.stat().st_mtime_ns
    cache.path(shards[3])
    assert last.stat().st_mtime_ns == before  # within a minute of the last use


def test_unusable_cache_folder_or_limit_raises_error(
    nginx: Nginx, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [shard], _ = put(nginx, 1)
    message = error_of(lambda: ShardCache(tmp_path / "cache", 49_999).fetch(shard))
    assert "50000 bytes" in message and "49999" in message and "raise data.cache_gb" in message
    huge = ShardFile(url=shard.url, size=1 << 60, version="")
    assert "has no space for" in error_of(lambda: ShardCache(tmp_path / "cache", 1 << 61).fetch(huge))
    assert "Not a directory" in error_of(lambda: ShardCache(Path("/dev/null/cache"), LARGE).fetch(shard))
    assert downloads(nginx) == []

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", refuse)
    assert "Read-only" in error_of(lambda: ShardCache(tmp_path / "cache", LARGE).fetch(shard))


def test_streams_of_unknown_size_respect_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_cache, "_STEP", 100_000)
    (tmp_path / "0.tar").write_bytes(os.urandom(3_000_000))
    shard = ShardFile(url=f"pipe:cat {tmp_path}/0.tar", size=-1, version="")
    cache = ShardCache(tmp_path / "cache", 3_050_000, in_use_seconds=0)
    assert cache.fetch(shard).read_bytes() == (tmp_path / "0.tar").read_bytes()
    other = ShardFile(url=f"pipe:cat  {tmp_path}/0.tar", size=-1, version="")
    cache.fetch(other)
    assert len(files(cache)) == 1
    message = error_of(lambda: ShardCache(tmp_path / "less", 2_999_999).fetch(shard))
    assert message.startswith("pipe:cat … 0.tar has 3000000 bytes or more")
    assert {path.suffix for path in (tmp_path / "less").rglob("*.*")} == {".fault"}


def test_changed_bytes_of_the_same_version_raise_error(unruly: Unruly, tmp_path: Path) -> None:
    [shard] = describe_files([unruly.url])
    cache = ShardCache(tmp_path / "cache", LARGE)
    cache.fetch(shard).unlink()
    unruly.script = ["other"]
    assert cache.fetch(shard).read_bytes() == unruly.data  # a single mismatch may be a transfer error
    cache.fetch(shard).unlink()
    unruly.script = ["other", "other"]
    assert "the bytes differ from an earlier download (CRC-32" in error_of(lambda: cache.fetch(shard))
    assert files(cache) == files(cache, "part") == []
    assert cache.fetch(shard).read_bytes() == unruly.data


# Prefetching


def test_prefetching_downloads_in_order(nginx: Nginx, tmp_path: Path) -> None:
    shards, contents = put(nginx, 6)
    cache = ShardCache(tmp_path / "cache", LARGE)
    others = set(threading.enumerate())  # threads left by earlier tests
    cache.prefetch(shards[:4], threads=1)
    until(lambda: len(files(cache)) == 4)
    assert downloads(nginx) == [f"{number:05d}.tar" for number in range(4)]  # in the order of the list
    cache.prefetch(shards, threads=3)
    until(lambda: len(files(cache)) == 6)
    assert len(downloads(nginx)) == 6
    for shard, data in zip(shards, contents, strict=True):
        path = cache.path(shard)
        assert path is not None and path.read_bytes() == data
    cache.close()
    cache.close()
    left = set(threading.enumerate()) - others
    assert not [thread for thread in left if thread.name.startswith("shard-cache")]


def test_prefetch_failure_is_raised_at_the_next_use(nginx: Nginx, tmp_path: Path) -> None:
    shards, _ = put(nginx, 2)
    missing = ShardFile(url=nginx.url("none.tar"), size=9, version="")
    cache = ShardCache(tmp_path / "cache", LARGE)
    cache.prefetch([missing, *shards], threads=1)
    until(lambda: len(files(cache)) == 2)
    assert "status 404" in error_of(lambda: cache.path(missing))
    assert cache.path(missing) is None  # raised once
    cache.prefetch([missing], threads=1)
    until(lambda: not cache._ahead.queue)
    assert "status 404" in error_of(lambda: cache.fetch(missing))
    cache.prefetch([missing], threads=1)
    until(lambda: not cache._ahead.queue)
    nginx.put("none.tar", bytes(9))
    cache.prefetch([missing], threads=1)
    until(lambda: not cache._ahead.queue)  # the last attempt counts
    assert cache.fetch(missing).read_bytes() == bytes(9)
    cache.close()


def test_prefetching_does_not_evict_shards_in_use(nginx: Nginx, tmp_path: Path) -> None:
    shards, _ = put(nginx, 4)
    cache = ShardCache(tmp_path / "cache", 100_000)
    first, second = cache.fetch(shards[0]), cache.fetch(shards[1])
    cache.prefetch(shards[2:3], threads=1)
    time.sleep(0.5)
    assert files(cache) == sorted([first, second])
    used_before(first, 1000)
    until(lambda: cache.path(shards[2]) is not None)
    assert not first.exists() and second.exists()
    assert cache.fetch(shards[3]).exists()  # a shard that is needed now may evict it
    assert not second.exists()
    cache.close()


def test_prefetch_list_is_replaced_and_close_cancels_downloads(nginx: Nginx, tmp_path: Path) -> None:
    shards, _ = put(nginx, 3, size=12 << 20, of="slow/")
    cache = ShardCache(tmp_path / "cache", LARGE)
    cache.prefetch(shards, threads=1)
    until(lambda: len(files(cache, "part")) == 1)
    cache.prefetch([], threads=1)
    began = time.monotonic()
    cache.close()
    assert time.monotonic() - began < 2.5
    assert [path.name for path in cache.folder.rglob("*") if path.is_file()] == ["total"]


# Processes


def _fetch_all(cache: ShardCache, shards: list[ShardFile], digests: list[str]) -> None:
    for shard, digest in zip(shards, digests, strict=True):
        assert hashlib.sha256(cache.fetch(shard).read_bytes()).hexdigest() == digest


def test_processes_share_downloaded_shards(nginx: Nginx, tmp_path: Path) -> None:
    shards, contents = put(nginx, 8, size=300_000)
    digests = digests_of(contents)
    cache = pickle.loads(pickle.dumps(ShardCache(tmp_path / "cache", LARGE)))
    cache.prefetch(shards[:3], threads=2)  # threads run while this process forks
    children = [started(_fetch_all, cache, shards, digests) for _ in range(3)]
    backwards = started(_fetch_all, cache, shards[::-1], digests[::-1])
    cache.prefetch(shards, threads=2)
    for child in [*children, backwards]:
        child.join(30)
        assert child.exitcode == 0
    assert sorted(downloads(nginx)) == [f"{number:05d}.tar" for number in range(8)]
    cache.close()


def test_processes_with_a_small_cache_respect_the_limit(nginx: Nginx, tmp_path: Path) -> None:
    shards, contents = put(nginx, 6)
    digests = digests_of(contents)
    cache = ShardCache(tmp_path / "cache", 200_000)
    children = [started(_fetch_some, cache, shards, digests, number) for number in range(3)]
    most = 0
    while any(child.is_alive() for child in children):
        most = max(most, bytes_held(cache))
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert 150_000 <= sum(path.stat().st_size for path in files(cache)) <= 200_000
    assert most <= 200_000


def bytes_held(cache: ShardCache) -> int:
    """Return the size of all shards and partial files, with the lock held."""
    lock = FileLock(cache.folder / "lock")
    cache.folder.mkdir(exist_ok=True)
    while not lock.try_acquire():
        time.sleep(0.001)
    sizes: dict[str, int] = {}  # by stem, as a partial file may become a shard meanwhile
    for path in [*files(cache, "part"), *files(cache)]:
        with suppress(FileNotFoundError):
            sizes[path.stem] = path.stat().st_size
    lock.release()
    return sum(sizes.values())


def _fetch_some(cache: ShardCache, shards: list[ShardFile], digests: list[str], seed: int) -> None:
    for step in range(12):
        number = (step * 5 + seed * 2) % len(shards)
        while True:
            try:  # another process may remove the file before it is opened
                data = cache.fetch(shards[number]).read_bytes()
                break
            except FileNotFoundError:
                pass
        assert hashlib.sha256(data).hexdigest() == digests[number]


def test_download_of_a_killed_process_is_taken_over(nginx: Nginx, tmp_path: Path) -> None:
    [shard, other], contents = put(nginx, 2, size=2 << 20, of="slow/")
    digest = hashlib.sha256(contents[0]).hexdigest()
    cache = ShardCache(tmp_path / "cache", 4 << 20)
    first = started(_fetch_all, cache, [shard], [digest])
    until(lambda: bool(files(cache, "part")))
    [part] = files(cache, "part")
    until(lambda: part.stat().st_blocks > 0)  # part of the shard has arrived
    assert part.stat().st_size == 2 << 20  # disk space is reserved at the beginning
    waits = started(_fetch_all, cache, [shard], [digest])
    time.sleep(0.1)
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    waits.join(20)
    assert waits.exitcode == 0 and cache.fetch(shard).read_bytes() == contents[0]
    # a partial file of a killed process does not occupy space forever
    third = started(_fetch_all, cache, [other], [digest])
    until(lambda: bool(files(cache, "part")))
    assert third.pid is not None
    os.kill(third.pid, signal.SIGKILL)
    third.join(5)
    [again], _ = put(nginx, 1, size=4 << 20)
    assert cache.fetch(again).stat().st_size == 4 << 20
    assert files(cache, "part") == [] and len(files(cache)) == 1


def _fail_to_fetch(cache: ShardCache, shard: ShardFile) -> None:
    assert "gave up after" in error_of(lambda: cache.fetch(shard))


def test_waiting_processes_do_not_repeat_all_retries(nginx: Nginx, tmp_path: Path) -> None:
    [shard], _ = put(nginx, 1)
    nginx.busy(True)
    cache = ShardCache(tmp_path / "cache", LARGE)
    children = [started(_fail_to_fetch, cache, shard) for _ in range(4)]
    for child in children:
        child.join(30)
    assert [child.exitcode for child in children] == [0] * 4
    assert len([request for request in nginx.requests() if request.status == 503]) <= 16  # not 32
    nginx.busy(False)
    cache.fetch(shard)


def _hold(path: Path, ready: Any) -> None:
    assert FileLock(path).try_acquire()
    ready.set()
    time.sleep(60)


def test_stalled_download_of_another_process_raises_error(
    nginx: Nginx, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [shard], _ = put(nginx, 1)
    cache = ShardCache(tmp_path / "cache", LARGE)
    path = cache.fetch(shard)
    path.unlink()
    ready = multiprocessing.get_context("fork").Event()
    child = started(_hold, path.with_suffix(".lock"), ready)
    assert ready.wait(10)
    monkeypatch.setattr(shard_cache, "STILL_SECONDS", 0.2)
    assert "without progress" in error_of(lambda: cache.fetch(shard))
    child.kill()
    child.join()
    assert cache.fetch(shard) == path
