"""What the 512-byte headers of a tar say, many at a time where that is possible.

In shapes, N is the number of headers.
"""

import re

import numpy as np
import numpy.typing as npt

__all__ = [
    "BLOCK",
    "count_sound",
    "has_checksum",
    "names_of",
    "pax_records",
    "plain_sizes",
    "size_of",
    "text_of",
]

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
