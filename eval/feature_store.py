"""Features on disk, by what they are features of: nothing is encoded a second time, whoever asks.

A table belongs to one model (weights, architecture, preprocessing, number format) and one kind of thing (pictures,
texts). A row is found by a digest of the picture's bytes or of the text, so datasets that share pictures, prompt
sets that share prompts, and a run that was interrupted all share rows.

FOLDER/digests.bin    16 bytes a row
FOLDER/NAME.bin       a file for each column, float32, WIDTH numbers a row
FOLDER/sums.bin       a CRC-32 of each column's part of a row, the columns in the order of their names
FOLDER/rows/KEY.npy   which rows a split of a dataset is made of, once all its pictures are there
FOLDER/writer         the lock of whoever appends

Columns are written and synced before their digests, so the digests say how many rows there are: what a killed
process left behind is cut off by the next. Several processes may read and append at the same time. What is read is
held against its sum, and a table that others cut or removed while it is in use is refused: a score must not come
from rows of something else.

Letters: N things asked for, R rows of the table, W the width of a column.
"""

import hashlib
import os
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clipkit.errors import DataError
from data.remote.node_lock import NodeLock
from eval.mapped_rows import PIECE, chosen_rows, map_rows, release

__all__ = ["DIGEST_BYTES", "FeatureTable", "digest_of"]

DIGEST_BYTES = 16
_WAIT = 0.02  # seconds between two tries to take the lock
_ROW_BYTES = 4
_SUM_BYTES = 4

Digests = npt.NDArray[np.uint8]  # (N, 16)


def digest_of(content: bytes) -> bytes:
    """16 bytes that stand for a picture's or a text's content."""
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


