"""Store features by content, so that all tasks and datasets share them.

A table belongs to one model (weights, architecture, preprocessing, dtype) and one kind of input (images, texts). A
row is found by a digest of the image's bytes or of the text.

FOLDER/digests.bin    16 bytes per row
FOLDER/NAME.bin       one file per column, float32, WIDTH numbers per row
FOLDER/sums.bin       per row one CRC-32 per column, columns sorted by name, of folder, column, digest and values
FOLDER/rows/KEY.bin   the rows of a split, once all its images are encoded: a digest of KEY and of these
                      rows' digests, then the row numbers as int64
FOLDER/writer         the lock of the process that appends

Columns are written and synced before their digests, so the number of digests is the number of rows, and the next
writer overwrites what a killed process left behind. Several processes may read and append at the same time.

Any file may be deleted, truncated, swapped or overwritten at any time. Row numbers are used only if the rows still
have the digests that they were stored with, and values only if their CRC-32 matches; otherwise the images are
looked up again, or the table is rejected. No score is computed from another image's rows. If a table cannot be
written, new rows stay in memory.

Letters: N requested rows, T rows of the table, W the width of a column.
"""

import hashlib
import mmap
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clipkit.errors import DataError
from clipkit.files import FileLock, replacing, write_atomic

__all__ = ["DIGEST_BYTES", "PIECE", "FeatureTable", "chosen_rows", "digest_of", "map_rows", "release"]


# --------------------------------------------------------------------------------------------------------------
# Rows mapped from a file.
#
# Pages of a mapped file count as a process's memory until they are reclaimed, so one pass over the features of a
# million images would appear to need memory for all of them. Readers therefore ``release`` rows after reading them.

PIECE = 8 << 20  # bytes of rows between two releases; scattered rows may touch 16 times as much
_MAX_COPY = 64 << 20  # bytes of scattered rows to copy into memory; larger copies go to an unnamed file
_NUMBER_BYTES = 4  # of float32 and of CRC-32

_maps: WeakValueDictionary[int, mmap.mmap] = WeakValueDictionary()  # maps in use, by address


def map_rows(file: IO[bytes], rows: int, width: int) -> Tensor:
    """Map the first rows of a file of float32 numbers, (T, W); writes to them do not reach the file.

    Raises:
        OSError: the file cannot be mapped.
        ValueError: the file is shorter.
    """
    if not rows * width:
        return torch.empty(rows, width)
    mapped = mmap.mmap(file.fileno(), rows * width * _NUMBER_BYTES, access=mmap.ACCESS_COPY)
    table = torch.frombuffer(mapped, dtype=torch.float32).view(rows, width)
    _maps[table.data_ptr()] = mapped
    return table


def release(rows: Tensor) -> None:
    """Free the memory of mapped rows, which stay usable; does nothing for other tensors.

    Args:
        rows: a slice of a tensor from ``map_rows``.
    """
    begin = rows.untyped_storage().data_ptr()
    mapped = _maps.get(begin)
    if mapped is None or not hasattr(mmap, "MADV_DONTNEED"):
        return
    start = (rows.data_ptr() - begin) // mmap.PAGESIZE * mmap.PAGESIZE
    length = rows.data_ptr() - begin + rows.nbytes - start
    if length > 0:
        mapped.madvise(mmap.MADV_DONTNEED, start, length)


