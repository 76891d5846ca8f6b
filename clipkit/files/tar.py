"""Plain tars by their headers: where the bytes of each file lie.

Only the 512-byte headers are read, and what lies behind the last file. A damaged tar is refused with the place of
the damage, and no size that it states takes memory.
"""

import os
import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from clipkit.errors import DataError

__all__ = [
    "BLOCK",
    "Content",
    "FileContent",
    "TruncatedError",
    "count_sound",
    "has_checksum",
    "names_of",
    "pax_records",
    "plain_sizes",
    "sample_name",
    "size_of",
    "tar_files",
    "tar_files_of",
    "text_of",
]


# --------------------------------------------------------------------------------------------------------------
# What the 512-byte headers of a tar say, many at a time where that is possible.
#
# In shapes, N is the number of headers.

BLOCK = 512  # bytes of a header; all data begin at a multiple of it
_OCTAL_PLACES = (8 ** np.arange(5, -1, -1)).astype(np.uint32)  # of six digits
_SIZE_PLACES = 8.0 ** np.arange(10, -1, -1)  # of eleven; their sums are exact in float64
_PAX_LENGTH = re.compile(rb"(\d{1,7}) ")


def count_sound(headers: npt.NDArray[np.uint8]) -> int:
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


def has_checksum(header: bytes) -> bool:
    return len(header) == BLOCK and count_sound(np.frombuffer(header, dtype=np.uint8)[None]) == 1


