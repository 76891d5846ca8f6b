"""The index of a shard: the positions of each sample's members in an uncompressed tar.

A scan reads the headers only; afterwards each sample is read by one ``pread``. Consecutive members with the
same key (the path up to the first dot of the file name) form a sample, as in WebDataset. Indexes are stored in
the cache folder, never next to the data, named by the shard's full name, size and version. The index of a
truncated shard contains the samples of its intact part and is stored separately.
"""

import hashlib
import json
import math
import mmap
import os
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from clipkit.errors import DataError
from clipkit.files import printable, write_atomic
from clipkit.samples.image_types import IMAGE_EXTENSIONS
from clipkit.samples.remote.cache import cache_folder
from clipkit.samples.remote.store import ShardFile
from clipkit.samples.tar import TruncatedError, sample_name, tar_files

__all__ = [
    "CAPTION",
    "IMAGE",
    "LABEL",
    "META",
    "ShardIndex",
    "Strings",
    "index_of_members",
    "index_place",
    "index_shard",
    "keep_index",
    "pack_arrays",
    "read_arrays",
    "stored_index",
    "unpack_arrays",
    "with_content",
    "write_arrays",
]


# --------------------------------------------------------------------------------------------------------------
# Small files of arrays: a checksum, a line of JSON that describes the content, and the arrays as they are in
# memory. They are memory-mapped, so many processes share one copy; opening one takes a tenth of the time of an
# ``npz``. A damaged file counts as missing, because everything stored this way can be recreated.

_ALIGNMENT = 64
_KINDS = ("<u1", "<u2", "<u4", "<u8", "<i8")
_CHECK = 8  # hexadecimal digits of the checksum of everything after it, at the start of the file


@dataclass(frozen=True, kw_only=True, eq=False)
class Strings:
    """Many texts in two arrays.

    Attributes:
        content: uint8, the concatenated texts in UTF-8.
        ends: (N,) int64 or uint32, where each text ends.
    """

    content: npt.NDArray[np.uint8]
    ends: npt.NDArray[Any]

    @classmethod
    def of(cls, texts: Sequence[str]) -> "Strings":
        """Pack texts; bytes of file names that are not UTF-8 are preserved."""
        encoded = [os.fsencode(text) for text in texts]
        return cls(
            content=np.frombuffer(b"".join(encoded), dtype=np.uint8),
            ends=np.cumsum([len(text) for text in encoded], dtype=np.int64),
        )

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, number: int) -> str:
        start = int(self.ends[number - 1]) if number else 0
        return os.fsdecode(bytes(self.content[start : int(self.ends[number])]))

    def __iter__(self) -> Iterator[str]:
        content, start = self.content.tobytes(), 0
        for end in self.ends.tolist():  # ten times faster than iterating over the array
            yield os.fsdecode(content[start:end])
            start = end


def pack_arrays(about: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """Encode ``about`` (JSON) and arrays of unsigned or 64-bit integers."""
    contents = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    shapes = {name: [array.dtype.str.replace("|", "<"), *array.shape] for name, array in contents.items()}
    assert all(kind in _KINDS for kind, *_ in shapes.values())
    line = json.dumps([dict(about), shapes], separators=(",", ":")).encode()
    line += b" " * (-(_CHECK + len(line) + 1) % _ALIGNMENT) + b"\n"
    padded = (
        data + b"\0" * (-len(data) % _ALIGNMENT) for data in (one.tobytes() for one in contents.values())
    )
    checked = b"".join([line, *padded])
    return b"%08x" % zlib.crc32(checked) + checked


def unpack_arrays(
    content: bytes | mmap.mmap,
) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]] | None:
    """Decode what ``pack_arrays`` encoded, with read-only arrays in place; None if the bytes are invalid."""
    with suppress(ValueError, TypeError, RecursionError, OverflowError):
        if zlib.crc32(memoryview(content)[_CHECK:]) != int(content[:_CHECK], 16):
            return None
        position = content.find(b"\n", _CHECK) + 1
        about, shapes = json.loads(content[_CHECK:position])
        if not (isinstance(about, dict) and isinstance(shapes, dict)):
            return None
        arrays: dict[str, npt.NDArray[Any]] = {}
        for name, (kind, *shape) in shapes.items():
            if kind not in _KINDS or not all(type(side) is int and side >= 0 for side in shape):
                return None
            array = np.frombuffer(content, np.dtype(kind), math.prod(shape), position).reshape(shape)
            position += array.nbytes + -array.nbytes % _ALIGNMENT
            arrays[name] = array
        return about, arrays
    return None


def write_arrays(path: Path, about: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write ``pack_arrays`` to a file atomically; may raise OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, pack_arrays(about, arrays))


