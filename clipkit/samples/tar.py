"""List the files of an uncompressed tar with their positions, reading only the 512-byte headers.

Errors for damaged tars state the position of the damage. Memory does not depend on sizes in headers. In shapes, N
is the number of headers.
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

BLOCK = 512  # size of a header in bytes; data start at a multiple of it
_OCTAL_PLACES = (8 ** np.arange(5, -1, -1)).astype(np.uint32)  # place values of six digits
_SIZE_PLACES = 8.0 ** np.arange(10, -1, -1)  # place values of eleven digits; sums are exact in float64
_PLAIN, _PAX = b"0x"  # kinds of nearly all members
_MARK = b"ustar"  # magic bytes of all headers except the oldest format
_PIECE = 4096  # bytes read at a time
_BLANK = b" \0"
_AT_ONCE = 4096  # headers checked together
_WINDOW = 2 << 20  # bytes scanned at a time
_FEW = 64  # headers to follow after a scan found too few
_WORTH = 384  # headers per window above which scanning is faster than following
_FILE = (b"0", b"\0", b"7")
_WITHOUT_DATA = (b"1", b"2", b"3", b"4", b"5", b"6")  # links, devices, folders, pipes
_ABOUT_NEXT = (b"L", b"K", b"x", b"X", b"g")  # members that describe the following ones
_PAX_WORDS = (b"path=", b"size=", b"GNU.sparse.")
_PAX_MATTERS = re.compile(b"|".join(map(re.escape, _PAX_WORDS)))
_PAX_SIZE = re.compile(r"[0-9]{1,19}")
_PAX_LENGTH = re.compile(rb"(\d{1,7}) ")
_MAX_EXTRA_BYTES = 1 << 20  # size limit of members that describe another one; far more than needed
_CHUNK = 1 << 20  # bytes searched at a time
_RECORD = 20 * BLOCK  # archives are padded to a multiple of this size by default
_MAX_RECORD = 1 << 20  # largest other record size
_MAX_NAME = 4096  # characters
_MAX_ZEROS = 1 << 26  # bytes checked after the end of the archive; a sparse file may have any size


class TruncatedError(DataError):
    """A truncated or partially downloaded tar; everything before that point is intact."""


class Content(Protocol):
    """The content of a tar; ``bytes`` implement this protocol."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> bytes: ...


def sample_name(name: str) -> tuple[str, str] | None:
    """Split a member's name into WebDataset's key (up to the first dot of the file name) and lower-case extension.

    Return None for hidden files and names without an extension, which are not part of a sample.
    """
    folder, slash, file_name = name.rpartition("/") if "/" in name else ("", "", name)
    stem, _, extension = file_name.partition(".")
    if not extension or not stem:
        return None
    return folder + slash + stem if folder else stem, extension.lower()


def list_tar_files(path: Path, *, called: str = "") -> Iterator[tuple[str, int, int]]:
    """Yield name, data offset and size of every regular file of a tar; supports GNU and PAX long names.

    Raises:
        TruncatedError: the file is truncated; raised after all intact members.
        DataError: it is compressed, damaged or not a tar; raised after all members before the damage.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        yield from list_tar_content(called or str(path), FileContent(file.fileno()), at_hand=True)


class FileContent:
    """The bytes of an open file; not memory-mapped, because truncating a mapped file kills the process."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._size = os.fstat(descriptor).st_size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice, /) -> bytes:
        return os.pread(self._descriptor, part.stop - part.start, part.start)