def chosen_rows(table: Tensor, rows: npt.NDArray[np.int64], folder: Path | None = None) -> Tensor:
    """Return rows of a table in any order, (N, W): a view if they are consecutive, else a copy.

    Args:
        table: (T, W) float32, perhaps from ``map_rows``.
        rows: (N,).
        folder: the folder for a large copy, in an unnamed file; None for memory.

    Raises:
        OSError: the copy cannot be written.
    """
    if len(rows) and bool((np.diff(rows) == 1).all()):
        return table[int(rows[0]) : int(rows[-1]) + 1]
    wanted = torch.from_numpy(rows)
    width = table.shape[1]
    if folder is None or len(rows) * width * _NUMBER_BYTES <= _MAX_COPY:
        copy = table[wanted]
        release(table)
        return copy
    with tempfile.TemporaryFile(dir=folder) as file:
        for piece in wanted.split(max(1, PIECE // (width * _NUMBER_BYTES))):
            file.write(table[piece].numpy().tobytes())
            release(table)
        file.flush()
        return map_rows(file, len(rows), width)


# --------------------------------------------------------------------------------------------------------------

DIGEST_BYTES = 16
_LOCK_WAIT = 0.02  # seconds between attempts to take the lock


def digest_of(content: bytes) -> bytes:
    """Return the 16-byte BLAKE2b digest of an image's or a text's bytes."""
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


class FeatureTable:
    """Rows of features by digest, in a folder or in memory.

    Args:
        folder: the table's folder; None keeps it in memory. Its name and its parent's are part of the checksums, so
            that files of different tables cannot be confused.
        widths: the width of each column.
        on_unwritable: called with the error when the folder cannot be written; rows then stay in memory.

    Raises:
        DataError: the folder cannot be read.
    """

    def __init__(
        self,
        folder: Path | None,
        widths: Mapping[str, int],
        *,
        on_unwritable: Callable[[OSError], None] = lambda error: None,
    ) -> None:
        self.folder, self.widths = folder, dict(widths)
        self._digests: list[bytes] = []  # by row
        self._number: dict[bytes, int] = {}  # the row, by digest
        self._kept = 0  # rows on disk; those after them are in memory
        self._memory: dict[str, list[npt.NDArray[np.float32]]] = {name: [] for name in widths}
        self._rows: dict[str, npt.NDArray[np.int64]] = {}
        self._names = sorted(self.widths)
        self._writable, self._on_unwritable = folder is not None, on_unwritable
        if folder is not None:
            with self._writing():
                (folder / "rows").mkdir(parents=True, exist_ok=True)
            self.refresh()

    def __len__(self) -> int:
        return len(self._digests)

    def refresh(self) -> None:
        """Read the rows that other processes have appended.

        Raises:
            DataError: the table is damaged, was removed, or cannot be read.
        """
        if self.folder is None or self._kept < len(self._digests):
            return
        with self._reading():
            count = self._whole_rows()
            if count < self._kept:
                raise self._removed()
            if count == self._kept:
                return
            with self._file("digests").open("rb") as file:
                file.seek(self._kept * DIGEST_BYTES)
                added = file.read((count - self._kept) * DIGEST_BYTES)
        self._add_digests([added[i : i + DIGEST_BYTES] for i in range(0, len(added), DIGEST_BYTES)])
        if len(self._number) != count:  # no writer stores a digest twice
            raise self._damaged()
        self._kept = count

    def _add_digests(self, digests: Sequence[bytes]) -> None:
        self._number.update({digest: len(self._digests) + i for i, digest in enumerate(digests)})
        self._digests += digests

    def find(self, digest: bytes) -> int | None:
        """Return the row of a digest, or None."""
        return self._number.get(digest)

    def append(self, digests: Sequence[bytes], columns: Mapping[str, Tensor]) -> None:
        """Add rows, synced to disk, without digests that have a row already.

        Args:
            digests: N digests.
            columns: (N, W) float32 by name.

        Raises:
            DataError: the table was removed or damaged meanwhile.
        """
        assert set(columns) == set(self.widths)
        arrays = {name: np.ascontiguousarray(one.cpu().numpy(), np.float32) for name, one in columns.items()}
        for name, width in self.widths.items():
            assert arrays[name].shape == (len(digests), width), (name, arrays[name].shape)
        if self._writable and self.folder is not None:
            lock = FileLock(self.folder / "writer")
            with self._writing():
                while not lock.try_acquire():
                    time.sleep(_LOCK_WAIT)
                try:
                    self.refresh()
                    self._add(digests, arrays)
                finally:
                    lock.release()
                return
        self._add(digests, arrays)

    def _add(self, digests: Sequence[bytes], arrays: Mapping[str, npt.NDArray[np.float32]]) -> None:
        new = {digest: place for place, digest in enumerate(digests) if digest not in self._number}
        places = sorted(new.values())
        if not places:
            return
        start, added = len(self._digests), [digests[place] for place in places]
        arrays = {name: array[places] for name, array in arrays.items()}
        if self._writable:
            sums = [self._sums(name, arrays[name], range(len(added)), added) for name in self._names]
            for name, array in arrays.items():
                _write(self._file(name), start * self.widths[name] * _NUMBER_BYTES, array.tobytes())
            _write(self._file("sums"), start * len(sums) * _NUMBER_BYTES, np.stack(sums, axis=1).tobytes())
            _write(self._file("digests"), start * DIGEST_BYTES, b"".join(added))
            self._kept += len(added)
        else:
            for name, array in arrays.items():
                self._memory[name].append(array)
        self._add_digests(added)

    def column(self, name: str, rows: npt.NDArray[np.int64]) -> Tensor:
        """Return N rows of a column, (N, W) float32, memory-mapped if they are consecutive on disk or many.

        Raises:
            DataError: the table is damaged, or was removed meanwhile.
        """
        on_disk = rows < self._kept
        if len(rows) and on_disk.all():
            return self._mapped(name, rows)
        if len(self._memory[name]) > 1:
            self._memory[name] = [np.concatenate(self._memory[name])]
        whole = self._memory[name][0] if len(rows) else np.empty((0, self.widths[name]), np.float32)
        in_memory = chosen_rows(torch.from_numpy(whole), rows[~on_disk] - self._kept)
        if not on_disk.any():
            return in_memory
        both = torch.empty(len(rows), self.widths[name])
        both[torch.from_numpy(on_disk)] = self._mapped(name, rows[on_disk])
        both[torch.from_numpy(~on_disk)] = in_memory
        return both

    def _mapped(self, name: str, rows: npt.NDArray[np.int64]) -> Tensor:
        with self._reading():
            try:
                if self._whole_rows() < self._kept:
                    raise self._removed()
                with self._file(name).open("rb") as file:
                    whole = map_rows(file, self._kept, self.widths[name])
                shape = self._kept, len(self._names)
                stored = np.memmap(self._file("sums"), np.uint32, mode="r", shape=shape)
            except ValueError:  # the file was truncated
                raise self._removed() from None
            values, sums = whole.numpy(), stored[:, self._names.index(name)]
            step = max(1, PIECE // (self.widths[name] * _NUMBER_BYTES))
            for piece in (rows[start : start + step] for start in range(0, len(rows), step)):
                if not np.array_equal(self._sums(name, values, piece, self.digests(piece)), sums[piece]):
                    raise self._damaged()
                release(whole)
        if self._writable:
            with self._writing():
                return chosen_rows(whole, rows, self.folder)
        return chosen_rows(whole, rows)

    def _sums(
        self,
        name: str,
        values: npt.NDArray[np.float32],
        rows: Iterable[int],
        digests: Iterable[bytes],
    ) -> npt.NDArray[np.uint32]:
        """Return (N,), the CRC-32 of rows of a column's values with their digests and this table's name."""
        assert self.folder is not None
        table = zlib.crc32(f"{self.folder.parent.name}/{self.folder.name}/{name}".encode())
        sums = [
            zlib.crc32(values[row], zlib.crc32(digest, table))
            for row, digest in zip(rows, digests, strict=True)
        ]
        return np.array(sums, dtype=np.uint32)

    def rows_of(self, key: str, count: int) -> npt.NDArray[np.int64] | None:
        """Return the rows stored under a key, (N,); None unless there are ``count`` and the table is unchanged."""
        if key in self._rows or self.folder is None:
            return self._rows.get(key)
        try:
            content = bytearray(self._file(f"rows/{key}").read_bytes())
            rows = np.frombuffer(content[DIGEST_BYTES:], np.int64)
        except (OSError, ValueError):
            return None
        if len(rows) != count or (count and not 0 <= rows.min() <= rows.max() < len(self._digests)):
            return None
        return rows if self._digest_of_rows(key, rows) == content[:DIGEST_BYTES] else None

    def keep_rows(self, key: str, rows: npt.NDArray[np.int64]) -> None:
        """Store the rows of a split of a dataset under a key."""
        if self._writable:
            path = self._file(f"rows/{key}")
            with self._writing():
                data = self._digest_of_rows(key, rows) + rows.astype(np.int64).tobytes()
                write_atomic(path, data, durable=True)
                return
        self._rows[key] = rows

    def _digest_of_rows(self, key: str, rows: npt.NDArray[np.int64]) -> bytes:
        return digest_of(key.encode() + b"".join(self.digests(rows)))

    def digests(self, rows: npt.NDArray[np.int64]) -> list[bytes]:
        """Return the digests of N rows."""
        return [self._digests[row] for row in rows.tolist()]

    def _whole_rows(self) -> int:
        """Return the number of rows that all files have."""
        counts = [_size(self._file("digests")) // DIGEST_BYTES]
        counts.append(_size(self._file("sums")) // (_NUMBER_BYTES * len(self.widths)))
        counts += [_size(self._file(name)) // (width * _NUMBER_BYTES) for name, width in self.widths.items()]
        return min(counts)

    def _file(self, name: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{name}.bin"

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError(
                f"cannot read features in {self.folder}: {error.strerror}; remove that folder, or use another one "
                "with --features"
            ) from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Report that the folder cannot be written; from then on rows stay in memory."""
        try:
            yield
        except OSError as error:
            self._writable = False
            self._on_unwritable(error)

    def _damaged(self) -> DataError:
        return DataError(
            f"the features in {self.folder} are damaged: remove that folder; they will be computed again"
        )

    def _removed(self) -> DataError:
        return DataError(f"features in {self.folder} were removed while in use: run the command again")


def _write(path: Path, start: int, data: bytes) -> None:
    """Replace all bytes of a file from ``start`` on, and sync it; never shorten it in place, since it may be
    mapped."""
    if _size(path) > start:
        with replacing(path) as temporary:
            shutil.copyfile(path, temporary)
            os.truncate(temporary, start)
    with path.open("ab") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _size(path: Path) -> int:
    with suppress(FileNotFoundError):
        return path.stat().st_size
    return 0
