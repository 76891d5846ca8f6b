"""Plain tars by their headers: where the bytes of each file lie.

Only the 512-byte headers are read, and what lies behind the last file. A damaged tar is refused with the place of
the damage, and no size that it states takes memory.
"""

import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from clipkit.errors import DataError

__all__ = ["Content", "sample_name", "tar_files", "tar_files_of"]

_BLOCK = 512
_WITHOUT_DATA = (b"1", b"2", b"3", b"4", b"5", b"6")  # links, devices, folders, pipes
_ABOUT_NEXT = (b"L", b"K", b"x", b"X", b"g")  # members that say something of those after them
_PAX_LENGTH = re.compile(rb"(\d{1,7}) ")
_PAX_SIZE = re.compile(r"[0-9]{1,19}")
_MAX_EXTRA_BYTES = 1 << 20  # of a member that holds another one's long name; far beyond what any writer makes
_CHUNK = 1 << 20  # bytes looked through at a time
_RECORD = 20 * _BLOCK  # what writers fill the end up to, unless they were told otherwise
_MAX_RECORD = 1 << 20  # of those told otherwise
_MAX_NAME = 4096  # characters


class Content(Protocol):
    """The bytes of a tar, wherever they are; an ``mmap`` is one."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> bytes: ...


def sample_name(name: str) -> tuple[str, str] | None:
    """The key and the extension (in lower case) that WebDataset sees in a member's name.

    The key is the path up to the first dot of the file name. None for hidden files and names without an extension,
    which belong to no sample.
    """
    folder, _, file_name = name.rpartition("/")
    stem, dot, extension = file_name.partition(".")
    if not dot or not stem:
        return None
    return f"{folder}/{stem}" if folder else stem, extension.lower()


def tar_files(path: Path) -> Iterator[tuple[str, int, int]]:
    """Name, data offset and size of every regular file of a tar, in its order; GNU and PAX long names are followed.

    Raises:
        DataError: the file is compressed, not a tar, or not whole; what lies before the fault was given.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise DataError(f"shard {path} is empty (0 bytes)")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as tar:
            yield from tar_files_of(str(path), tar)


