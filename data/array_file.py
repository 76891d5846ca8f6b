"""Small files of arrays: a checksum and a line of JSON that says what follows, then arrays as they lie in memory.

They are mapped, not read, so that many processes share one copy and only what is looked at takes memory; opening
one costs a tenth of what opening an ``npz`` does. Whatever is wrong with a file, it counts as not there: all that
is kept so can be made again.
"""

import json
import math
import mmap
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Strings", "pack_arrays", "read_arrays", "unpack_arrays", "write_arrays"]

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
    """Store the same in a file; aside first, then renamed.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_bytes(pack_arrays(about, arrays))
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def read_arrays(path: Path) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]] | None:
    """What ``write_arrays`` stored; None where there is no such file, or no whole one."""
    with suppress(OSError, ValueError), path.open("rb") as file:
        return unpack_arrays(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    return None
