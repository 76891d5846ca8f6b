"""The ``.npy`` members of a sample: a multi-hot label, or facts about its picture as columns.

Only plain arrays of whole numbers, floats and booleans are read, and no header is believed before the bytes are
there; nothing in them is ever unpickled.
"""

import math
import re
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from clipkit.errors import DataError

__all__ = ["MAX_NPY_BYTES", "array_of"]

MAX_NPY_BYTES = 4 << 20  # of one sample: half a million classes of 8 bytes
_MAX_HEADER = 10_000  # bytes
_MAX_SIDES = 8
# a Python dictionary, as numpy writes it; one of records or with other spaces is none of ours
_FORM = re.compile(
    rb"\{'descr': '([<>|=][a-zA-Z])([0-9]{0,9})', 'fortran_order': (True|False), "
    rb"'shape': \(([0-9, ]{0,99})\), \} *\n"
)
_MAGIC = b"\x93NUMPY"
_KINDS = "biuf"  # booleans, whole numbers, floats

Array = npt.NDArray[Any]


def array_of(data: bytes) -> Array:
    """The array of an ``.npy`` file of numbers, read-only.

    Raises:
        DataError: it is no such file, is of another dtype (objects, text, records), or not whole.
    """
    if data[:6] != _MAGIC or len(data) < 12 or data[6] not in (1, 2):
        raise DataError("its npy is no array of numpy")
    wide = data[6] == 2
    start = 12 if wide else 10
    length = int.from_bytes(data[8:start], "little")
    if length > _MAX_HEADER or start + length > len(data):
        raise DataError("its npy has a header of a wrong length")
    dtype, shape, in_columns = _header(data[start : start + length])
    count = math.prod(shape)
    if count * dtype.itemsize != len(data) - start - length:
        raise DataError(f"its npy states {count} values of {dtype}, its bytes are others")
    flat = np.frombuffer(data, dtype, count, start + length)
    return flat.reshape(shape, order="F" if in_columns else "C")


@lru_cache(maxsize=64)  # the samples of a dataset have the same header
def _header(header: bytes) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    match = _FORM.fullmatch(header)
    if match is None:
        raise DataError("its npy has no sound header of an array of numbers")
    kind, size, in_columns, sides = (one.decode() for one in match.groups())
    if kind[1] == "O":
        raise DataError("its npy holds objects, which could run a program; numbers are read alone")
    try:
        dtype = np.dtype(kind + size)
        shape = tuple(int(side) for side in sides.replace(" ", "").split(",") if side)
    except (TypeError, ValueError) as error:
        raise DataError("its npy has no sound header of an array of numbers") from error
    if dtype.kind not in _KINDS:
        raise DataError(f"its npy holds {dtype} values; numbers are read alone")
    if len(shape) > _MAX_SIDES:
        raise DataError(f"its npy has {len(shape)} dimensions")
    return dtype, shape, in_columns == "True"
