"""Store features in safetensors files, so that all tasks share them.

FOLDER/images/STAMP-N.safetensors    the N images of a split; ``blocks`` for the blocks of the image tower
FOLDER/texts/KEY-N.safetensors       N texts that were encoded together

FOLDER belongs to one model (weights, architecture, preprocessing, dtype). A file has an (N, W) float32 tensor for
each kind of feature, ``digests`` (N, 16) of the images' bytes or of the texts, and ``sums`` (N,). The sum of a row
is the CRC-32 of the file's key, the row's digest and its features. A row counts only if its sum is right, so rows
that were not written yet, were damaged, or belong to another file are encoded again and never used.

Letters: N rows, W width of a column.
"""

import hashlib
import json
import mmap
import os
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clipkit.files import replacing

DIGEST_BYTES = 16
_TYPES = {"F32": (torch.float32, 4), "I32": (torch.int32, 4), "U8": (torch.uint8, 1)}
_BLOCK = 8 << 20  # bytes of rows between two releases


def digest_content(content: bytes) -> bytes:
    """Return the 16-byte BLAKE2b digest of an image's or a text's bytes."""
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


# --------------------------------------------------------------------------------------------------------------
# Mapped files.
#
# Pages of a mapped file count as a process's memory until they are reclaimed, so one pass over the features of a
# million images would appear to need memory for all of them. Readers therefore release rows after
# reading them.

_maps: WeakValueDictionary[int, mmap.mmap] = WeakValueDictionary()  # maps in use, by address


def _map_file(path: Path, size: int, access: int) -> Tensor:
    with path.open("rb" if access == mmap.ACCESS_COPY else "r+b") as file:
        mapped = mmap.mmap(file.fileno(), size, access=access)
    data = torch.frombuffer(mapped, dtype=torch.uint8)
    _maps[data.data_ptr()] = mapped
    return data


def release_rows(rows: Tensor) -> None:
    """Free the memory of rows of a mapped file, which stay usable; does nothing for other tensors."""
    begin = rows.untyped_storage().data_ptr()
    mapped = _maps.get(begin)
    if mapped is None or not hasattr(mmap, "MADV_DONTNEED"):
        return
    start = (rows.data_ptr() - begin) // mmap.PAGESIZE * mmap.PAGESIZE
    length = rows.data_ptr() - begin + rows.nbytes - start
    if length > 0:
        mapped.madvise(mmap.MADV_DONTNEED, start, length)


# --------------------------------------------------------------------------------------------------------------