def read_arrays(path: Path) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]] | None:
    """Read what ``write_arrays`` wrote; None if the file is missing or damaged."""
    with suppress(OSError, ValueError), path.open("rb") as file:
        return unpack_arrays(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    return None


# --------------------------------------------------------------------------------------------------------------

IMAGE, CAPTION, LABEL, META = range(4)  # columns of ShardIndex.blocks and sizes
_COLUMN = {**dict.fromkeys(IMAGE_EXTENSIONS, IMAGE), "txt": CAPTION, "cls": LABEL, "json": META}
_BLOCK = 512  # bytes; the data of every member start at a multiple of it
_MAX_UINT32 = 2**32 - 1
_MAX_EXTENSIONS = 1000  # counted extensions; with dots in file names there may be as many as members
_MAX_EXTENSION = 40  # characters
# bytes at the end of image, caption, label and json that are included in the content digest
_DIGESTED = np.array((1 << 10, 64 << 10, 64 << 10, 64 << 10), dtype=np.int64)
# different images may end with the same bytes (uncompressed, or metadata at the end): 512 bytes at each
# quarter are also included
_SIMILAR_ENDS = {"bmp", "ppm", "pgm", "tif", "tiff", "webp"}
_VERSION = 6  # of the file format; increase it when the scan or the arrays change


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardIndex:
    """The samples of one shard in file order.

    Attributes:
        blocks: (N, 4) uint32, start of the data of each sample's image, caption, label and json in blocks of 512
            bytes; 0 if missing.
        sizes: (N, 4) uint32, their sizes in bytes.
        key_ends: (N,) uint32, where each key ends in ``key_bytes``.
        key_bytes: uint8, the concatenated WebDataset keys in UTF-8.
        extensions: number of members with each of the most frequent extensions.
        digest: 16 hexadecimal digits that change with any of these.
        content: 16 hexadecimal digits that change with the captions, labels and json (their last 64 KiB) and the
            images (their last KiB, and three more pieces of some formats); empty if the shard was not read.
        truncated: why the shard is truncated, so that only its intact part is indexed; empty for a complete shard.
    """

    blocks: npt.NDArray[np.uint32]
    sizes: npt.NDArray[np.uint32]
    key_ends: npt.NDArray[np.uint32]
    key_bytes: npt.NDArray[np.uint8]
    extensions: dict[str, int]
    digest: str
    content: str = ""
    truncated: str = ""

    def __len__(self) -> int:
        return len(self.key_ends)

    def key(self, row: int) -> str:
        """Return the key of a sample."""
        _, _, key_ends, key_bytes = self._views
        start = key_ends[row - 1] if row else 0
        return str(key_bytes[start : key_ends[row]], "utf-8", "replace")

    def is_same(self, other: "ShardIndex") -> bool:
        """Whether both have the same samples, as far as their content is known."""
        known = bool(self.content and other.content)
        return self.digest == other.digest and (not known or self.content == other.content)

    def has(self) -> npt.NDArray[np.bool_]:
        """Return which members each sample has, (N, 4)."""
        has: npt.NDArray[np.bool_] = self.blocks > 0
        return has

    def span(self, row: int, column: int) -> tuple[int, int]:
        """Return byte offset and size of a sample's image, caption, label or json; (0, 0) if missing."""
        blocks, sizes, _, _ = self._views
        return blocks[row, column] * _BLOCK, sizes[row, column]

    @cached_property
    def _views(self) -> tuple[memoryview, memoryview, memoryview, memoryview]:
        # single numbers are read ten times faster from memory views than from arrays
        return self.blocks.data, self.sizes.data, self.key_ends.data, self.key_bytes.data


def index_place(shard: ShardFile) -> Path:
    """Return the path of a shard's stored index; that of a truncated shard has the suffix ``.truncated``."""
    identity = f"{_VERSION}\n{shard.shown}\n{shard.size}\n{shard.version}"
    digest = hashlib.sha256(os.fsencode(identity)).hexdigest()[:32]
    return cache_folder() / "index" / digest[:2] / f"{digest}.index"


def stored_index(shard: ShardFile, *, truncated: str = "error") -> ShardIndex | None:
    """Return the index of a shard from the cache folder, None if it was never scanned.

    Args:
        shard: the shard.
        truncated: "error", or "use" to accept the index of a truncated shard's intact part.
    """
    place = index_place(shard)
    for path in (place, place.with_suffix(".truncated")) if truncated == "use" else (place,):
        with suppress(TypeError):
            if (stored := read_arrays(path)) is not None:
                parts: dict[str, Any] = {**stored[0], **stored[1]}
                return ShardIndex(**parts)
    return None


def keep_index(shard: ShardFile, index: ShardIndex) -> None:
    """Store an index in the cache folder if possible."""
    if index.truncated and shard.size < 0:
        return  # a pipe: neither size nor version would change when it is repaired
    place = index_place(shard)
    about = {name: getattr(index, name) for name in ("extensions", "digest", "content", "truncated")}
    arrays = {name: getattr(index, name) for name in ("blocks", "sizes", "key_ends", "key_bytes")}
    with suppress(OSError):
        write_arrays(place.with_suffix(".truncated") if index.truncated else place, about, arrays)


def index_shard(shard: ShardFile, path: Path | None = None, *, truncated: str = "error") -> ShardIndex:
    """Return the index of a local shard, from the cache folder if it was scanned before.

    Args:
        shard: the shard.
        path: local file with its content; default: its own path.
        truncated: as for ``index_of_members``.

    Raises:
        TruncatedError: the file is truncated.
        DataError: the file is missing, compressed, or not a tar.
    """
    index = stored_index(shard, truncated=truncated)
    if index is not None:
        return index
    try:
        place = path or Path(shard.url)
        members = tar_files(place, called=shard.shown)
        index = with_content(index_of_members(shard.shown, members, truncated=truncated), place)
    except OSError as error:
        raise DataError(f"shard {shard.shown}: {error.strerror}") from error
    keep_index(shard, index)
    return index


def index_of_members(
    shard: str, members: Iterable[tuple[str, int, int]], *, truncated: str = "error"
) -> ShardIndex:
    """Index the members of a tar: name, byte offset of the data, size.

    Args:
        shard: its name in messages.
        members: as ``tar_files`` yields them.
        truncated: "error", or "use" to index the intact part of a truncated tar. Its last sample is dropped if it
            lacks a member that the sample before it has.

    Raises:
        TruncatedError: the tar is truncated, and "error" was given.
        DataError: the shard is larger than 2 TiB.
    """
    keys: list[str] = []
    # (N, 4) each, flat: lists per sample would slow down the garbage collector
    offsets, sizes = array("q"), array("q")
    seen: dict[str, int] = {}
    first = 0  # of the four entries of the current sample
    last = None  # its key
    fault = ""
    try:
        for name, offset, size in members:
            key, _, extension = name.partition(".")
            if key != last or extension not in _COLUMN:  # fast path: otherwise the split above is correct
                if (found := sample_name(name)) is None:
                    continue
                key, extension = found
                if key != last:
                    last = key
                    keys.append(key)
                    first = len(offsets)
                    offsets.extend((0, 0, 0, 0))
                    sizes.extend((0, 0, 0, 0))
            seen[extension] = seen.get(extension, 0) + 1
            column = _COLUMN.get(extension)
            if column is not None and not offsets[first + column]:
                offsets[first + column] = offset
                sizes[first + column] = size
    except TruncatedError as error:
        if truncated == "error":
            raise
        fault = str(error)
        pairs = zip(offsets[-8:-4], offsets[-4:], strict=True) if len(keys) > 1 else ()
        if any(before and not now for before, now in pairs):
            del keys[-1], offsets[-4:], sizes[-4:]

    extensions: Counter[str] = Counter()
    for extension, count in Counter(seen).most_common(_MAX_EXTENSIONS):
        extensions[printable(extension, _MAX_EXTENSION)] += count
    encoded = [key.encode("utf-8", "replace") for key in keys]
    blocks = np.array(offsets, dtype=np.int64).reshape(len(keys), 4) // _BLOCK
    if len(keys) and blocks.max() > _MAX_UINT32:
        raise DataError(f"shard {shard} is larger than 2 TiB: write smaller shards")
    arrays: dict[str, Any] = {
        "blocks": blocks.astype(np.uint32),
        "sizes": np.array(sizes, dtype=np.int64)
        .reshape(len(keys), 4)
        .clip(max=_MAX_UINT32)
        .astype(np.uint32),
        "key_ends": np.cumsum([len(key) for key in encoded], dtype=np.uint32),
        "key_bytes": np.frombuffer(b"".join(encoded), dtype=np.uint8),
    }
    digest = hashlib.sha256()
    for content in arrays.values():
        digest.update(content.tobytes())
    return ShardIndex(**arrays, extensions=dict(extensions), digest=digest.hexdigest()[:16], truncated=fault)


def with_content(index: ShardIndex, path: Path) -> ShardIndex:
    """Return an index with the digest of the shard's content.

    The digested bytes are on pages that a scan of the headers has just read. Modification times of members are not
    included: a shard packed again from the same files has the same digest.

    Raises:
        OSError: the shard cannot be read.
    """
    there = index.blocks > 0
    starts = index.blocks.astype(np.int64) * _BLOCK
    sizes = index.sizes.astype(np.int64)
    lengths = np.minimum(sizes, _DIGESTED)[there]  # (M,) of the members in order
    pieces = [((starts + sizes)[there] - lengths, lengths)]
    if _SIMILAR_ENDS & index.extensions.keys():
        images = there[:, IMAGE]
        for quarter in (1, 2, 3):
            skipped = quarter * sizes[images, IMAGE] // 4
            pieces.append(
                (starts[images, IMAGE] + skipped, np.minimum(sizes[images, IMAGE] - skipped, _BLOCK))
            )
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for begin, length in pieces:
            for one, count in zip(begin.tolist(), length.tolist(), strict=True):
                digest.update(os.pread(file.fileno(), count, one))
    return replace(index, content=digest.hexdigest()[:16])