class FeatureTable:
    """Rows of features by digest, in a folder or, without one, in memory.

    Args:
        folder: where the table is or will be; None keeps it in memory.
        widths: of each column, by its name.

    Raises:
        DataError: the folder cannot be made or read.
    """

    def __init__(self, folder: Path | None, widths: Mapping[str, int]) -> None:
        self.folder, self.widths = folder, dict(widths)
        self._number: dict[bytes, int] = {}
        self._memory: dict[str, list[npt.NDArray[np.float32]]] = {name: [] for name in widths}
        self._rows: dict[str, npt.NDArray[np.int64]] = {}
        self._names = sorted(self.widths)
        if folder is not None:
            with _told(folder):
                (folder / "rows").mkdir(parents=True, exist_ok=True)
            self.refresh()

    def __len__(self) -> int:
        return len(self._number)

    def refresh(self) -> None:
        """See what other processes have appended meanwhile."""
        if self.folder is None:
            return
        known = len(self._number)
        with _told(self.folder):
            count = self._whole_rows()
            if count < known:
                raise DataError(
                    f"features in {self.folder} were removed while they were in use: run this again"
                )
            if count == known:
                return
            with self._file("digests").open("rb") as file:
                file.seek(known * DIGEST_BYTES)
                added = file.read((count - known) * DIGEST_BYTES)
        for number in range(len(added) // DIGEST_BYTES):
            self._number[added[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]] = known + number
        if len(self._number) != count:  # a digest stands there twice, as nobody has written it
            raise self._damaged()

    def find(self, digest: bytes) -> int | None:
        """The row of a digest, if it is there."""
        return self._number.get(digest)

    def append(self, digests: Sequence[bytes], columns: Mapping[str, Tensor]) -> None:
        """Add rows, synced to the disk; those that are there already are left out.

        Args:
            digests: N of them.
            columns: each column's (N, W) float32.

        Raises:
            DataError: they cannot be written, or the table was removed meanwhile. It stays as it was.
        """
        assert set(columns) == set(self.widths)
        arrays = {name: np.ascontiguousarray(one.cpu().numpy(), np.float32) for name, one in columns.items()}
        for name, width in self.widths.items():
            assert arrays[name].shape == (len(digests), width), (name, arrays[name].shape)
        if self.folder is None:
            self._add(digests, arrays)
            return
        lock = NodeLock(self.folder / "writer")
        with _told(self.folder):
            while not lock.try_acquire():
                time.sleep(_WAIT)
            try:
                self.refresh()
                self._add(digests, arrays)
            finally:
                lock.release()

    def _add(self, digests: Sequence[bytes], arrays: Mapping[str, npt.NDArray[np.float32]]) -> None:
        new = {digest: place for place, digest in enumerate(digests) if digest not in self._number}
        places = sorted(new.values())
        if not places:
            return
        start = len(self._number)
        for name, array in arrays.items():
            if self.folder is None:
                self._memory[name].append(array[places])
            else:
                _write(self._file(name), start * self.widths[name] * _ROW_BYTES, array[places].tobytes())
        added = [digests[place] for place in places]
        if self.folder is not None:
            sums = np.stack([_sums(arrays[name][places]) for name in self._names], axis=1)  # (R, columns)
            _write(self._file("sums"), start * sums.shape[1] * _SUM_BYTES, sums.tobytes())
            _write(self._file("digests"), start * DIGEST_BYTES, b"".join(added))
        self._number.update({digest: start + number for number, digest in enumerate(added)})

    def column(self, name: str, rows: npt.NDArray[np.int64]) -> Tensor:
        """(N, W) float32 of N rows, mapped from the disk where they are there or are many.

        Raises:
            DataError: the table is damaged, or was removed meanwhile.
        """
        if self.folder is not None and len(rows):
            with _told(self.folder):
                return self._mapped(self.folder, name, rows)
        if len(self._memory[name]) > 1:
            self._memory[name] = [np.concatenate(self._memory[name])]
        whole = self._memory[name][0] if len(rows) else np.empty((0, self.widths[name]), np.float32)
        return chosen_rows(torch.from_numpy(whole), rows)

    def _mapped(self, folder: Path, name: str, rows: npt.NDArray[np.int64]) -> Tensor:
        count, place = len(self._number), self._names.index(name)
        try:
            if self._whole_rows() < count:
                raise ValueError
            with self._file(name).open("rb") as file:
                whole = map_rows(file, count, self.widths[name])
        except ValueError:  # mmap's, of a file that became shorter since
            raise DataError(
                f"features in {folder} were removed while they were in use: run this again"
            ) from None
        sums = np.memmap(self._file("sums"), np.uint32, mode="r", shape=(count, len(self.widths)))
        step = max(1, PIECE // (self.widths[name] * _ROW_BYTES))
        for piece in (rows[start : start + step] for start in range(0, len(rows), step)):
            if not np.array_equal(_sums(whole.numpy(), piece), sums[piece, place]):
                raise self._damaged()
            release(whole)
        return chosen_rows(whole, rows, folder)

    def _damaged(self) -> DataError:
        return DataError(
            f"the features kept in {self.folder} are damaged: remove that folder, they are made again"
        )

    def rows_of(self, key: str, count: int) -> npt.NDArray[np.int64] | None:
        """The (N,) rows kept under a key; None if there are none that this table can have, or not so many."""
        if self.folder is None:
            return self._rows.get(key)
        try:
            rows: npt.NDArray[np.int64] = np.load(self._rows_file(key), allow_pickle=False)
        except (OSError, ValueError, EOFError):
            return None
        if rows.shape != (count,) or rows.dtype != np.int64:
            return None
        if count and not 0 <= int(rows.min()) <= int(rows.max()) < len(self._number):
            return None
        return rows

    def keep_rows(self, key: str, rows: npt.NDArray[np.int64]) -> None:
        """Keep the rows of a split of a dataset under a key.

        Raises:
            DataError: they cannot be written.
        """
        if self.folder is None:
            self._rows[key] = rows
            return
        path = self._rows_file(key)
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        with _told(self.folder):
            try:
                with aside.open("wb") as file:
                    np.save(file, rows.astype(np.int64), allow_pickle=False)
                    file.flush()
                    os.fsync(file.fileno())
                aside.replace(path)
            finally:
                aside.unlink(missing_ok=True)

    def _whole_rows(self) -> int:
        """How many rows are there in full: an index longer than a column would be of a damaged disk."""
        counts = [_size(self._file("digests")) // DIGEST_BYTES]
        counts.append(_size(self._file("sums")) // (_SUM_BYTES * len(self.widths)))
        counts += [_size(self._file(name)) // (width * _ROW_BYTES) for name, width in self.widths.items()]
        return min(counts)

    def _file(self, name: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{name}.bin"

    def _rows_file(self, key: str) -> Path:
        assert self.folder is not None
        return self.folder / "rows" / f"{key}.npy"


def _write(path: Path, start: int, data: bytes) -> None:
    """Put bytes at a place, whatever lies behind it, and onto the disk."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        os.ftruncate(descriptor, start)
        view = memoryview(data)
        while view:
            written = os.pwrite(descriptor, view, start)
            start, view = start + written, view[written:]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sums(
    values: npt.NDArray[np.float32], rows: npt.NDArray[np.int64] | None = None
) -> npt.NDArray[np.uint32]:
    """(N, W) → (N,), the CRC-32 of each row, or of those that are named."""
    numbers = range(len(values)) if rows is None else rows.tolist()
    return np.array([zlib.crc32(values[number]) for number in numbers], dtype=np.uint32)


def _size(path: Path) -> int:
    with suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


@contextmanager
def _told(folder: Path) -> Iterator[None]:
    """What goes wrong with the disk as one line."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot keep features in {folder}: {error.strerror}; name another place with --features, or none "
            "with --features ''"
        ) from error
