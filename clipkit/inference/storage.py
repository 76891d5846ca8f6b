"""How embeddings are stored in .npy files: float32, float16, int8, or one bit per element; and the digest of a row.

A stored row stands for the unit vector in its direction. Every row has its own scale, which is implied by its norm,
so that files need nothing besides their rows, and rows can be added without changing others:

    float32, float16    (N, O), unit norm up to rounding
    int8                (N, O); the largest absolute value of each row is 127
    binary              (N, O / 8) uint8, 8 signs per byte as ``numpy.packbits`` packs them; 1 is positive

Dimensions: N rows, O embedding dimension, S sampled rows, Q queries.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from clipkit.errors import ConfigError, DataError

Rows = npt.NDArray[np.float32]
Stored = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Storage:
    """A storage type.

    Attributes:
        pack: (N, O) float32, unit norm → the stored rows.
        numbers: stored rows → (N, O) float32, up to a positive factor for each row; may be the stored rows.
        unit: whether ``numbers`` have unit norm, up to rounding.
        packed: number of elements in an element of the file.
    """

    dtype: npt.DTypeLike
    pack: Callable[[Rows], Stored]
    numbers: Callable[[Stored], Rows]
    unit: bool = True
    packed: int = 1

    def check(self, width: int) -> None:
        """Check that embeddings of dimension ``width`` can be stored."""
        if width % self.packed:
            raise ConfigError(
                f"embeddings of dimension {width} cannot be stored with {self.packed} elements in a byte: use a "
                f"multiple of {self.packed} for --dim, or another --dtype"
            )


def _int8(rows: Rows) -> Stored:
    largest = np.abs(rows).max(axis=1, keepdims=True, initial=1e-9)
    return np.asarray(np.rint(rows * (127 / largest)), dtype=np.int8)


def _signs(bits: Stored) -> Rows:
    signs = np.unpackbits(bits, axis=1).view(np.int8)
    signs *= 2
    signs -= 1
    return signs.astype(np.float32)


def _as_float32(rows: Stored) -> Rows:
    return rows.astype(np.float32)


STORAGE = {
    "float32": Storage(dtype=np.float32, pack=_as_float32, numbers=lambda rows: rows),
    "float16": Storage(dtype=np.float16, pack=lambda rows: rows.astype(np.float16), numbers=_as_float32),
    "int8": Storage(dtype=np.int8, pack=_int8, numbers=_as_float32, unit=False),
    "binary": Storage(
        dtype=np.uint8, pack=lambda rows: np.packbits(rows > 0, axis=1), numbers=_signs, unit=False, packed=8
    ),
}


def storage_of(rows: Stored) -> Storage:
    """Return the storage type of an array."""
    for storage in STORAGE.values():
        if rows.ndim == 2 and rows.shape[1] and rows.dtype == storage.dtype:
            return storage
    dtypes = ", ".join(np.dtype(storage_type.dtype).name for storage_type in STORAGE.values())
    raise DataError(f"an array of {rows.dtype} of shape {rows.shape}: expected rows of {dtypes}")


def unpacked(rows: Stored) -> Rows:
    """Return stored rows as (N, O) float32 of unit norm, NaN for zero rows; float32 and float16 as stored.

    Rows in float32 may be returned themselves, without a copy.
    """
    storage = storage_of(rows)
    floats = storage.numbers(rows)
    with np.errstate(invalid="ignore"):
        return floats if storage.unit else floats / np.linalg.norm(floats, axis=1, keepdims=True)


class ReusableRows:
    """Rows of outdated embedding files, by the ``content_digest`` of the images that they were computed from.

    Each file ``NAME.npy`` has the digests of its rows in the column digest of ``NAME.parquet``. Several threads may
    call ``find`` and ``read``, also during ``refresh``.

    Args:
        folder: the folder of these files, which need not exist.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names = set[str]()
        self._arrays: list[Stored] = []
        self._ends: list[int] = []  # number of rows up to the end of each array
        self._digests: list[npt.NDArray[np.uint64]] = []
        self._sorted = np.zeros(0, np.uint64), np.zeros(0, np.int64)  # digests and their rows

    def refresh(self) -> None:
        """Open files that were added since. Files without as many digests as rows are left out."""
        import pyarrow.parquet

        names = {path.stem for path in self._folder.glob("*.parquet")} - self._names
        for name in sorted(names):
            try:
                array = np.load(self._folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
                table = pyarrow.parquet.read_table(self._folder / f"{name}.parquet", columns=["digest"])
                texts = table["digest"].to_pylist()
                digests = np.array([int(text, 16) for text in texts], np.uint64)
            except (OSError, ValueError, KeyError, TypeError, pyarrow.ArrowException):
                continue
            if len(array) == len(digests):
                self._arrays.append(array)
                self._ends.append(len(array) + (self._ends[-1] if self._ends else 0))
                self._digests.append(digests)
        if names:
            self._names |= names
            digests = np.concatenate([np.zeros(0, np.uint64), *self._digests])
            order = np.argsort(digests, kind="stable")
            self._sorted = digests[order], order

    def find(self, digest: str) -> int | None:
        """Return the number of a row that was computed from this content; None if there is none."""
        digests, rows = self._sorted
        value = np.uint64(int(digest, 16))
        index = int(digests.searchsorted(value))
        return int(rows[index]) if index < len(digests) and digests[index] == value else None

    def read(self, numbers: Sequence[int]) -> Rows:
        """Return rows by their numbers, (N, O) float32; ``Storage.pack`` turns them into the stored rows."""
        stored = []
        for row in numbers:
            file = bisect_right(self._ends, row)
            stored.append(self._arrays[file][row - self._ends[file]])
        rows = np.stack(stored)
        return storage_of(rows).numbers(rows)


def recall(rows: Rows, stored: Rows, *, k: int = 10, queries: int = 500) -> float:
    """Return how many of the k nearest rows by ``rows`` are among the k nearest by ``stored``, 0 to 1.

    Queries are rows in float32, evenly spaced; a query is not its own neighbor. Rows as near as the k-th count.

    Args:
        rows: (S, O), unit norm, more than k.
        stored: (S, P), the same rows as they are stored, see ``unpacked``; with P < O, prefixes of them.
    """
    assert len(rows) == len(stored) > k
    sampled = np.unique(np.linspace(0, len(rows) - 1, queries).astype(np.int64))
    prefixes = rows[sampled, : stored.shape[1]]
    prefixes = prefixes / np.maximum(np.linalg.norm(prefixes, axis=1, keepdims=True), 1e-12)
    # (Q, S)
    exact = rows[sampled] @ rows.T
    approximate = prefixes @ stored.T
    for scores in (exact, approximate):
        scores[np.arange(len(sampled)), sampled] = -np.inf
    least = -np.partition(-exact, k - 1, axis=1)[:, k - 1 : k]  # (Q, 1)
    nearest = np.argpartition(-approximate, k - 1, axis=1)[:, :k]
    return float((np.take_along_axis(exact, nearest, axis=1) >= least - 1e-6).mean())


def content_digest(content: bytes) -> str:
    """Return the first 64 bits of the SHA-256 of an image file or of a text in UTF-8, as 16 hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()[:16]