def tar_files_of(shard: str, tar: Content) -> Iterator[tuple[str, int, int]]:
    """``tar_files`` of any content; ``shard`` names it in messages."""
    end = len(tar)
    if end == 0:
        raise DataError(f"shard {shard} is empty (0 bytes)")
    position = 0
    long_name: str | None = None
    long_size: int | None = None
    while position + _BLOCK <= end:
        header = tar[position : position + _BLOCK]
        if header[0] == 0 and not any(header):
            _check_end(shard, tar, position, end)
            return
        size = _check_header(shard, header, position)
        kind = header[156:157]
        if kind in _WITHOUT_DATA:
            size = 0  # whatever the header says: hard links may state the size of what they link to
        elif kind not in _ABOUT_NEXT and long_size is not None:
            size = long_size
        data = position + _BLOCK
        if data + size > end:
            raise _truncated(
                shard, f"a member at byte {position} needs {data + size} bytes, the file has {end}"
            )
        if kind in _ABOUT_NEXT and size > _MAX_EXTRA_BYTES:
            raise DataError(f"shard {shard} states a name of {size} bytes at byte {position}; write it again")
        if kind == b"L":
            long_name = _text(tar[data : data + size])
        elif kind in (b"x", b"X"):
            records = _pax_records(tar[data : data + size])
            long_name = records.get("path", long_name)
            stated = records.get("size", "")
            long_size = int(stated) if _PAX_SIZE.fullmatch(stated) else long_size
            if any(key.startswith("GNU.sparse.") for key in records):
                kind = b"S"
        elif kind in (b"0", b"\0", b"7"):
            name = long_name if long_name is not None else _name(header)
            if len(name) > _MAX_NAME:
                raise DataError(f"shard {shard} has a name of {len(name)} characters at byte {position}")
            yield name, data, size
        if kind == b"S":
            raise DataError(
                f"shard {shard} holds a sparse file at byte {position}: write it without --sparse"
            )
        if kind not in _ABOUT_NEXT:
            long_name = long_size = None
        position = data + -(-size // _BLOCK) * _BLOCK
    raise _truncated(shard, f"it has no end mark; it stops at byte {end}")


def _check_end(shard: str, tar: Content, position: int, end: int) -> None:
    """Blocks of zeros end an archive, but so they do where a download has left a hole.

    Behind an archive's end come only zeros, up to a whole number of records. A record has 20 blocks, or a power
    of two of up to a MiB (the others that ``tar -b`` would take are not in use).
    """
    other = _first_nonzero(tar, position, end)
    zeros, block = other - position, other - other % _BLOCK
    if other == end:
        if zeros <= 2 * _BLOCK + max(_RECORD, min(end & -end, _MAX_RECORD)):  # & gives the power of two in it
            return
    elif zeros <= 3 * _BLOCK + _MAX_RECORD and _has_checksum(tar[block : block + _BLOCK]):
        raise DataError(
            f"shard {shard} holds more than one archive, the second begins at byte {block}: give each its own file"
        )
    raise DataError(
        f"shard {shard} looks half-downloaded: zeros from byte {position} to {other} of {end}; "
        "fetch or write it again"
    )


def _first_nonzero(tar: Content, start: int, end: int) -> int:
    """Where the first byte other than zero lies, ``end`` if there is none."""
    for position in range(start, end, _CHUNK):
        chunk = tar[position : position + _CHUNK]
        if rest := chunk.lstrip(b"\0"):
            return position + len(chunk) - len(rest)
    return end


def _truncated(shard: str, what: str) -> DataError:
    return DataError(f"shard {shard} is truncated: {what}; fetch or write it again")


def _check_header(shard: str, header: bytes, position: int) -> int:
    """The size that a header states, after its checksum was found right."""
    if not _has_checksum(header):
        if position == 0 and header[:2] in (b"\x1f\x8b", b"BZ", b"\xfd7", b"(\xb5"):
            raise DataError(f"shard {shard} is compressed: random access needs a plain tar, unpack it first")
        what = "is not a tar file" if position == 0 else f"has a broken header at byte {position}"
        raise DataError(f"shard {shard} {what}; fetch or write it again")
    field = header[124:136]
    # base 256 where the first bit is set, for 8 GiB and more; with the second one set the number is negative
    size = int.from_bytes(field[1:], "big") if field[0] == 0x80 else _octal(field)
    if size is None:
        raise DataError(f"shard {shard} has a broken size at byte {position}; fetch or write it again")
    return size


def _has_checksum(header: bytes) -> bool:
    # taken with its own eight bytes read as spaces
    return _octal(header[148:156]) == sum(header) - sum(header[148:156]) + 8 * 32


def _octal(field: bytes) -> int | None:
    """A number in octal digits between blanks, 0 for an empty field, None for anything else."""
    digits = field.split(b"\0", 1)[0].strip(b" ")
    # int() alone would take signs, underscores and prefixes
    return None if digits.strip(b"01234567") else int(digits or b"0", 8)


def _text(data: bytes) -> str:
    # names that are not UTF-8 must stay different from one another, and printable
    return data.split(b"\0", 1)[0].decode("utf-8", "backslashreplace")


def _name(header: bytes) -> str:
    name = _text(header[:100])
    prefix = _text(header[345:500]) if header[257:263] == b"ustar\0" else ""
    return f"{prefix}/{name}" if prefix else name


def _pax_records(data: bytes) -> dict[str, str]:
    """The ``LENGTH KEY=VALUE\\n`` records of a PAX header; a malformed rest is left out."""
    records: dict[str, str] = {}
    position = 0
    while (match := _PAX_LENGTH.match(data, position)) is not None:
        end = position + int(match[1])
        if not match.end() < end <= len(data):
            break
        key, _, value = data[match.end() : end - 1].partition(b"=")
        records[_text(key)] = _text(value)
        position = end
    return records
