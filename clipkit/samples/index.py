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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from clipkit.errors import DataError
from clipkit.files import write_atomic
from clipkit.samples.base import find_image
from clipkit.samples.formats import IMAGE_EXTENSIONS
from clipkit.samples.remote.cache import index_folder
from clipkit.samples.remote.store import ShardFile
from clipkit.samples.tar import TruncatedError, list_tar_files, sample_name

# --------------------------------------------------------------------------------------------------------------
# Small files of arrays: a checksum, a line of JSON that describes the content, and the arrays as they are in
# memory. They are memory-mapped, so many processes share one copy; opening one takes a tenth of the time of an
# ``npz``. A damaged file counts as missing, because everything stored this way can be recreated.

_ALIGNMENT = 64
_KINDS = ("<u1", "<u2", "<u4", "<u8", "<i8", "<f4")
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

    def __getitem__(self, index: int) -> str:
        start = int(self.ends[index - 1]) if index else 0
        return os.fsdecode(bytes(self.content[start : int(self.ends[index])]))

    def __iter__(self) -> Iterator[str]:
        content = self.content.tobytes()
        start = 0
        for end in self.ends.tolist():  # ten times faster than iterating over the array
            yield os.fsdecode(content[start:end])
            start = end


def pack_arrays(about: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """Encode ``about`` (JSON) and arrays of unsigned or 64-bit integers, or of 32-bit floats."""
    contents = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    shapes = {name: [array.dtype.str.replace("|", "<"), *array.shape] for name, array in contents.items()}
    assert all(kind in _KINDS for kind, *_ in shapes.values())
    line = json.dumps([dict(about), shapes], separators=(",", ":")).encode()
    line += b" " * (-(_CHECK + len(line) + 1) % _ALIGNMENT) + b"\n"
    padded = (
        data + b"\0" * (-len(data) % _ALIGNMENT) for data in (array.tobytes() for array in contents.values())
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

_BLOCK = 512  # bytes; the data of every member start at a multiple of it
_MAX_UINT32 = 2**32 - 1
# last extensions of texts, and how many bytes at the end of a text or another member are digested
_TEXTS = {"txt", "json", "cls"}
_DIGESTED_TEXT = 64 << 10
_DIGESTED = 1 << 10
# different images and arrays may end with the same bytes (uncompressed, or metadata at the end): 512 bytes at each
# quarter are also included
_SIMILAR_ENDS = {"bmp", "ppm", "pgm", "tif", "tiff", "webp", "npy"}
_ARRAYS = ("member_ends", "member_names", "member_blocks", "member_sizes", "key_ends", "key_bytes")
INDEX_VERSION = 7  # of the file format; increase it when the scan or the arrays change


# start of a sample's members in the arrays of an index, their names, and their positions by name
Layout = tuple[int, tuple[str, ...], dict[str, int]]


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardIndex:
    """The N samples of one shard in file order, with M members.

    The name of a member is what follows the first dot of its file name, in lower case. Of several members of a
    sample with the same name, only the first is indexed.

    Attributes:
        names: names of members in order of first occurrence, with the number of members, repeated ones included.
        member_ends: (N,) uint32, where the members of each sample end in the next three arrays.
        member_names: (M,) unsigned integers, index of each member's name in ``names``.
        member_blocks: (M,) uint32, start of its data in blocks of 512 bytes.
        member_sizes: (M,) uint32, its size in bytes.
        key_ends: (N,) uint32, where each key ends in ``key_bytes``.
        key_bytes: uint8, the concatenated WebDataset keys in UTF-8.
        digest: 16 hexadecimal digits that change with any of these.
        content: 16 hexadecimal digits that change with the texts, labels and json (their last 64 KiB) and other
            members (their last KiB, and three more pieces of some formats); empty if the shard was not read.
        truncated: why the shard is truncated, so that only its intact part is indexed; empty for a complete shard.
    """

    names: dict[str, int]
    member_ends: npt.NDArray[np.uint32]
    member_names: npt.NDArray[np.unsignedinteger[Any]]
    member_blocks: npt.NDArray[np.uint32]
    member_sizes: npt.NDArray[np.uint32]
    key_ends: npt.NDArray[np.uint32]
    key_bytes: npt.NDArray[np.uint8]
    digest: str
    content: str = ""
    truncated: str = ""

    def __len__(self) -> int:
        return len(self.key_ends)

    def key(self, row: int) -> str:
        """Return the key of a sample."""
        ends, content = self._key_views
        start = ends[row - 1] if row else 0
        return str(content[start : ends[row]], "utf-8", "replace")

    def is_same(self, other: "ShardIndex") -> bool:
        """Whether both have the same samples, as far as their content is known."""
        both_contents = bool(self.content and other.content)
        return self.digest == other.digest and (not both_contents or self.content == other.content)

    def members(self, row: int) -> tuple[str, ...]:
        """Return the names of a sample's members in file order."""
        return self.find_layout(row)[1]

    def spans(self, layout: Layout, names: Iterable[str]) -> list[tuple[int, int]]:
        """Return byte offset and size of members of a sample; (0, 0) for missing ones.

        The name "" stands for the image, see ``find_image``.
        """
        _, _, blocks, sizes = self._member_views
        start, _, positions = layout
        spans = []
        for name in names:
            position = positions.get(name)
            if position is None:
                spans.append((0, 0))
            else:
                spans.append((blocks[start + position] * _BLOCK, sizes[start + position]))
        return spans

    def find_layout(self, row: int) -> Layout:
        """Return where a sample's members begin in the arrays, their names, and their positions by name."""
        if self._common_layout is not None:
            return row * len(self._common_layout[0]), *self._common_layout
        return self._look_up_layout(row)

    @cached_property
    def _common_layout(self) -> tuple[tuple[str, ...], dict[str, int]] | None:
        """The members of every sample, None if they differ; looking them up takes a tenth of the time of a read."""
        if not len(self) or len(self.member_names) % len(self):
            return None
        members = self.member_names.reshape(len(self), -1)
        is_common = (members == members[0]).all() and (np.diff(self.member_ends) == members.shape[1]).all()
        return self._look_up_layout(0)[1:] if is_common else None

    def _look_up_layout(self, row: int) -> Layout:
        ends, numbers, _, _ = self._member_views
        start = ends[row - 1] if row else 0
        content = numbers[start : ends[row]].tobytes()
        layout = self._layouts.get(content)
        if layout is None:
            texts = [*self.names]
            names = tuple(texts[i] for i in np.frombuffer(content, self.member_names.dtype).tolist())
            positions = {name: position for position, name in enumerate(names)}
            image = find_image(names)
            if image:
                positions[""] = positions[image]
            layout = (names, positions)
            self._layouts[content] = layout
        return start, *layout

    def has_any(self, names: Iterable[str]) -> npt.NDArray[np.bool_]:
        """Return which samples have at least one of these members, (N,)."""
        names = set(names)
        numbers = [i for i, name in enumerate(self.names) if name in names]
        counts = np.concatenate([[0], np.cumsum(np.isin(self.member_names, numbers))])  # (M + 1,)
        ends = counts[self.member_ends]
        has: npt.NDArray[np.bool_] = np.diff(ends, prepend=0) > 0
        return has

    @property
    def repeated(self) -> dict[str, int]:
        """Number of members that are not the first with their name in a sample, which are not used, by name."""
        used = np.bincount(self.member_names, minlength=len(self.names)).tolist()
        counts = zip(self.names.items(), used, strict=True)
        return {name: count - first for (name, count), first in counts if count > first}

    # Single numbers are read ten times faster from memory views than from arrays.

    @cached_property
    def _key_views(self) -> tuple[memoryview, memoryview]:
        return self.key_ends.data, self.key_bytes.data

    @cached_property
    def _member_views(self) -> tuple[memoryview, memoryview, memoryview, memoryview]:
        return self.member_ends.data, self.member_names.data, self.member_blocks.data, self.member_sizes.data

    @cached_property
    def _layouts(self) -> dict[bytes, tuple[tuple[str, ...], dict[str, int]]]:
        # by a piece of ``member_names``; "" is the position of the image
        return {}


def index_path(shard: ShardFile) -> Path:
    """Return the path of a shard's stored index; that of a truncated shard has the suffix ``.truncated``.

    The path is a hash of the identity: names in messages omit queries and commands, so different shards share them.
    """
    digest = hashlib.sha256(os.fsencode(f"{INDEX_VERSION}\n{shard.identity}")).hexdigest()[:32]
    return index_folder() / "index" / digest[:2] / f"{digest}.index"


def stored_index(shard: ShardFile, *, truncated: str = "error") -> ShardIndex | None:
    """Return the index of a shard from the cache folder, None if it was never scanned."""
    paths = [index_path(shard)]
    if truncated == "use":
        paths.append(paths[0].with_suffix(".truncated"))
    for path in paths:
        with suppress(TypeError):
            stored = read_arrays(path)
            if stored is not None:
                parts: dict[str, Any] = {**stored[0], **stored[1]}
                return ShardIndex(**parts)
    return None


def is_indexed(shard: ShardFile, *, truncated: str = "error") -> bool:
    """Return whether a shard has a stored index, without reading the index."""
    path = index_path(shard)
    return path.is_file() or (truncated == "use" and path.with_suffix(".truncated").is_file())


def is_indexable(shard: ShardFile) -> bool:
    """Return whether the index of a shard is stored; not that of a pipe, whose output may change between runs."""
    return shard.size >= 0 or bool(shard.version)


def keep_index(shard: ShardFile, index: ShardIndex) -> None:
    """Store an index in the cache folder if possible, see ``is_indexable``."""
    if not is_indexable(shard):
        return
    path = index_path(shard)
    if index.truncated:
        path = path.with_suffix(".truncated")
    about = {name: getattr(index, name) for name in ("names", "digest", "content", "truncated")}
    arrays = {name: getattr(index, name) for name in _ARRAYS}
    with suppress(OSError):
        write_arrays(path, about, arrays)


def index_shard(shard: ShardFile, path: Path | None = None, *, truncated: str = "error") -> ShardIndex:
    """Return the index of a local shard, from the cache folder if it was scanned before."""
    index = stored_index(shard, truncated=truncated)
    if index is not None:
        return index
    try:
        path = path or Path(shard.url)
        members = list_tar_files(path, called=shard.shown)
        index = add_content_digest(index_members(shard.shown, members, truncated=truncated), path)
    except OSError as error:
        raise DataError(f"shard {shard.shown}: {error.strerror}") from error
    keep_index(shard, index)
    return index


def index_members(
    shard: str, members: Iterable[tuple[str, int, int]], *, truncated: str = "error"
) -> ShardIndex:
    """Index the members of a tar: name, byte offset of the data, size.

    Args:
        shard: its name in messages.
        members: as ``list_tar_files`` yields them.
        truncated: "error", or "use" to index the intact part of a truncated tar. Its last sample is dropped if it
            lacks a member that the sample before it has.
    """
    keys: list[str] = []
    # arrays, because lists per sample would slow down the garbage collector
    starts = array("q")
    numbers = array("q")
    offsets = array("q")
    sizes = array("q")
    number_of: dict[str, int] = {}  # by name
    counts: list[int] = []  # members of each name
    latest: list[int] = []  # start of the last sample with each name
    start = 0  # of the members of the current sample
    last = None  # its key
    fault = ""
    try:
        for name, offset, size in members:
            key, _, extension = name.partition(".")
            if key != last or extension not in number_of:  # fast path: otherwise the split above is correct
                parts = sample_name(name)
                if parts is None:
                    continue
                key, extension = parts
                if key != last:
                    last = key
                    keys.append(key)
                    start = len(offsets)
                    starts.append(start)
                if extension not in number_of:
                    number_of[extension] = len(counts)
                    counts.append(0)
                    latest.append(-1)
            name_index = number_of[extension]
            counts[name_index] += 1
            if latest[name_index] != start:
                latest[name_index] = start
                numbers.append(name_index)
                offsets.append(offset)
                sizes.append(size)
    except TruncatedError as error:
        if truncated == "error":
            raise
        fault = str(error)
        texts = [*number_of]
        if len(keys) > 1:
            previous = {texts[i] for i in numbers[starts[-2] : start]}
            names = {texts[i] for i in numbers[start:]}
            if find_image([*previous]) and find_image([*names]):
                previous -= {*IMAGE_EXTENSIONS}
            if not previous <= names:
                del keys[-1], starts[-1], numbers[start:], offsets[start:], sizes[start:]

    encoded = [key.encode("utf-8", "replace") for key in keys]
    blocks = np.array(offsets, dtype=np.int64) // _BLOCK
    if len(blocks) and blocks.max() > _MAX_UINT32:
        raise DataError(f"shard {shard} is larger than 2 TiB: write smaller shards")
    arrays: dict[str, Any] = {
        "member_ends": np.array([*starts[1:], len(offsets)][: len(keys)], dtype=np.uint32),
        "member_names": np.array(numbers, dtype=np.min_scalar_type(len(counts))),
        "member_blocks": blocks.astype(np.uint32),
        "member_sizes": np.array(sizes, dtype=np.int64).clip(max=_MAX_UINT32).astype(np.uint32),
        "key_ends": np.cumsum([len(key) for key in encoded], dtype=np.uint32),
        "key_bytes": np.frombuffer(b"".join(encoded), dtype=np.uint8),
    }
    counts_by_name = dict(zip(number_of, counts, strict=True))
    digest = hashlib.sha256(json.dumps([*counts_by_name]).encode())
    for content in arrays.values():
        digest.update(content.tobytes())
    return ShardIndex(**arrays, names=counts_by_name, digest=digest.hexdigest()[:16], truncated=fault)


def add_content_digest(index: ShardIndex, path: Path) -> ShardIndex:
    """Return an index with the digest of the shard's content.

    The digested bytes are on pages that a scan of the headers has just read. Modification times of members are not
    included: a shard packed again from the same files has the same digest.
    """
    extensions = [name.rpartition(".")[2] for name in index.names]
    starts = index.member_blocks.astype(np.int64) * _BLOCK
    sizes = index.member_sizes.astype(np.int64)
    limits = [_DIGESTED_TEXT if extension in _TEXTS else _DIGESTED for extension in extensions]
    lengths = np.minimum(sizes, np.array(limits, dtype=np.int64)[index.member_names])
    pieces = [(starts + sizes - lengths, lengths)]
    similar = [extension in _SIMILAR_ENDS for extension in extensions]
    if any(similar):
        images = np.array(similar)[index.member_names]
        for quarter in (1, 2, 3):
            skipped = quarter * sizes[images] // 4
            pieces.append((starts[images] + skipped, np.minimum(sizes[images] - skipped, _BLOCK)))
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for begin, length in pieces:
            for offset, count in zip(begin.tolist(), length.tolist(), strict=True):
                digest.update(os.pread(file.fileno(), count, offset))
    return replace(index, content=digest.hexdigest()[:16])
