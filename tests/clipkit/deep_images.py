"""Deep grayscale image files: PNG, PPM and TIFF in all types of values that Pillow reads."""

import io
import struct
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

__all__ = ["KINDS", "color_png", "encode_deep", "tiff_of"]

Values = npt.NDArray[Any]

# by name: the container, and the type of the values in the file
KINDS = {
    "png": ("PNG", "uint16"), "ppm": ("PPM", "uint16"), "tiff": ("TIFF", "<u2"), "big-endian tiff": ("TIFF", ">u2"),
    "signed tiff": ("TIFF", "<i2"), "big-endian signed tiff": ("TIFF", ">i2"), "uint32 tiff": ("TIFF", "<u4"),
    "int32 tiff": ("TIFF", "<i4"), "big-endian int32 tiff": ("TIFF", ">i4"), "float tiff": ("TIFF", "<f4"),
    "big-endian float tiff": ("TIFF", ">f4"),
}  # fmt: skip


def encode_deep(values: Values, container: str) -> bytes:
    """Encode values, (H, W), of a type in ``KINDS``, without changing them."""
    height, width = values.shape
    if container == "PPM":
        return b"P5\n%d %d\n65535\n" % (width, height) + values.astype(">u2").tobytes()
    if container == "TIFF":
        return tiff_of(values)
    file = io.BytesIO()
    Image.fromarray(values.astype(np.uint16)).save(file, container)
    return file.getvalue()


def tiff_of(values: Values, *, photometric: int = 1, bits: int = 0, content: bytes = b"") -> bytes:
    """Encode values as an uncompressed TIFF, in their byte order.

    Args:
        values: (H, W), or (H, W, 3) for colors.
        photometric: 0 if white is zero, 1 if black is zero.
        bits: of each value, by default those of their type.
        content: the packed values, by default those of the array.
    """
    order = ">" if values.dtype.str[0] == ">" else "<"
    sample_format = {"u": 1, "i": 2, "f": 3}[values.dtype.kind]
    content = content or values.tobytes()
    height, width = values.shape[:2]
    bands = values.size // (height * width)
    tags = {
        256: width, 257: height, 258: bits or 8 * values.dtype.itemsize, 259: 1,
        262: photometric if bands == 1 else 2, 273: 8, 277: bands, 278: height, 279: len(content),
        339: sample_format,
    }  # fmt: skip
    directory = struct.pack(order + "H", len(tags))
    numbers = b""
    numbers_start = 8 + len(content) + 2 + 12 * len(tags) + 4
    for tag, value in tags.items():
        if tag in (258, 339) and bands > 1:  # one number for each color, after the directory
            directory += struct.pack(order + "HHII", tag, 4, bands, numbers_start + len(numbers))
            numbers += struct.pack(order + f"{bands}I", *[value] * bands)
        else:
            directory += struct.pack(order + "HHII", tag, 4, 1, value)
    header = (b"II" if order == "<" else b"MM") + struct.pack(order + "HI", 42, 8 + len(content))
    return header + content + directory + bytes(4) + numbers


def color_png(values: Values) -> bytes:
    """Encode values, (H, W, C), as a PNG of 16 bits with gray and alpha, RGB or RGBA, which Pillow cannot write."""
    height, width, bands = values.shape
    color = {2: 4, 3: 2, 4: 6}[bands]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    content = b"\x89PNG\r\n\x1a\n"
    for kind, chunk in (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 16, color, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    ):
        content += struct.pack(">I", len(chunk)) + kind + chunk + struct.pack(">I", zlib.crc32(kind + chunk))
    return content
