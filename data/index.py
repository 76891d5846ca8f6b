"""The index of a shard: where each sample's members lie inside a plain tar.

A scan reads the 512-byte headers only, so that a sample can later be read by one ``pread``. Members belong
to one sample while their key (the path up to the first dot of the file name) stays the same, which is the
WebDataset rule.
"""

import hashlib
import mmap
import os
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from clipkit.errors import DataError
from data.cache import cache_folder

__all__ = ["CAPTION", "IMAGE", "IMAGE_EXTENSIONS", "LABEL", "META", "ShardIndex", "index_shard"]

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "pgm", "jp2", "avif")
IMAGE, CAPTION, LABEL, META = range(4)  # columns of ShardIndex.spans
_COLUMN = {**dict.fromkeys(IMAGE_EXTENSIONS, IMAGE), "txt": CAPTION, "cls": LABEL, "json": META}
_BLOCK = 512
_VERSION = 1  # of the stored form; raise it when the scan or the arrays change


@dataclass(frozen=True, kw_only=True)
class ShardIndex:
    """The samples of one shard in file order.

    Attributes:
        keys: (N,) unicode, the WebDataset keys.
        spans: (N, 4, 2) int64, byte offset and size of each sample's picture, caption, label and json;
            offset -1 where a sample has none.
        extensions: (E,) unicode, every extension seen.
        extension_counts: (E,) int64, how many members had it.
    """

    keys: npt.NDArray[np.str_]
    spans: npt.NDArray[np.int64]
    extensions: npt.NDArray[np.str_]
    extension_counts: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.keys)


def index_shard(path: Path) -> ShardIndex:
    """The index of one tar, from the cache folder where the same file was scanned before.

    Raises:
        DataError: the file is missing, compressed, not a tar, or ends in the middle of a member.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"shard {path}: {error.strerror}") from error
    identity = f"{_VERSION}\n{path.resolve()}\n{status.st_size}\n{status.st_mtime_ns}"
    stored = cache_folder() / "index" / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.npz"
    unusable = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile)  # then it is made again
    with suppress(*unusable), np.load(stored, allow_pickle=False) as arrays:
        return ShardIndex(**{name: arrays[name] for name in ShardIndex.__dataclass_fields__})
    index = _scan(path)
    with suppress(OSError):
        _store(index, stored)
    return index


def _store(index: ShardIndex, stored: Path) -> None:
    stored.parent.mkdir(parents=True, exist_ok=True)
    aside = stored.with_name(f".{stored.name}.{os.getpid()}")
    with aside.open("wb") as file:
        np.savez(file, **vars(index))
    aside.replace(stored)


def _scan(path: Path) -> ShardIndex:
    keys: list[str] = []
    spans: list[list[tuple[int, int]]] = []
    seen: Counter[str] = Counter()
    for name, offset, size in _members(path):
        folder, _, file_name = name.rpartition("/")
        stem, dot, extension = file_name.partition(".")
        if not dot or not stem:  # hidden files and names without an extension belong to no sample
            continue
        key, extension = f"{folder}/{stem}" if folder else stem, extension.lower()
        seen[extension] += 1
        if not keys or keys[-1] != key:
            keys.append(key)
            spans.append([(-1, 0)] * 4)
        column = _COLUMN.get(extension)
        if column is not None and spans[-1][column][0] < 0:
            spans[-1][column] = (offset, size)
    return ShardIndex(
        keys=np.array(keys, dtype=np.str_),
        spans=np.array(spans, dtype=np.int64).reshape(len(keys), 4, 2),
        extensions=np.array(list(seen), dtype=np.str_),
        extension_counts=np.array(list(seen.values()), dtype=np.int64),
    )


def _members(path: Path) -> Iterator[tuple[str, int, int]]:
    """Name, data offset and size of every regular file of a tar; GNU and PAX long names are followed."""
    with path.open("rb") as file:
        end = os.fstat(file.fileno()).st_size
        if end == 0:
            raise DataError(f"shard {path} is empty (0 bytes)")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as tar:
            yield from _walk(path, tar, end)


def _walk(path: Path, tar: mmap.mmap, end: int) -> Iterator[tuple[str, int, int]]:
    position = 0
    long_name: str | None = None
    long_size: int | None = None
    while position + _BLOCK <= end:
        header = tar[position : position + _BLOCK]
        if header[0] == 0 and not any(header):
            return  # a block of zeros ends the archive
        size = _check_header(path, header, position)
        kind = header[156:157]
        regular = kind in (b"0", b"\0", b"7")
        if regular and long_size is not None:
            size = long_size
        data = position + _BLOCK
        position = data + -(-size // _BLOCK) * _BLOCK
        if data + size > end:
            raise DataError(
                f"shard {path} is truncated: a member at byte {data - _BLOCK} needs {data + size} bytes, "
                f"the file has {end}; fetch or write it again"
            )
        if kind == b"L":
            long_name = tar[data : data + size].split(b"\0", 1)[0].decode("utf-8", "replace")
        elif kind == b"x":
            records = _pax_records(tar[data : data + size])
            long_name = records.get("path", long_name)
            long_size = int(records["size"]) if records.get("size", "").isdecimal() else long_size
        elif regular:
            yield long_name if long_name is not None else _name(header), data, size
        if kind not in (b"L", b"x", b"K", b"g"):
            long_name = long_size = None
    if position < end:
        raise DataError(f"shard {path} is truncated: it ends inside a header at byte {position}")


def _check_header(path: Path, header: bytes, position: int) -> int:
    """The size that a header states, after its checksum was found right."""
    stated = header[148:156].split(b"\0", 1)[0].strip()
    # the checksum is taken with its own eight bytes read as spaces
    if not stated.isdigit() or int(stated, 8) != sum(header) - sum(header[148:156]) + 8 * 32:
        if position == 0 and header[:2] in (b"\x1f\x8b", b"BZ", b"\xfd7", b"(\xb5"):
            raise DataError(f"shard {path} is compressed: random access needs a plain tar, unpack it first")
        what = "is not a tar file" if position == 0 else f"has a broken header at byte {position}"
        raise DataError(f"shard {path} {what}; fetch or write it again")
    field = header[124:136]
    if field[0] & 0x80:  # base 256, for 8 GiB and more
        return int.from_bytes(field[1:], "big")
    return int(field.split(b"\0", 1)[0].strip() or b"0", 8)


def _name(header: bytes) -> str:
    name = header[:100].split(b"\0", 1)[0].decode("utf-8", "replace")
    prefix = (
        header[345:500].split(b"\0", 1)[0].decode("utf-8", "replace") if header[257:263] == b"ustar\0" else ""
    )
    return f"{prefix}/{name}" if prefix else name


def _pax_records(data: bytes) -> dict[str, str]:
    """The ``LENGTH KEY=VALUE\\n`` records of a PAX header; a malformed rest is left out."""
    records: dict[str, str] = {}
    while data:
        length, space, _ = data.partition(b" ")
        if not space or not length.isdigit() or not 0 < int(length) <= len(data):
            break
        key, _, value = data[len(length) + 1 : int(length)].rstrip(b"\n").partition(b"=")
        records[key.decode("utf-8", "replace")] = value.decode("utf-8", "replace")
        data = data[int(length) :]
    return records