def list_tar_content(shard: str, tar: Content, *, at_hand: bool = False) -> Iterator[tuple[str, int, int]]:
    """List a tar like ``list_tar_files``; ``shard`` is its name in messages.

    Each header's size gives the position of the next one. Headers are read a few thousand at a time and then
    checked together before they are used; checking them one by one would take most of the time. If the content is
    ``at_hand`` (as fast as memory) and its members are small, headers are found by scanning all blocks for their
    magic bytes, and must form a chain.
    """
    if len(tar) == 0:
        raise TruncatedError(f"shard {shard} is empty (0 bytes)")
    run = _Run(position=0)
    steps = _FEW
    while not run.ended:
        scanned = _scan(tar, run) if at_hand else None
        if scanned is None or len(scanned.headers) < _WORTH:
            run = _follow(shard, tar, run, most=steps if at_hand else _AT_ONCE)
            steps = min(4 * steps, _AT_ONCE)  # headers to follow before the next scan
        else:
            run = scanned
            steps = _FEW
        sound = _count_sound(run.headers)
        files = bisect_left(run.files, sound)
        names = _names(run.headers[run.files[:files]])
        for index, name in run.long_names.items():
            if index < files:
                names[index] = name
        yield from zip(names, run.offsets, run.sizes)  # noqa: B905 (only sound headers have names)
        if sound < len(run.headers):
            header = run.headers[sound].tobytes()
            position = run.positions[sound]
            if position == 0 and header[:2] in (b"\x1f\x8b", b"BZ", b"\xfd7", b"(\xb5"):
                raise DataError(
                    f"shard {shard} is compressed: random access needs a plain tar, unpack it first"
                )
            what = "is not a tar file"
            if position != 0:
                what = f"has a broken header at byte {position}"
            raise _damaged(shard, what)
        if run.fault is not None:
            raise run.fault


@dataclass(kw_only=True, slots=True)
class _Run:
    """Consecutive headers, not yet checked.

    Attributes:
        position: position of the next header.
        headers: (N, 512) uint8.
        positions: positions of the N headers.
        files: indices of the headers of regular files.
        offsets: positions of the data of these files.
        sizes: sizes of these files in bytes.
        long_names: names given by a preceding header, by index in ``files``.
        extended: whether a preceding header describes the next file: ``long_name``, ``long_size`` or both.
        fault: the error at which reading ended, if any.
        ended: whether reading has ended, with or without an error.
    """

    position: int
    headers: npt.NDArray[np.uint8] = field(default_factory=lambda: np.empty((0, BLOCK), np.uint8))
    positions: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    long_names: dict[int, str] = field(default_factory=dict)
    extended: bool = False
    long_name: str | None = None
    long_size: int | None = None
    fault: DataError | None = None
    ended: bool = False


