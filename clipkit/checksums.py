"""Whether a file holds what was written: a checksum that takes less time than reading the file from a disk.

It finds what disks, networks and copies do to bytes; whoever means to deceive can make another file of the same.
"""

import os
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

__all__ = ["checksum"]

_PIECE = 16 << 20  # bytes; another size would give other checksums
_READ = 1 << 20  # bytes at a time: what a processor's cache holds is read and summed the fastest
_MOST_THREADS = 8


def checksum(path: Path, *, threads: int = 0) -> str:
    """Eight hexadecimal digits: the CRC-32 of the CRC-32s of each 16 MiB of a file.

    A file is read once by a process, as long as its size, time and place on the disk stay the same.

    Args:
        path: the file.
        threads: that sum pieces at the same time; 0 for one a core, up to 8.

    Raises:
        OSError: it cannot be read.
    """
    status = path.stat()
    threads = threads or min(_MOST_THREADS, os.cpu_count() or 1)
    return _checksum(str(path), status.st_size, status.st_mtime_ns, status.st_ino, threads)


@lru_cache(maxsize=256)
def _checksum(path: str, size: int, changed: int, inode: int, threads: int) -> str:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        starts = range(0, size, _PIECE)
        sums = _each(lambda start: _piece(descriptor, start, min(start + _PIECE, size)), starts, threads)
    finally:
        os.close(descriptor)
    return f"{zlib.crc32(b''.join(one.to_bytes(4, 'little') for one in sums)):08x}"


def _each(sum_of: Callable[[int], int], starts: range, threads: int) -> list[int]:
    if min(threads, len(starts)) < 2:
        return list(map(sum_of, starts))
    with ThreadPoolExecutor(threads, thread_name_prefix="checksum") as pool:
        return list(pool.map(sum_of, starts))


def _piece(descriptor: int, start: int, end: int) -> int:
    buffer, value = memoryview(bytearray(_READ)), 0
    while start < end:
        count = os.preadv(descriptor, [buffer[: end - start]], start)
        if not count:  # it was cut while it was read
            break
        value = zlib.crc32(buffer[:count], value)
        start += count
    return value
