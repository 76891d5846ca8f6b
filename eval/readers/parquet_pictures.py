"""The pictures in columns of parquet files, a row group at a time, never all of them.

Letters in shape comments: N pictures.
"""

import hashlib
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from clipkit.errors import DataError
from data.shards import Sample
from eval.readers.parquet_files import ParquetFiles, reading
from eval.readers.some_pictures import versions_of

__all__ = ["ParquetPictures"]

_KEPT_BYTES = 256 << 20  # of row groups that were read; the last one stays whatever its size
_MAX_GROUP_BYTES = 4 << 30
_MAX_PICTURE_BYTES = 256 << 20


class ParquetPictures:
    """Random access to encoded pictures; reading is safe from several threads, also after a fork.

    Args:
        files: where they are.
        columns: that hold pictures: structs with ``bytes``, or bytes, or lists of one of these.
        cells: (N, 3) int64, of each picture its row, the number of its column, and its place in the list that
            stands there, 0 where none does.

    Attributes:
        group_reads: how many row groups this process has read.
    """

    def __init__(
        self, files: ParquetFiles, columns: Sequence[str], cells: npt.NDArray[np.int64] | None = None
    ) -> None:
        if cells is None:
            rows = np.repeat(np.arange(len(files)), len(columns))
            cells = np.stack(
                [rows, np.tile(np.arange(len(columns)), len(files)), np.zeros_like(rows)], axis=1
            )
        self._files, self._columns, self._cells = files, tuple(columns), cells
        self._groups = [(file, group) for file, own in enumerate(files.groups) for group in range(len(own))]
        self._starts = [0, *accumulate(count for own in files.groups for count in own)]
        self._forget()

    def _forget(self) -> None:
        self._kept: OrderedDict[tuple[int, int], Any] = OrderedDict()  # by group and column, their values
        self._lock, self._reading = Lock(), [Lock() for _ in self._files.files]
        self._process = os.getpid()
        self.group_reads = 0

    def __getstate__(self) -> dict[str, Any]:
        left = ("_kept", "_lock", "_reading")
        return {name: value for name, value in vars(self).items() if name not in left}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()

    def __len__(self) -> int:
        return len(self._cells)

    def locate(self, number: int) -> tuple[str, str]:
        """The file, and the picture's row of the dataset and column."""
        row, column, place = self._cells[number].tolist()
        file = self._groups[self._group_of(row)][0]
        inside = f"[{place}]" if place else ""
        return self._files.files[file].shown, f"row {row}, {self._columns[column]}{inside}"

    def read(self, number: int) -> Sample:
        """One picture.

        Raises:
            DataError: its file cannot be read, or it has none.
        """
        row, column, place = self._cells[number].tolist()
        group = self._group_of(row)
        values = self._values(group, column)
        image = _bytes_of(values[row - self._starts[group]], place)
        file, key = self.locate(number)
        return Sample(
            id=number,
            shard=file,
            key=key,
            image=image,
            caption=None,
            label=None,
            meta={},
            caption_number=0,
        )

    def fingerprint(self) -> str:
        """16 hexadecimal digits that change with the files' sizes and layout, or with which cells are used."""
        digest = hashlib.sha256(repr((self._files.marks, self._columns)).encode())
        digest.update(np.ascontiguousarray(self._cells).tobytes())
        return digest.hexdigest()[:16]

    def stamp(self) -> str:
        """The same, which also changes when a file was written anew."""
        states = versions_of(self._files.files)
        return hashlib.sha256(repr((self.fingerprint(), states)).encode()).hexdigest()[:16]

    def _group_of(self, row: int) -> int:
        return bisect_right(self._starts, row) - 1

    def _values(self, group: int, column: int) -> Any:
        """A column of a row group, read by one thread while others that need it wait."""
        if self._process != os.getpid():  # locks may have been held while we were forked
            self._forget()
        key = (group, column)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        file, within = self._groups[group]
        with self._reading[file]:
            with self._lock:
                if key in self._kept:
                    return self._kept[key]
            values = self._read(file, within, self._columns[column])
            with self._lock:
                self._kept[key] = values
                self.group_reads += 1
                while len(self._kept) > 1 and sum(one.nbytes for one in self._kept.values()) > _KEPT_BYTES:
                    self._kept.popitem(last=False)
        return values

    def _read(self, file: int, group: int, column: str) -> Any:
        from pyarrow import parquet as pq

        shown = self._files.files[file].shown
        with reading(shown), pq.ParquetFile(self._files.path(file)) as opened:
            size = opened.metadata.row_group(group).total_byte_size
            if size > _MAX_GROUP_BYTES:
                raise DataError(f"{shown} has a row group of {size} bytes: write smaller ones")
            values = opened.read_row_group(group, columns=[column], use_threads=False).column(column)
            if len(values) != self._files.groups[file][group]:
                raise DataError(f"{shown} has {len(values)} rows where its footer states another number")
            return values


def _bytes_of(value: Any, place: int) -> bytes:
    """The picture of a cell: pyarrow's scalar of bytes, of a struct with them, or of a list of either."""
    from pyarrow import types

    if not value.is_valid:
        raise DataError("there is no picture")
    if types.is_list(value.type) or types.is_large_list(value.type) or types.is_fixed_size_list(value.type):
        if not 0 <= place < len(value.values):
            raise DataError(f"there are {len(value.values)} pictures, none is number {place}")
        value = value.values[place]
    if types.is_struct(value.type):
        names = [field.name for field in value.type]
        if "bytes" not in names or not value["bytes"].is_valid:
            raise DataError("it holds no picture, only where one was: write the set with its pictures in it")
        value = value["bytes"]
    if not value.is_valid or not (types.is_binary(value.type) or types.is_large_binary(value.type)):
        raise DataError(f"it holds {value.type if value.is_valid else 'nothing'}, no bytes of a picture")
    if value.as_buffer().size > _MAX_PICTURE_BYTES:
        raise DataError(
            f"a picture of {value.as_buffer().size} bytes is over the limit of {_MAX_PICTURE_BYTES}"
        )
    return bytes(value.as_py())