def _scan(tar: Content, before: _Run) -> _Run | None:
    """Find the headers in a window, up to the first that is unusual or breaks the chain; None if there is none.

    Also returns None if a preceding header describes the next file.
    """
    start = before.position
    window = tar[start : start + _WINDOW]
    if before.extended or len(window) < BLOCK:
        return None
    blocks = np.frombuffer(window, dtype=np.uint8, count=len(window) // BLOCK * BLOCK).reshape(-1, BLOCK)
    at = np.flatnonzero(blocks[:, 257] == _MARK[0])
    headers = blocks[at]
    marked = np.ascontiguousarray(headers[:, 257:262]).view("S5").ravel() == _MARK
    if not marked.all():
        # (N,), (N, 512) blocks that look like headers
        at = at[marked]
        headers = headers[marked]
    if len(at) == 0:
        return None
    # sizes in the usual form, eleven octal digits; -1 for other forms
    digits = headers[:, 124:135] - np.uint8(ord("0"))
    sizes = (digits @ _SIZE_PLACES).astype(np.int64)
    if (digits > 7).any():
        sizes[(digits > 7).any(1)] = -1
    sizes[(headers[:, 135] != 0) & (headers[:, 135] != ord(" "))] = -1
    after = at + 1 + -(-sizes // BLOCK)
    is_file = headers[:, 156] == _PLAIN
    is_pax = headers[:, 156] == _PAX
    usual = (sizes >= 0) & (start + (at + 1) * BLOCK + sizes <= len(tar)) & (is_file | is_pax)
    usual &= at == np.concatenate([[0], after[:-1]])
    # PAX members of one block without relevant keywords need no special treatment
    first = at[is_pax] + 1
    lengths = sizes[is_pax]
    short = (lengths >= 0) & (lengths <= BLOCK) & (first < len(blocks))
    if short.any():
        content = blocks[first[short], : lengths[short].max()].tobytes()
        matches = [content.find(word) for word in _PAX_WORDS if word in content]
        if matches:
            short[np.flatnonzero(short)[min(matches) // (len(content) // int(short.sum())) :]] = False
    usual[is_pax] &= short
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


def _follow(shard: str, tar: Content, before: _Run, *, most: int) -> _Run:
    position = before.position
    run = _Run(
        position=position, extended=before.extended, long_name=before.long_name, long_size=before.long_size
    )
    positions = run.positions
    files = run.files
    offsets = run.offsets
    sizes = run.sizes
    end = len(tar)
    headers: list[bytes] = []
    # headers are close together if members are small
    piece = b""
    start = position
    try:
        while len(headers) < most:
            at = position - start
            header = piece[at : at + BLOCK]
            if len(header) < BLOCK:
                piece = tar[position : position + _PIECE]
                start = position
                at = 0
                header = piece[:BLOCK]
            if len(header) < BLOCK:
                stop = min(end, position + len(header))  # the file may have been truncated meanwhile
                raise _truncated(shard, f"it has no end mark; it stops at byte {stop}")
            if header[0] == 0 and not any(header):
                _check_trailing_zeros(shard, tar, position, end)
                run.ended = True
                break
            headers.append(header)
            positions.append(position)
            digits = header[124:135]
            data = position + BLOCK
            size = int(digits, 8) if digits.isdigit() and header[135] in _BLANK else _unusual_size(header)
            if header[156] == _PLAIN and not run.extended and 0 <= size <= end - data:
                files.append(len(headers) - 1)
                offsets.append(data)
                sizes.append(size)
            elif (
                header[156] != _PAX
                or not 0 <= size <= len(piece) - at - BLOCK
                or _PAX_MATTERS.search(piece, at + BLOCK, at + BLOCK + size)
            ):
                size = _add_unusual(run, shard, tar, header[156:157], size)
            position = data + (size + BLOCK - 1) // BLOCK * BLOCK
    except DataError as fault:
        run.fault = fault
        run.ended = True
    except ValueError:  # an invalid octal digit
        run.fault = _damaged(shard, f"has a broken size at byte {position}")
        run.ended = True
    run.position = position
    run.headers = np.frombuffer(b"".join(headers), dtype=np.uint8).reshape(-1, BLOCK)
    return run


def _add_unusual(run: _Run, shard: str, tar: Content, kind: bytes, size: int) -> int:
    """Add a member that is not a plain file or is described by a preceding header; return the size of its data."""
    position = run.positions[-1]
    data = position + BLOCK
    end = len(tar)
    if size < 0:
        raise _damaged(shard, f"has a broken size at byte {position}")
    if kind in _WITHOUT_DATA:
        size = 0  # headers of hard links may contain the target's size
    elif run.long_size is not None and kind not in _ABOUT_NEXT:
        size = run.long_size
    if data + size > end:
        raise _truncated(shard, f"a member at byte {position} needs {data + size} bytes, the file has {end}")
    sparse = f"shard {shard} contains a sparse file at byte {position}: write it without --sparse"
    if kind in _ABOUT_NEXT:
        if size > _MAX_EXTRA_BYTES:
            raise DataError(f"shard {shard} has a name of {size} bytes at byte {position}; write it again")
        extra = tar[data : data + size]
        if len(extra) < size:
            raise _truncated(shard, f"it stops at byte {data + len(extra)}")
        # rejected if tools would interpret it differently
        ambiguous = f"has a broken extended header at byte {position}"
        name: str | None = None
        if kind == b"L":
            name = _text(extra)
        elif kind in (b"x", b"X", b"g") and _PAX_MATTERS.search(extra):
            records = _pax_records(extra)
            if records is None or (kind == b"g" and records.keys() & {"path", "size"}):
                raise _damaged(shard, ambiguous)
            if any(key.startswith("GNU.sparse.") for key in records):
                raise DataError(sparse)
            name = records.get("path")
            size_text = records.get("size")
            if size_text is not None:
                if run.long_size is not None or not _PAX_SIZE.fullmatch(size_text):
                    raise _damaged(shard, ambiguous)
                run.extended = True
                run.long_size = int(size_text)
        if name is not None:
            if run.long_name is not None:
                raise _damaged(shard, ambiguous)
            run.extended = True
            run.long_name = name
        return size
    if kind == b"S":
        raise DataError(sparse)
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
    run.extended = False
    run.long_name = None
    run.long_size = None
    return size


def _check_trailing_zeros(shard: str, tar: Content, position: int, end: int) -> None:
    """Check that blocks of zeros mark the end of the archive, not a gap left by an incomplete download.

    Only zeros may follow the archive, up to a multiple of the record size, which is 20 blocks or a power of two of
    up to 1 MiB (other values of ``tar -b`` are not in use).
    """
    far = min(end, position + _MAX_ZEROS)
    other = far  # position of the first byte that is not zero
    for start in range(position, far, _CHUNK):
        chunk = tar[start : min(far, start + _CHUNK)]
        if len(chunk) < min(far - start, _CHUNK):
            raise _truncated(shard, f"it stops at byte {start + len(chunk)}")
        rest = chunk.lstrip(b"\0")
        if rest:
            other = start + len(chunk) - len(rest)
            break
    zeros = other - position
    block = other - other % BLOCK
    if other == end:
        power = end & -end  # largest power of two that divides end
        if zeros <= 2 * BLOCK + max(_RECORD, min(power, _MAX_RECORD)):
            return
    elif zeros <= 3 * BLOCK + _MAX_RECORD:
        header = tar[block : block + BLOCK]
        if len(header) == BLOCK and _count_sound(np.frombuffer(header, dtype=np.uint8)[None]) == 1:
            raise DataError(
                f"shard {shard} contains more than one archive, the second starts at byte {block}: "
                "store each archive in a separate file"
            )
    raise TruncatedError(
        f"shard {shard} seems incompletely downloaded: zeros from byte {position} to {other} of {end}; "
        "fetch or write it again"
    )


def _truncated(shard: str, what: str) -> TruncatedError:
    return TruncatedError(f"shard {shard} is truncated: {what}; fetch or write it again")


def _damaged(shard: str, what: str) -> DataError:
    return DataError(f"shard {shard} {what}; fetch or write it again")


def _count_sound(headers: npt.NDArray[np.uint8]) -> int:
    fields = headers[:, 148:156]
    # the checksum is computed with spaces in its own eight bytes
    sums = headers.sum(axis=1, dtype=np.uint32) - fields.sum(axis=1, dtype=np.uint32) + np.uint32(8 * 32)
    digits = fields[:, :6] - np.uint8(ord("0"))
    octal_sums = digits @ _OCTAL_PLACES
    unusual = (digits > 7).any(1) | (fields[:, 6] != 0)
    for row in np.flatnonzero(unusual).tolist():
        written = _octal(fields[row].tobytes())
        octal_sums[row] = written if written is not None and written < 2**32 else 0
    wrong = np.flatnonzero(octal_sums != sums)  # no sum is 0
    return int(wrong[0]) if len(wrong) else len(headers)


def _unusual_size(header: bytes) -> int:
    # base 256 if the first bit is set, for 8 GiB and more; negative if the second bit is set
    if header[124] == 0x80:
        return int.from_bytes(header[125:136], "big")
    size = _octal(header[124:136])
    return -1 if size is None else size


def _octal(field: bytes) -> int | None:
    """Parse octal digits surrounded by spaces; 0 for an empty field, None if invalid."""
    digits = field.split(b"\0", 1)[0].strip(b" ")
    # int() alone would accept signs, underscores and prefixes
    if digits.strip(b"01234567"):
        return None
    return int(digits or b"0", 8)


def _text(data: bytes) -> str:
    # escape bytes that are not UTF-8, so that names stay distinct and printable
    return data.split(b"\0", 1)[0].decode("utf-8", "backslashreplace")


def _names(headers: npt.NDArray[np.uint8]) -> list[str]:
    fields = headers[:, :100].copy().view("S100").ravel().tolist()  # trailing zeros are removed
    together = b"\0".join(fields)
    if together.count(b"\0") >= len(fields):  # a name contains zeros, or there is none
        names = list(map(_text, fields))
    else:
        names = together.decode("utf-8", "backslashreplace").split("\0")
    for row in np.flatnonzero(headers[:, 345]).tolist():  # with a prefix
        if headers[row, 257:263].tobytes() == b"ustar\0":
            names[row] = f"{_text(headers[row, 345:500].tobytes())}/{names[row]}"
    return names


def _pax_records(data: bytes) -> dict[str, str] | None:
    """Parse the ``LENGTH KEY=VALUE\\n`` records of a PAX header; None if they are malformed."""
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