class FeatureFile:
    """N rows of features, in a mapped file or in memory.

    Args:
        path: the file; None for memory.
        widths: the width of each column.
        count: N.
        key: what the rows belong to, part of their sums.
        create: open the file for writing; a file with another layout is replaced. Otherwise it is mapped for
            reading, and ``write`` does not reach the file.

    Attributes:
        columns: the (N, W) float32 features by name.
        digests: (N, 16) uint8.
    """

    def __init__(
        self, path: Path | None, widths: Mapping[str, int], count: int, *, key: str = "", create: bool = False
    ) -> None:
        self._key = zlib.crc32(key.encode())
        types = {name: ("F32", width) for name, width in widths.items()}
        types |= {"sums": ("I32", 1), "digests": ("U8", DIGEST_BYTES)}
        spans: dict[str, tuple[int, int]] = {}
        size = 0
        for name, (kind, width) in types.items():
            spans[name] = (size, size + count * width * _TYPES[kind][1])
            size = spans[name][1]
        header = _safetensors_header(types, spans, count)
        size += len(header)
        if path is None:
            data = torch.zeros(size, dtype=torch.uint8)
        else:
            if create and not _starts_with(path, header, size):
                _create_file(path, header, size)
            if not _starts_with(path, header, size):
                raise OSError(f"{path} is incomplete")
            data = _map_file(path, size, mmap.ACCESS_WRITE if create else mmap.ACCESS_COPY)
        views = {}
        for name, (kind, width) in types.items():
            begin, end = spans[name]
            values = data[len(header) + begin : len(header) + end]
            views[name] = values.view(_TYPES[kind][0]).view(count, width)
        self._sums: npt.NDArray[np.int32] = views.pop("sums").numpy()[:, 0]
        self.digests: npt.NDArray[np.uint8] = views.pop("digests").numpy()
        self.columns: dict[str, Tensor] = views

    def __len__(self) -> int:
        return len(self.digests)

    def write(
        self, rows: npt.NDArray[np.int64], digests: Sequence[bytes], columns: Mapping[str, Tensor]
    ) -> None:
        """Write M rows: their digests, and their (M, W) features by name."""
        for name, values in columns.items():
            self.columns[name][torch.from_numpy(rows)] = values
        self.digests[rows] = np.frombuffer(b"".join(digests), np.uint8).reshape(len(rows), DIGEST_BYTES)
        self._sums[rows] = self._sum_rows(rows)

    def intact(self, rows: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.bool_]:
        """Return which of M rows, by default of all, were written and are not damaged, (M,)."""
        if rows is None:
            rows = np.arange(len(self))
        intact: npt.NDArray[np.bool_] = self._sum_rows(rows) == self._sums[rows]
        return intact

    def _sum_rows(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        arrays = [self.digests, *(column.numpy() for column in self.columns.values())]
        sums = np.empty(len(rows), np.uint32)
        row_bytes = sum(array.itemsize * array.shape[1] for array in arrays)
        step = max(1, _BLOCK // row_bytes)
        for start in range(0, len(rows), step):
            block = rows[start : start + step]
            for i, row in enumerate(block, start):
                total = self._key
                for array in arrays:
                    total = zlib.crc32(array[row], total)
                sums[i] = total
            for column in self.columns.values():
                release_rows(column[block.min() : block.max() + 1])
        return sums.view(np.int32)


def _safetensors_header(
    types: Mapping[str, tuple[str, int]], spans: Mapping[str, tuple[int, int]], count: int
) -> bytes:
    tensors = {
        name: {"dtype": kind, "shape": [count, width], "data_offsets": spans[name]}
        for name, (kind, width) in types.items()
    }
    text = json.dumps(tensors).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _starts_with(path: Path, header: bytes, size: int) -> bool:
    """Whether a file has this header and size; False without a file."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        return os.fstat(file.fileno()).st_size == size and file.read(len(header)) == header
    return False


def _create_file(path: Path, header: bytes, size: int) -> None:
    # a new file, since another process may have mapped the old one
    with replacing(path) as temporary, temporary.open("xb") as file:
        file.write(header)
        file.flush()
        if hasattr(os, "posix_fallocate"):
            # writing to a map of a file without disk space would kill the process
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            os.truncate(temporary, size)


class TextFeatures:
    """Features of texts by digest; a file for each list of texts that was encoded.

    Args:
        folder: the files' folder; None keeps new features in memory.
        width: D.
        key: the model's part of the sums.
        on_unwritable: called with the error when a file cannot be written; its rows then stay in memory.
    """

    def __init__(
        self, folder: Path | None, width: int, *, key: str, on_unwritable: Callable[[OSError], None]
    ) -> None:
        self._folder, self._key, self._on_unwritable = folder, key, on_unwritable
        self._widths = {"projected": width}
        self._parts: list[Path | FeatureFile] = []
        self._rows: dict[bytes, tuple[int, int]] = {}  # the part and the row
        for path in sorted(folder.glob("*.safetensors")) if folder is not None else ():
            file = self._open(path)
            if file is not None:
                self._add_part(path, [digest.tobytes() for digest in file.digests])

    def _open(self, part: Path | FeatureFile) -> FeatureFile | None:
        if isinstance(part, FeatureFile):
            return part
        count = part.stem.rpartition("-")[2]
        if not count.isdecimal():
            return None
        with suppress(OSError):
            return FeatureFile(part, self._widths, int(count), key=self._key)
        return None

    def _add_part(self, part: Path | FeatureFile, digests: Sequence[bytes]) -> None:
        self._parts.append(part)
        for row, digest in enumerate(digests):
            self._rows[digest] = (len(self._parts) - 1, row)

    def read(self, digests: Sequence[bytes]) -> tuple[Tensor, npt.NDArray[np.bool_]]:
        """Return the features of N texts, (N, D) float32, and which of them are stored, (N,)."""
        features = torch.zeros(len(digests), self._widths["projected"])
        stored = np.zeros(len(digests), np.bool_)
        positions = defaultdict[int, list[int]](list)
        for position, digest in enumerate(digests):
            if digest in self._rows:
                positions[self._rows[digest][0]].append(position)
        for part, chosen in positions.items():
            file = self._open(self._parts[part])
            if file is None:
                continue
            rows = np.array([self._rows[digests[position]][1] for position in chosen])
            same = [
                file.digests[row].tobytes() == digests[position]
                for row, position in zip(rows, chosen, strict=True)
            ]
            usable = file.intact(rows) & np.array(same)
            filled = np.array(chosen)[usable]
            features[torch.from_numpy(filled)] = file.columns["projected"][torch.from_numpy(rows[usable])]
            stored[filled] = True
        return features, stored

    def append(self, digests: Sequence[bytes], features: Tensor) -> None:
        """Store the features of N texts, (N, D) float32."""
        if not digests:
            return
        part: Path | FeatureFile | None = None
        if self._folder is not None:
            name = digest_content(b"".join(digests)).hex()
            path = self._folder / f"{name}-{len(digests)}.safetensors"
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                with replacing(path) as temporary:
                    self._write(temporary, digests, features)
                part = path
            except OSError as error:
                self._on_unwritable(error)
        self._add_part(part or self._write(None, digests, features), digests)

    def _write(self, path: Path | None, digests: Sequence[bytes], features: Tensor) -> FeatureFile:
        file = FeatureFile(path, self._widths, len(digests), key=self._key, create=True)
        file.write(np.arange(len(digests)), digests, {"projected": features})
        return file
