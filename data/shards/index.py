"""The index of a shard: where each sample's members lie inside a plain tar.

A scan reads the headers only, so that a sample can later be read by one ``pread``. Members belong to one sample
while their key (the path up to the first dot of the file name) stays the same, which is the WebDataset rule. An
index is kept in the cache folder, never beside the data, under the shard's full name, size and version. That of a
truncated shard holds the samples of its intact part, where these are wanted, and is kept apart.
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
from clipkit.files.atomic import write_atomic
from clipkit.files.patterns import IMAGE_EXTENSIONS
from clipkit.files.tar import TruncatedError, sample_name, tar_files
from clipkit.files.terminal import printable
from data.remote.cache import cache_folder
from data.remote.store import ShardFile

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
# Small files of arrays: a checksum and a line of JSON that says what follows, then arrays as they lie in
# memory.
#
# They are mapped, not read, so that many processes share one copy and only what is looked at takes memory;
# opening one costs a tenth of what opening an ``npz`` does. Whatever is wrong with a file, it counts as not
# there: all that is kept so can be made again.

_ALIGNMENT = 64
_KINDS = ("<u1", "<u2", "<u4", "<u8", "<i8")
_CHECK = 8  # hexadecimal digits of the checksum of all that follows, which the file begins with


@dataclass(frozen=True, kw_only=True, eq=False)
class Strings:
    """Many texts in two arrays, at the cost of their bytes.

    Attributes:
        content: uint8, the texts in UTF-8, one after the other.
        ends: (N,) int64 or uint32, where each ends.
    """

    content: npt.NDArray[np.uint8]
    ends: npt.NDArray[Any]

    @classmethod
    def of(cls, texts: Sequence[str]) -> "Strings":
        """Pack texts; what UTF-8 cannot hold (bytes of file names) is kept as Python's file names do."""
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
        for end in (
            self.ends.tolist()
        ):  # numbers of Python's own: an array gives them one by one at ten times the cost
            yield os.fsdecode(content[start:end])
            start = end


def pack_arrays(about: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """``about`` (what JSON can hold) and arrays of unsigned or 64-bit integers as bytes."""
    contents = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    shapes = {name: [array.dtype.str.replace("|", "<"), *array.shape] for name, array in contents.items()}
    assert all(kind in _KINDS for kind, *_ in shapes.values())
    line = json.dumps([dict(about), shapes], separators=(",", ":")).encode()
    line += b" " * (-(_CHECK + len(line) + 1) % _ALIGNMENT) + b"\n"
    checked = b"".join([line, *(_padded(array.tobytes()) for array in contents.values())])
    return b"%08x" % zlib.crc32(checked) + checked


def unpack_arrays(
    content: bytes | mmap.mmap,
) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]] | None:
    """What ``pack_arrays`` was given, the arrays read-only and in place; None if these are no such bytes."""
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


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % _ALIGNMENT)


def write_arrays(path: Path, about: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Store the same in a file, atomically.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, pack_arrays(about, arrays))


