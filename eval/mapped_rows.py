"""Tables of numbers mapped from a file, whose memory is given back once it was read.

What is read of a mapped file stays in a process's memory until others need the room, so that one pass over the
features of a million pictures would look as if it took all of them, and where such pages are counted it would. A
pass that reads each row once says ``release`` behind it: the next reader has it from the file again.

Letters in shape comments: T rows of a table, N rows that are asked for, W numbers a row.
"""

import mmap
import tempfile
from pathlib import Path
from typing import IO
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["PIECE", "chosen_rows", "map_rows", "release"]

PIECE = (
    8 << 20
)  # bytes of rows that are worked on between two releases; scattered ones may touch 16 times as much
_COPIED = 64 << 20  # bytes of scattered rows that are copied into memory; more go to a file without a name
_BYTES = 4

_maps: WeakValueDictionary[int, mmap.mmap] = WeakValueDictionary()  # those in use, by where they begin


def map_rows(file: IO[bytes], rows: int, width: int) -> Tensor:
    """The first rows of a file of float32 numbers.

    Returns:
        (T, W) float32. What is written to it stays in memory and may be lost by ``release``; the file is as it was.

    Raises:
        OSError: it cannot be mapped.
        ValueError: it is shorter.
    """
    if not rows * width:
        return torch.empty(rows, width)
    mapped = mmap.mmap(file.fileno(), rows * width * _BYTES, access=mmap.ACCESS_COPY)
    table = torch.frombuffer(mapped, dtype=torch.float32).view(rows, width)
    _maps[table.data_ptr()] = mapped
    return table


def release(rows: Tensor) -> None:
    """Give back the memory of mapped rows that were read; of any other tensor nothing changes.

    Args:
        rows: a slice of what ``map_rows`` gave. It stays good: what is read again comes from the file again.
    """
    begin = rows.untyped_storage().data_ptr()
    mapped = _maps.get(begin)
    if mapped is None or not hasattr(mmap, "MADV_DONTNEED"):
        return
    start = (rows.data_ptr() - begin) // mmap.PAGESIZE * mmap.PAGESIZE  # whose page the rows before have left
    length = rows.data_ptr() - begin + rows.nbytes - start
    if length > 0:
        mapped.madvise(mmap.MADV_DONTNEED, start, length)


def chosen_rows(table: Tensor, rows: npt.NDArray[np.int64], folder: Path | None = None) -> Tensor:
    """Rows of a table in any order: a view where they follow each other there, else a copy.

    Args:
        table: (T, W) float32, perhaps of ``map_rows``.
        rows: (N,).
        folder: where a large copy goes, in a file without a name that ends with its last use; None for memory.

    Returns:
        (N, W) float32.

    Raises:
        OSError: the disk does not take the copy.
    """
    if len(rows) and bool((np.diff(rows) == 1).all()):
        return table[int(rows[0]) : int(rows[-1]) + 1]
    wanted = torch.from_numpy(rows)
    width = table.shape[1]
    if folder is None or len(rows) * width * _BYTES <= _COPIED:
        copy = table[wanted]
        release(table)
        return copy
    with tempfile.TemporaryFile(dir=folder) as file:
        for piece in wanted.split(max(1, PIECE // (width * _BYTES))):
            file.write(table[piece].numpy().tobytes())
            release(table)
        file.flush()
        return map_rows(file, len(rows), width)
