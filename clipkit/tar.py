"""Plain tars by their headers: where the bytes of each file lie.

Only the 512-byte headers are read, and what lies behind the last file. A damaged tar is refused with the place of
the damage, and no size that it states takes memory.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from clipkit.errors import DataError

__all__ = ["Content", "sample_name", "tar_files", "tar_files_of"]

_BLOCK = 512
_PLAIN, _PAX = b"0x"  # kinds of nearly all members
_PIECE = 4096  # bytes read at a time
_BLANK = b" \0"
_OCTAL_PLACES = (8 ** np.arange(5, -1, -1)).astype(np.uint32)  # of six digits
_AT_ONCE = 4096  # headers that are checked together
_FILE = (b"0", b"\0", b"7")
_WITHOUT_DATA = (b"1", b"2", b"3", b"4", b"5", b"6")  # links, devices, folders, pipes
_ABOUT_NEXT = (b"L", b"K", b"x", b"X", b"g")  # members that say something of those after them
_PAX_LENGTH = re.compile(rb"(\d{1,7}) ")
_PAX_MATTERS = re.compile(rb"path=|size=|GNU\.sparse\.")
_PAX_SIZE = re.compile(r"[0-9]{1,19}")
_MAX_EXTRA_BYTES = 1 << 20  # of a member that holds another one's long name; far beyond what any writer makes
_CHUNK = 1 << 20  # bytes looked through at a time
_RECORD = 20 * _BLOCK  # what writers fill the end up to, unless they were told otherwise
_MAX_RECORD = 1 << 20  # of those told otherwise
_MAX_NAME = 4096  # characters
_MAX_ZEROS = 1 << 26  # that are looked through behind an end; a hole may state any size


class Content(Protocol):
    """The bytes of a tar, wherever they are; ``bytes`` are one."""

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


def tar_files(path: Path, *, called: str = "") -> Iterator[tuple[str, int, int]]:
    """Name, data offset and size of every regular file of a tar, in its order; GNU and PAX long names are followed.

    Args:
        path: the tar.
        called: its name in messages, if it is another one.

    Raises:
        DataError: the file is compressed, not a tar, or not whole; what lies before the fault was given.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        yield from tar_files_of(called or str(path), _FileContent(file.fileno()))