def read_arrays(path: Path) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]] | None:
    """What ``write_arrays`` stored; None where there is no such file, or no whole one."""
    with suppress(OSError, ValueError), path.open("rb") as file:
        return unpack_arrays(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    return None


# --------------------------------------------------------------------------------------------------------------

IMAGE, CAPTION, LABEL, META = range(4)  # columns of ShardIndex.spans
_COLUMN = {**dict.fromkeys(IMAGE_EXTENSIONS, IMAGE), "txt": CAPTION, "cls": LABEL, "json": META}
_NOTHING = (0, 0, 0, 0)
_BLOCK = 512  # bytes; all data of a tar begin at a multiple of it
_MOST = 2**32 - 1
_MOST_EXTENSIONS = 1000  # that are told; where file names have dots, there may be as many as members
_LONGEST = 40  # characters of one that are told
# bytes at the end of a picture, caption, label and json that count for the digest of the content
_MOST_CONTENT = np.array((1 << 10, 64 << 10, 64 << 10, 64 << 10), dtype=np.int64)
# their images may end alike (uncompressed, or metadata at the end): 512 bytes at each quarter count too
_ENDING_ALIKE = {"bmp", "ppm", "pgm", "tif", "tiff", "webp"}
_VERSION = 6  # of the stored form; raise it when the scan or the arrays change


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardIndex:
    """The samples of one shard in file order.

    Attributes:
        blocks: (N, 4) uint32, where the data of each sample's picture, caption, label and json begin, in blocks
            of 512 bytes; 0 where a sample has none.
        sizes: (N, 4) uint32, their bytes.
        key_ends: (N,) uint32, where each key ends in ``key_bytes``.
        key_bytes: uint8, the WebDataset keys in UTF-8, one after the other.
        extensions: how many members had which extension, of the most frequent ones.
        digest: 16 hexadecimal digits that change with any of these.
        truncated: why the shard is truncated, so that only its intact part is indexed; empty for a whole shard.
        content: 16 hexadecimal digits that change with the captions, labels and json (their last 64 KiB) and the
            images (their last KiB, where compressed data lie, and three more pieces for formats of which that
            says little); empty where the shard was not read.
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
        """The key of a sample."""
        start = self._key_ends[row - 1] if row else 0
        return str(self._key_bytes[start : self._key_ends[row]], "utf-8", "replace")

    def is_same(self, other: "ShardIndex") -> bool:
        """Whether both are of the same samples, as far as is known of their content."""
        known = bool(self.content and other.content)
        return self.digest == other.digest and (not known or self.content == other.content)

    def has(self) -> npt.NDArray[np.bool_]:
        """(N, 4) which of the members each sample has."""
        has: npt.NDArray[np.bool_] = self.blocks > 0
        return has

    def span(self, row: int, column: int) -> tuple[int, int]:
        """Byte offset and size of a sample's picture, caption, label or json; (0, 0) where there is none."""
        return self._blocks[row, column] * _BLOCK, self._sizes[row, column]

    # views of single numbers take a tenth of the time that arrays take to give one
    @cached_property
    def _blocks(self) -> memoryview:
        return self.blocks.data

    @cached_property
    def _sizes(self) -> memoryview:
        return self.sizes.data

    @cached_property
    def _key_ends(self) -> memoryview:
        return self.key_ends.data

    @cached_property
    def _key_bytes(self) -> memoryview:
        return self.key_bytes.data


def stored_index(shard: ShardFile, *, truncated: str = "error") -> ShardIndex | None:
    """The index of a shard if an earlier scan has left it in the cache folder.

    Args:
        shard: the shard.
        truncated: "error", or "use" to take the index of a truncated shard's intact part, too.
    """
    place = index_place(shard)
    for one in (place, _truncated_place(place)) if truncated == "use" else (place,):
        with suppress(TypeError):
            if (stored := read_arrays(one)) is not None:
                parts: dict[str, Any] = {**stored[0], **stored[1]}
                return ShardIndex(**parts)
    return None


def index_shard(shard: ShardFile, path: Path | None = None, *, truncated: str = "error") -> ShardIndex:
    """The index of a shard, from the cache folder where the same file was scanned before.

    Args:
        shard: what to index.
        path: where its bytes lie on this machine, if not at its own name.
        truncated: as for ``index_of_members``.

    Raises:
        TruncatedError: the file is not whole.
        DataError: it is missing, compressed, or not a tar.
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


def keep_index(shard: ShardFile, index: ShardIndex) -> None:
    """Store an index for the next time; where that is not possible it will be made again."""
    if index.truncated and shard.size < 0:
        return  # a pipe: neither size nor version would tell that it was repaired
    place = index_place(shard)
    about = {name: getattr(index, name) for name in ("extensions", "digest", "content", "truncated")}
    arrays = {name: getattr(index, name) for name in ("blocks", "sizes", "key_ends", "key_bytes")}
    with suppress(OSError):
        write_arrays(_truncated_place(place) if index.truncated else place, about, arrays)


def index_place(shard: ShardFile) -> Path:
    """Where the index of a shard is kept."""
    identity = f"{_VERSION}\n{shard.shown}\n{shard.size}\n{shard.version}"
    digest = hashlib.sha256(os.fsencode(identity)).hexdigest()[:32]
    return cache_folder() / "index" / digest[:2] / f"{digest}.index"


def _truncated_place(place: Path) -> Path:
    return place.with_suffix(".truncated")


def index_of_members(
    shard: str, members: Iterable[tuple[str, int, int]], *, truncated: str = "error"
) -> ShardIndex:
    """The index of a tar's members: name, byte offset of the data, size.

    Args:
        shard: its name in messages.
        members: of the tar, as ``tar_files`` yields them.
        truncated: "error", or "use" to index what precedes the cut of a truncated tar. The last sample there is
            left out if it lacks a member that the sample before it has.

    Raises:
        TruncatedError: the tar is truncated, and "error" was given.
        DataError: a member lies beyond 2 TiB.
    """
    keys: list[str] = []
    # (N, 4) each, flat: a list for each sample would have Python look for garbage again and again
    offsets, sizes = array("q"), array("q")
    seen: dict[str, int] = {}
    first = 0  # of the four places of the sample at hand
    last = None  # its key
    faults: list[str] = []
    for name, offset, size in members if truncated == "error" else _intact(members, faults):
        key, _, extension = name.partition(".")
        if key != last or extension not in _COLUMN:  # else it is plain what it is
            if (found := sample_name(name)) is None:
                continue
            key, extension = found
            if key != last:
                last = key
                keys.append(key)
                first = len(offsets)
                offsets.extend(_NOTHING)
                sizes.extend(_NOTHING)
        seen[extension] = seen.get(extension, 0) + 1
        column = _COLUMN.get(extension)
        if column is not None and not offsets[first + column]:
            offsets[first + column] = offset
            sizes[first + column] = size
    if (
        faults
        and len(keys) > 1
        and any(a and not b for a, b in zip(offsets[-8:-4], offsets[-4:], strict=True))
    ):
        del keys[-1], offsets[-4:], sizes[-4:]
    return _packed(shard, keys, offsets, sizes, _told(seen), truncated="".join(faults))


def _intact(members: Iterable[tuple[str, int, int]], faults: list[str]) -> Iterator[tuple[str, int, int]]:
    """The members before the cut of a truncated tar, which ``faults`` then tells."""
    try:
        yield from members
    except TruncatedError as error:
        faults.append(str(error))


def with_content(index: ShardIndex, path: Path) -> ShardIndex:
    """An index with the digest of the shard's content.

    The bytes that count lie on the pages that a scan of the headers has just read. Times of members do not
    count: a shard that was packed again from the same files is the same.

    Raises:
        OSError: the shard cannot be read.
    """
    there = index.blocks > 0
    lengths = np.minimum(index.sizes, _MOST_CONTENT)[there]  # (M,) of the members, in their order
    ends = (index.blocks.astype(np.int64) * _BLOCK + index.sizes)[there]
    digest = hashlib.sha256()
    with path.open("rb") as file:
        descriptor = file.fileno()
        for start, length in zip((ends - lengths).tolist(), lengths.tolist(), strict=True):
            digest.update(os.pread(descriptor, length, start))
        if _ENDING_ALIKE & index.extensions.keys():
            images = there[:, IMAGE]
            sizes = index.sizes[images, IMAGE].astype(np.int64)
            starts = index.blocks[images, IMAGE].astype(np.int64) * _BLOCK
            for quarter in (1, 2, 3):
                places = quarter * sizes // 4
                lengths = np.minimum(sizes - places, _BLOCK)
                for start, length in zip((starts + places).tolist(), lengths.tolist(), strict=True):
                    digest.update(os.pread(descriptor, length, start))
    return replace(index, content=digest.hexdigest()[:16])


def _told(seen: Mapping[str, int]) -> dict[str, int]:
    """The most frequent extensions, as a message can show them."""
    told: Counter[str] = Counter()
    for extension, count in Counter(seen).most_common(_MOST_EXTENSIONS):
        told[printable(extension, _LONGEST)] += count
    return dict(told)


def _packed(
    shard: str,
    keys: list[str],
    offsets: "array[int]",
    sizes: "array[int]",
    extensions: dict[str, int],
    *,
    truncated: str,
) -> ShardIndex:
    encoded = [key.encode("utf-8", "replace") for key in keys]
    blocks = np.array(offsets, dtype=np.int64).reshape(len(keys), 4) // _BLOCK
    if len(keys) and blocks.max() > _MOST:
        raise DataError(f"shard {shard} is larger than 2 TiB: write smaller ones")
    arrays: dict[str, Any] = {
        "blocks": blocks.astype(np.uint32),
        "sizes": np.array(sizes, dtype=np.int64).reshape(len(keys), 4).clip(max=_MOST).astype(np.uint32),
        "key_ends": np.cumsum([len(key) for key in encoded], dtype=np.uint32),
        "key_bytes": np.frombuffer(b"".join(encoded), dtype=np.uint8),
    }
    digest = hashlib.sha256()
    for content in arrays.values():
        digest.update(content.tobytes())
    return ShardIndex(**arrays, extensions=extensions, digest=digest.hexdigest()[:16], truncated=truncated)