def plain_sizes(headers: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """(N,) the sizes that (N, 512) headers give in their usual form, eleven octal digits; -1 for any other."""
    digits = headers[:, 124:135] - np.uint8(ord("0"))
    sizes = (digits @ _SIZE_PLACES).astype(np.int64)
    if (digits > 7).any():
        sizes[(digits > 7).any(1)] = -1
    sizes[(headers[:, 135] != 0) & (headers[:, 135] != ord(" "))] = -1
    return sizes


def size_of(header: bytes) -> int:
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


def text_of(data: bytes) -> str:
    # names that are not UTF-8 must stay different from one another, and printable
    return data.split(b"\0", 1)[0].decode("utf-8", "backslashreplace")


def names_of(headers: npt.NDArray[np.uint8]) -> list[str]:
    """The names that (N, 512) headers give."""
    fields = headers[:, :100].copy().view("S100").ravel().tolist()  # without the zeros at their ends
    together = b"\0".join(fields)
    if together.count(b"\0") >= len(fields):  # there are some in the names, or there is none
        names = list(map(text_of, fields))
    else:
        names = together.decode("utf-8", "backslashreplace").split("\0")
    for number in np.flatnonzero(headers[:, 345]).tolist():  # of those with a prefix
        if headers[number, 257:263].tobytes() == b"ustar\0":
            names[number] = f"{text_of(headers[number, 345:500].tobytes())}/{names[number]}"
    return names


def pax_records(data: bytes) -> dict[str, str] | None:
    """The ``LENGTH KEY=VALUE\\n`` records of a PAX header; None if they have another form."""
    records: dict[str, str] = {}
    position = 0
    while (match := _PAX_LENGTH.match(data, position)) is not None:
        end = position + int(match[1])
        if not match.end() < end <= len(data) or data[end - 1] != ord("\n"):
            return None
        key, _, value = data[match.end() : end - 1].partition(b"=")
        records[text_of(key)] = text_of(value)
        position = end
    return None if data[position:].strip(b"\0") else records


# --------------------------------------------------------------------------------------------------------------

_PLAIN, _PAX = b"0x"  # kinds of nearly all members
_MARK = b"ustar"  # of headers, but for the oldest kind
_PIECE = 4096  # bytes read at a time
_BLANK = b" \0"
_AT_ONCE = 4096  # headers that are checked together
_WINDOW = 2 << 20  # bytes that are scanned at a time
_FEW = 64  # headers that are followed where a scan has found too few
_WORTH = 384  # headers in them for which a scan takes less time than to go from one to the next
_FILE = (b"0", b"\0", b"7")
_WITHOUT_DATA = (b"1", b"2", b"3", b"4", b"5", b"6")  # links, devices, folders, pipes
_ABOUT_NEXT = (b"L", b"K", b"x", b"X", b"g")  # members that say something of those after them
_PAX_WORDS = (b"path=", b"size=", b"GNU.sparse.")
_PAX_MATTERS = re.compile(b"|".join(map(re.escape, _PAX_WORDS)))
_PAX_SIZE = re.compile(r"[0-9]{1,19}")
_MAX_EXTRA_BYTES = 1 << 20  # of a member that holds another one's long name; far beyond what any writer makes
_CHUNK = 1 << 20  # bytes looked through at a time
_RECORD = 20 * BLOCK  # what writers fill the end up to, unless they were told otherwise
_MAX_RECORD = 1 << 20  # of those told otherwise
_MAX_NAME = 4096  # characters
_MAX_ZEROS = 1 << 26  # that are looked through behind an end; a hole may state any size


class TruncatedError(DataError):
    """A tar that ends too early, or in zeros that a download has not filled; what precedes them is intact."""


class Content(Protocol):
    """The bytes of a tar, wherever they are; ``bytes`` are one."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> bytes: ...


def sample_name(name: str) -> tuple[str, str] | None:
    """The key and the extension (in lower case) that WebDataset sees in a member's name.

    The key is the path up to the first dot of the file name. None for hidden files and names without an extension,
    which belong to no sample.
    """
    folder, slash, file_name = name.rpartition("/") if "/" in name else ("", "", name)
    stem, dot, extension = file_name.partition(".")
    if not dot or not stem:
        return None
    return folder + slash + stem if folder else stem, extension.lower()


def tar_files(path: Path, *, called: str = "") -> Iterator[tuple[str, int, int]]:
    """Name, data offset and size of every regular file of a tar, in its order; GNU and PAX long names are followed.

    Args:
        path: the tar.
        called: its name in messages, if it is another one.

    Raises:
        TruncatedError: the file is not whole; all members before the cut were given.
        DataError: it is compressed or not a tar; what lies before the fault was given.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        yield from tar_files_of(called or str(path), FileContent(file.fileno()), at_hand=True)


class FileContent:
    """The bytes of an open file; not mapped, as to touch what was cut off meanwhile would kill the process."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._size = os.fstat(descriptor).st_size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice, /) -> bytes:
        return os.pread(self._descriptor, part.stop - part.start, part.start)


def tar_files_of(shard: str, tar: Content, *, at_hand: bool = False) -> Iterator[tuple[str, int, int]]:
    """``tar_files`` of any content; ``shard`` names it in messages.

    Headers are followed by their sizes alone, some thousands at a time, and then checked together before anything
    in them is believed: one by one the checks would take most of the time. Where the content is ``at_hand``, to be
    had at the speed of memory, and its members are small, the headers are not even followed one by one: they are
    found by their marks among all blocks, and what they say must make a chain.
    """
    if len(tar) == 0:
        raise TruncatedError(f"shard {shard} is empty (0 bytes)")
    run, steps = _Run(position=0), _FEW
    while not run.ended:
        found = _scan(tar, run) if at_hand else None
        if found is None or len(found.headers) < _WORTH:
            run = _follow(shard, tar, run, most=steps if at_hand else _AT_ONCE)
            steps = min(4 * steps, _AT_ONCE)  # until another scan is tried
        else:
            run, steps = found, _FEW
        sound = count_sound(run.headers)
        files = bisect_left(run.files, sound)
        names = names_of(run.headers[run.files[:files]])
        for place, name in run.long_names.items():
            if place < files:
                names[place] = name
        yield from zip(names, run.offsets, run.sizes)  # noqa: B905 (there are names for the sound ones alone)
        if sound < len(run.headers):
            raise _broken(shard, run.headers[sound].tobytes(), run.positions[sound])
        if run.fault is not None:
            raise run.fault


@dataclass(kw_only=True, slots=True)
class _Run:
    """What a stretch of headers says, unchecked.

    Attributes:
        position: of the header that comes next.
        headers: (N, 512) uint8.
        positions: where they lie.
        files: the numbers of the headers of regular files.
        offsets: where the data of these begin.
        sizes: how many bytes they are.
        long_names: of some of these, by their places among them, which another header gave.
        said: whether another header has said something of the next file: ``long_name``, ``long_size`` or both.
        fault: what ends the walk.
        ended: whether it has ended, with a fault or without.
    """

    position: int
    headers: npt.NDArray[np.uint8] = field(default_factory=lambda: np.empty((0, BLOCK), np.uint8))
    positions: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    long_names: dict[int, str] = field(default_factory=dict)
    said: bool = False
    long_name: str | None = None
    long_size: int | None = None
    fault: DataError | None = None
    ended: bool = False


def _scan(tar: Content, before: _Run) -> _Run | None:
    """The headers of a window, up to the first that is not of the usual kinds or does not lie where it must.

    None where there are none of them, or where another header has said something of the next file.
    """
    start = before.position
    window = tar[start : start + _WINDOW]
    if before.said or len(window) < BLOCK:
        return None
    blocks = np.frombuffer(window, dtype=np.uint8, count=len(window) // BLOCK * BLOCK).reshape(-1, BLOCK)
    at = np.flatnonzero(blocks[:, 257] == _MARK[0])
    headers = blocks[at]
    marked = np.ascontiguousarray(headers[:, 257:262]).view("S5").ravel() == _MARK
    if not marked.all():
        at, headers = at[marked], headers[marked]  # (N,), (N, 512) blocks that look like headers
    if len(at) == 0:
        return None
    sizes = plain_sizes(headers)
    after = at + 1 + -(-sizes // BLOCK)
    is_file, is_note = headers[:, 156] == _PLAIN, headers[:, 156] == _PAX
    usual = (sizes >= 0) & (start + (at + 1) * BLOCK + sizes <= len(tar)) & (is_file | is_note)
    usual &= at == np.concatenate([[0], after[:-1]])
    usual[is_note] &= _say_nothing(blocks, at[is_note] + 1, sizes[is_note])
    count = len(at) if usual.all() else int(usual.argmin())
    if count == 0:
        return None
    data = start + (at + 1) * BLOCK
    files = np.flatnonzero(is_file[:count])
    return _Run(
        position=start + int(after[count - 1]) * BLOCK,
        headers=headers[:count],
        positions=(data[:count] - BLOCK).tolist(),
        files=files.tolist(),
        offsets=data[files].tolist(),
        sizes=sizes[files].tolist(),
    )


def _say_nothing(
    blocks: npt.NDArray[np.uint8], at: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """(M,) whether PAX members lie in one block each, and say nothing that matters here."""
    short = (sizes >= 0) & (sizes <= BLOCK) & (at < len(blocks))
    if not short.any():
        return short
    content = blocks[at[short], : sizes[short].max()].tobytes()
    if any(word in content for word in _PAX_WORDS):
        first = min(content.find(word) for word in _PAX_WORDS if word in content)
        short[np.flatnonzero(short)[first // (len(content) // int(short.sum())) :]] = False
    return short


def _follow(shard: str, tar: Content, before: _Run, *, most: int) -> _Run:
    """From one header to the next, up to the end, to a fault, or for so many."""
    position = before.position
    run = _Run(position=position, said=before.said, long_name=before.long_name, long_size=before.long_size)
    positions, files, offsets, sizes, end = run.positions, run.files, run.offsets, run.sizes, len(tar)
    headers: list[bytes] = []
    piece, start = b"", position  # headers lie close together where members are small
    try:
        while len(headers) < most:
            at = position - start
            header = piece[at : at + BLOCK]
            if len(header) < BLOCK:
                piece, start, at = tar[position : position + _PIECE], position, 0
                header = piece[:BLOCK]
            if len(header) < BLOCK:
                stop = min(end, position + len(header))  # before its end where a file has shrunk meanwhile
                raise _truncated(shard, f"it has no end mark; it stops at byte {stop}")
            if header[0] == 0 and not any(header):
                _check_end(shard, tar, position, end)
                run.ended = True
                break
            headers.append(header)
            positions.append(position)
            digits, data = header[124:135], position + BLOCK
            size = int(digits, 8) if digits.isdigit() and header[135] in _BLANK else size_of(header)
            if header[156] == _PLAIN and not run.said and 0 <= size <= end - data:
                files.append(len(headers) - 1)
                offsets.append(data)
                sizes.append(size)
            elif (
                header[156] != _PAX
                or not 0 <= size <= len(piece) - at - BLOCK
                or _PAX_MATTERS.search(piece, at + BLOCK, at + BLOCK + size)
            ):
                size = _unusual(run, shard, tar, header[156:157], size)
            position = data + (size + BLOCK - 1) // BLOCK * BLOCK
    except DataError as fault:
        run.fault, run.ended = fault, True
    except ValueError:  # an 8 or a 9 among the digits
        run.fault, run.ended = _broken_size(shard, position), True
    run.position = position
    run.headers = np.frombuffer(b"".join(headers), dtype=np.uint8).reshape(-1, BLOCK)
    return run


def _unusual(run: _Run, shard: str, tar: Content, kind: bytes, size: int) -> int:
    """Note a member that is no plain file, or of which another has said something; gives the size of its data."""
    position = run.positions[-1]
    data, end = position + BLOCK, len(tar)
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
        if run.long_name is not None:
            if len(run.long_name) > _MAX_NAME:
                raise DataError(
                    f"shard {shard} has a name of {len(run.long_name)} characters at byte {position}"
                )
            run.long_names[len(run.files)] = run.long_name
        run.files.append(len(run.positions) - 1)
        run.offsets.append(data)
        run.sizes.append(size)
    if kind not in _ABOUT_NEXT:
        run.said, run.long_name, run.long_size = False, None, None
    return size


def _note(run: _Run, shard: str, kind: bytes, extra: bytes) -> None:
    """What a member says of the next one; refused where programs do not agree on what that is."""
    position = run.positions[-1]
    name: str | None = None
    if kind == b"L":
        name = text_of(extra)
    elif kind in (b"x", b"X", b"g") and _PAX_MATTERS.search(extra):
        records = pax_records(extra)
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
    zeros, block = other - position, other - other % BLOCK
    if other == end:
        if zeros <= 2 * BLOCK + max(_RECORD, min(end & -end, _MAX_RECORD)):  # & gives the power of two in it
            return
    elif zeros <= 3 * BLOCK + _MAX_RECORD and has_checksum(tar[block : block + BLOCK]):
        raise DataError(
            f"shard {shard} holds more than one archive, the second begins at byte {block}: give each its own file"
        )
    raise TruncatedError(
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


def _truncated(shard: str, what: str) -> TruncatedError:
    return TruncatedError(f"shard {shard} is truncated: {what}; fetch or write it again")


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