class _FileContent:
    """The bytes of an open file; not mapped, as to touch what was cut off meanwhile would kill the process."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._size = os.fstat(descriptor).st_size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice, /) -> bytes:
        return os.pread(self._descriptor, part.stop - part.start, part.start)


def tar_files_of(shard: str, tar: Content) -> Iterator[tuple[str, int, int]]:
    """``tar_files`` of any content; ``shard`` names it in messages.

    Headers are followed by their sizes alone, some thousands at a time, and then checked together before anything
    in them is believed: one by one the checks would take most of the time.
    """
    if len(tar) == 0:
        raise DataError(f"shard {shard} is empty (0 bytes)")
    run = _Run(position=0)
    while not run.ended:
        run = _follow(shard, tar, run)
        headers = np.frombuffer(b"".join(run.headers), dtype=np.uint8).reshape(-1, _BLOCK)
        sound = _count_sound(headers)
        names = iter(_names(headers[[number for number, long_name, _, _ in run.files if long_name is None]]))
        for number, long_name, offset, size in run.files:
            if number >= sound:
                break
            name = next(names) if long_name is None else long_name
            if len(name) > _MAX_NAME:
                place = offset - _BLOCK
                raise DataError(f"shard {shard} has a name of {len(name)} characters at byte {place}")
            yield name, offset, size
        if sound < len(headers):
            raise _broken(shard, run.headers[sound], run.positions[sound])
        if run.fault is not None:
            raise run.fault


@dataclass(kw_only=True, slots=True)
class _Run:
    """What a stretch of headers says, unchecked.

    Attributes:
        position: of the header that comes next.
        headers: 512 bytes each.
        positions: where they lie.
        files: for each regular file the number of its header, its name if another header gave it, where its data
            begin, and how many bytes they are.
        said: whether another header has said something of the next file: ``long_name``, ``long_size`` or both.
        fault: what ends the walk.
        ended: whether it has ended, with a fault or without.
    """

    position: int
    headers: list[bytes] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    files: list[tuple[int, str | None, int, int]] = field(default_factory=list)
    said: bool = False
    long_name: str | None = None
    long_size: int | None = None
    fault: DataError | None = None
    ended: bool = False


def _follow(shard: str, tar: Content, before: _Run) -> _Run:
    """From one header to the next, up to the end, to a fault, or for some thousands."""
    position = before.position
    run = _Run(position=position, said=before.said, long_name=before.long_name, long_size=before.long_size)
    headers, positions, files, end = run.headers, run.positions, run.files, len(tar)
    piece, start = b"", position  # headers lie close together where members are small
    try:
        while len(headers) < _AT_ONCE:
            at = position - start
            header = piece[at : at + _BLOCK]
            if len(header) < _BLOCK:
                piece, start, at = tar[position : position + _PIECE], position, 0
                header = piece[:_BLOCK]
            if len(header) < _BLOCK:
                stop = min(end, position + len(header))  # before its end where a file has shrunk meanwhile
                raise _truncated(shard, f"it has no end mark; it stops at byte {stop}")
            if header[0] == 0 and not any(header):
                _check_end(shard, tar, position, end)
                run.ended = True
                break
            headers.append(header)
            positions.append(position)
            digits, data = header[124:135], position + _BLOCK
            size = int(digits, 8) if digits.isdigit() and header[135] in _BLANK else _size(header)
            if header[156] == _PLAIN and not run.said and 0 <= size <= end - data:
                files.append((len(headers) - 1, None, data, size))
            elif (
                header[156] != _PAX
                or not 0 <= size <= len(piece) - at - _BLOCK
                or _PAX_MATTERS.search(piece, at + _BLOCK, at + _BLOCK + size)
            ):
                size = _unusual(run, shard, tar, header[156:157], size)
            position = data + (size + _BLOCK - 1) // _BLOCK * _BLOCK
    except DataError as fault:
        run.fault, run.ended = fault, True
    except ValueError:  # an 8 or a 9 among the digits
        run.fault, run.ended = _broken_size(shard, position), True
    run.position = position
    return run


def _unusual(run: _Run, shard: str, tar: Content, kind: bytes, size: int) -> int:
    """Note a member that is no plain file, or of which another has said something; gives the size of its data."""
    position = run.positions[-1]
    data, end = position + _BLOCK, len(tar)
    if size < 0:
        raise _broken_size(shard, position)
    if kind in _WITHOUT_DATA:
        size = 0  # whatever the header says: hard links may state the size of what they link to
    elif run.long_size is not None and kind not in _ABOUT_NEXT:
        size = run.long_size
    if data + size > end:
        raise _truncated(shard, f"a member at byte {position} needs {data + size} bytes, the file has {end}")
    if kind in _ABOUT_NEXT:
        if size > _MAX_EXTRA_BYTES:
            raise DataError(f"shard {shard} states a name of {size} bytes at byte {position}; write it again")
        extra = tar[data : data + size]
        if len(extra) < size:
            raise _truncated(shard, f"it stops at byte {data + len(extra)}")
        _note(run, shard, kind, extra)
    if kind == b"S":
        raise _sparse(shard, position)
    if kind in _FILE:
        run.files.append((len(run.headers) - 1, run.long_name, data, size))
    if kind not in _ABOUT_NEXT:
        run.said, run.long_name, run.long_size = False, None, None
    return size


def _note(run: _Run, shard: str, kind: bytes, extra: bytes) -> None:
    """What a member says of the next one; refused where programs do not agree on what that is."""
    position = run.positions[-1]
    name: str | None = None
    if kind == b"L":
        name = _text(extra)
    elif kind in (b"x", b"X", b"g") and _PAX_MATTERS.search(extra):
        records = _pax_records(extra)
        if records is None or (kind == b"g" and records.keys() & {"path", "size"}):
            raise _broken_note(shard, position)
        if any(key.startswith("GNU.sparse.") for key in records):
            raise _sparse(shard, position)
        name = records.get("path")
        if (stated := records.get("size")) is not None:
            if run.long_size is not None or not _PAX_SIZE.fullmatch(stated):
                raise _broken_note(shard, position)
            run.said, run.long_size = True, int(stated)
    if name is not None:
        if run.long_name is not None:
            raise _broken_note(shard, position)
        run.said, run.long_name = True, name


def _check_end(shard: str, tar: Content, position: int, end: int) -> None:
    """Blocks of zeros end an archive, but so they do where a download has left a hole.

    Behind an archive's end come only zeros, up to a whole number of records. A record has 20 blocks, or a power
    of two of up to a MiB (the others that ``tar -b`` would take are not in use).
    """
    far = min(end, position + _MAX_ZEROS)
    other = _first_nonzero(shard, tar, position, far)
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


def _first_nonzero(shard: str, tar: Content, start: int, end: int) -> int:
    """Where the first byte other than zero lies, ``end`` if there is none."""
    for position in range(start, end, _CHUNK):
        chunk = tar[position : min(end, position + _CHUNK)]
        if len(chunk) < min(end - position, _CHUNK):
            raise _truncated(shard, f"it stops at byte {position + len(chunk)}")
        if rest := chunk.lstrip(b"\0"):
            return position + len(chunk) - len(rest)
    return end


def _truncated(shard: str, what: str) -> DataError:
    return DataError(f"shard {shard} is truncated: {what}; fetch or write it again")


def _broken(shard: str, header: bytes, position: int) -> DataError:
    if position == 0 and header[:2] in (b"\x1f\x8b", b"BZ", b"\xfd7", b"(\xb5"):
        return DataError(f"shard {shard} is compressed: random access needs a plain tar, unpack it first")
    what = "is not a tar file" if position == 0 else f"has a broken header at byte {position}"
    return DataError(f"shard {shard} {what}; fetch or write it again")


def _broken_note(shard: str, position: int) -> DataError:
    return DataError(
        f"shard {shard} has a broken extended header at byte {position}; fetch or write it again"
    )


def _sparse(shard: str, position: int) -> DataError:
    return DataError(f"shard {shard} holds a sparse file at byte {position}: write it without --sparse")


def _broken_size(shard: str, position: int) -> DataError:
    return DataError(f"shard {shard} has a broken size at byte {position}; fetch or write it again")


def _count_sound(headers: npt.NDArray[np.uint8]) -> int:
    """How many of (N, 512) headers come before the first with a wrong checksum."""
    fields = headers[:, 148:156]
    # a checksum is taken with its own eight bytes read as spaces
    sums = headers.sum(axis=1, dtype=np.uint32) - fields.sum(axis=1, dtype=np.uint32) + np.uint32(8 * 32)
    digits = fields[:, :6] - np.uint8(ord("0"))
    stated = digits @ _OCTAL_PLACES
    for number in np.flatnonzero(
        (digits > 7).any(1) | (fields[:, 6] != 0)
    ).tolist():  # written in another way
        written = _octal(fields[number].tobytes())
        stated[number] = written if written is not None and written < 2**32 else 0
    wrong = np.flatnonzero(stated != sums)  # no sum is 0
    return int(wrong[0]) if len(wrong) else len(headers)


def _has_checksum(header: bytes) -> bool:
    return len(header) == _BLOCK and _count_sound(np.frombuffer(header, dtype=np.uint8)[None]) == 1


def _size(header: bytes) -> int:
    """A size in one of its rarer forms, -1 if it is none."""
    # base 256 where the first bit is set, for 8 GiB and more; with the second one set the number is negative
    if header[124] == 0x80:
        return int.from_bytes(header[125:136], "big")
    size = _octal(header[124:136])
    return -1 if size is None else size


def _octal(field: bytes) -> int | None:
    """A number in octal digits between blanks, 0 for an empty field, None for anything else."""
    digits = field.split(b"\0", 1)[0].strip(b" ")
    # int() alone would take signs, underscores and prefixes
    return None if digits.strip(b"01234567") else int(digits or b"0", 8)


def _text(data: bytes) -> str:
    # names that are not UTF-8 must stay different from one another, and printable
    return data.split(b"\0", 1)[0].decode("utf-8", "backslashreplace")


def _names(headers: npt.NDArray[np.uint8]) -> list[str]:
    """The names that (N, 512) headers give."""
    fields = headers[:, :100].copy().view("S100").ravel().tolist()  # without the zeros at their ends
    names = [_text(name) if b"\0" in name else name.decode("utf-8", "backslashreplace") for name in fields]
    with_prefix = (headers[:, 257:263] == np.frombuffer(b"ustar\0", dtype=np.uint8)).all(1) & (
        headers[:, 345] > 0
    )
    for number in np.flatnonzero(with_prefix).tolist():
        names[number] = f"{_text(headers[number, 345:500].tobytes())}/{names[number]}"
    return names


def _pax_records(data: bytes) -> dict[str, str] | None:
    """The ``LENGTH KEY=VALUE\\n`` records of a PAX header; None if they have another form."""
    records: dict[str, str] = {}
    position = 0
    while (match := _PAX_LENGTH.match(data, position)) is not None:
        end = position + int(match[1])
        if not match.end() < end <= len(data) or data[end - 1] != ord("\n"):
            return None
        key, _, value = data[match.end() : end - 1].partition(b"=")
        records[_text(key)] = _text(value)
        position = end
    return None if data[position:].strip(b"\0") else records
