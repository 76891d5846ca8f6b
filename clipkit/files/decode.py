"""Decode image files: which formats are read, by which library, and which files are refused.

JPEGs are decoded by simplejpeg, which is faster; everything else, CMYK and what simplejpeg refuses by Pillow. As in
CLIP, by default an EXIF orientation is ignored and an alpha channel dropped (clipkit/files/traits.py). Of an
animation the first frame is used.

Files from the web may be made to take minutes or all memory. Refused before unpacking are more pixels than Pillow
allows, very large files, JPEGs with many scans (each goes over all pixels; 125 kB took 20 s), TIFFs with tiles far
larger than the image, and large files in formats that Pillow decodes in Python.

Letters: H, W sides of an image.
"""

import io
import re
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from clipkit.errors import DataError
from clipkit.files.traits import (
    PILLOW_ERRORS,
    Decoding,
    Traits,
    align_transparent_color,
    flattened,
    is_transparent,
    orientation_of,
)

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "MAX_BYTES",
    "MAX_PIXELS",
    "Decoded",
    "decode_file",
    "decode_image",
    "decode_jpeg",
    "jpeg_orientation",
    "jpeg_size",
    "open_image",
    "pillow_errors",
    "plain_jpeg_size",
    "upright_array",
]

MAX_PIXELS = 178_956_970  # Pillow's own limit against decompression bombs
MAX_BYTES = 64 << 20  # of a file that is decoded for training
_MAX_SCANS = 500  # of a JPEG; progressive ones have about ten
_MAX_SCANNED = 16 * MAX_PIXELS  # pixels times scans
_MAX_SEGMENTS = 1000  # before a JPEG's first scan
_EXIF, _XMP = b"Exif\0\0", b"http://ns.adobe.com/xap/1.0/\0"  # start a JPEG's APP1 segment
_ROTATED_BY_XMP = re.compile(rb'tiff:Orientation(="|>)[02-9]')
# by the start of EXIF data: a struct format's byte order, and the tag of orientation 1 as cameras write it
_UPRIGHT_TAGS = {
    b"II*\0": ("<", b"\x12\x01\x03\x00\x01\x00\x00\x00\x01\x00"),
    b"MM\0*": (">", b"\x01\x12\x00\x03\x00\x00\x00\x01\x00\x01"),
}
_MAX_TILE = 2**24  # pixels of a TIFF's tile, unless the image has a quarter of them
_MAX_SLOW = 1 << 20  # bytes of a file that Pillow decodes in Python
_MAX_COMMENTS = 1000  # of a PPM written as text; for each, Pillow copies up to a MiB
# Pillow reads more formats, among them EPS, which it passes to another program
_FORMATS = (
    "PNG", "JPEG", "WEBP", "GIF", "AVIF", "TIFF", "BMP", "DIB", "ICO", "JPEG2000", "PCX", "PPM", "QOI", "TGA",
)  # fmt: skip
_REFUSED_BY_SIMPLEJPEG = (ValueError, KeyError)  # KeyError for an unknown chroma subsampling
_TEXT = (b"P1", b"P2", b"P3")  # PPM written as text


class Decoded(NamedTuple):
    """An image's pixels, (H, W, 3) uint8 RGB, and the file's traits."""

    pixels: npt.NDArray[np.uint8]
    traits: Traits


def decode_image(data: bytes, *, reduce: int = 1) -> npt.NDArray[np.uint8]:
    """Decode a JPEG, PNG, WebP, GIF (first frame), TIFF, BMP, AVIF, JPEG 2000 or similar to (H, W, 3) uint8 RGB.

    Grayscale of 16 bits is scaled to 8; of 32 bits or floats it is refused, as its range is unknown.
    ``clipkit.model.preprocess.eval_pixels`` is for evaluation.

    Args:
        data: the file's bytes.
        reduce: 2, 4 or 8 decode a JPEG that has a ``jpeg_size`` at a half, a quarter or an eighth of its sides,
            rounded up, in less time; other images keep their size.

    Raises:
        DataError: the image does not decode, is truncated, has more than ``MAX_PIXELS`` pixels or ``MAX_BYTES``
            bytes, or is made to take much time or memory.
    """
    return decode_file(data, reduce=reduce).pixels


_AS_OPEN_CLIP = Decoding()


def decode_file(data: bytes, *, reduce: int = 1, decoding: Decoding = _AS_OPEN_CLIP) -> Decoded:
    """Decode like ``decode_image``, with transparency and orientation treated as ``decoding`` says.

    Raises:
        DataError: as for ``decode_image``.
    """
    if len(data) > MAX_BYTES:
        raise DataError(f"file of more than {MAX_BYTES >> 20} MiB")
    transparent = False
    if (pixels := decode_jpeg(data, reduce=reduce)) is not None:
        orientation = jpeg_orientation(data)
    else:
        with pillow_errors(), open_image(data) as opened:
            image = opened
            image.load()
            transparent, orientation = is_transparent(image), orientation_of(image)
            if transparent and decoding.background is not None:
                image = flattened(image, decoding.background)
            # Pillow would clip values above 255, and floats in 0-1 to black
            if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):
                gray = (np.asarray(image) >> 8).astype(np.uint8)
                pixels = np.repeat(gray[..., None], 3, axis=2)
            elif image.mode in ("I", "F"):
                raise DataError("32-bit grayscale has no known range: store it with 8 or 16 bits")
            else:
                pixels = np.asarray(image if image.mode == "RGB" else image.convert("RGB"))
    if decoding.upright:
        pixels = upright_array(pixels, orientation)
    return Decoded(pixels, Traits(transparent=transparent, rotated=orientation != 1))


def decode_jpeg(data: bytes, *, reduce: int = 1) -> npt.NDArray[np.uint8] | None:
    """Decode a JPEG to (H, W, 3) uint8 RGB, or return None if only Pillow can.

    Raises:
        DataError: it has too many pixels or scans.
    """
    if (size := jpeg_size(data)) is None:
        return None
    height, width = size
    import simplejpeg

    least = {}
    if reduce > 1:
        least = {"min_height": -(-height // reduce), "min_width": -(-width // reduce), "min_factor": reduce}
    try:
        decoded: npt.NDArray[np.uint8] = simplejpeg.decode_jpeg(data, colorspace="RGB", **least)
    except _REFUSED_BY_SIMPLEJPEG:
        return None  # Pillow has the clearer message, and reads some files that simplejpeg refuses
    return decoded


def upright_array(pixels: npt.NDArray[np.uint8], orientation: int) -> npt.NDArray[np.uint8]:
    """Apply an EXIF orientation to (H, W, 3) pixels; the result is contiguous."""
    if orientation == 1:
        return pixels
    if orientation >= 5:
        pixels = pixels.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)


def jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Height and width of a JPEG that simplejpeg decodes, from its header; None for any other image.

    Raises:
        DataError: it has too many pixels or scans.
    """
    if not data.startswith(b"\xff\xd8\xff"):
        return None
    import simplejpeg

    try:
        height, width, color_space, _ = simplejpeg.decode_jpeg_header(data)
    except _REFUSED_BY_SIMPLEJPEG:
        return None
    if color_space in ("CMYK", "YCCK"):
        return None
    _refuse_too_large(height, width)
    _refuse_many_scans(data, height * width)
    return height, width


def plain_jpeg_size(data: bytes) -> tuple[int, int] | None:
    """``jpeg_size`` of a sequential JPEG that is not truncated, which every decoder reads; else None."""
    whole = data.endswith(b"\xff\xd9") and len(data) <= MAX_BYTES
    return jpeg_size(data) if whole and _has_one_scan(data) else None


def _refuse_too_large(height: int, width: int) -> None:
    if height * width > MAX_PIXELS:
        raise DataError(f"image has more than {MAX_PIXELS} pixels")


def _refuse_many_scans(data: bytes, pixels: int) -> None:
    if _has_one_scan(data):
        return
    # in a JPEG's coded data a zero follows each 0xff; bytes in its segments and after its end may count too
    scans = data.count(b"\xff\xda")
    if scans > min(_MAX_SCANS, _MAX_SCANNED // max(1, pixels)):
        raise DataError(f"JPEG has {scans} scans, each of which goes over all pixels")


def _has_one_scan(data: bytes) -> bool:
    """Check whether a JPEG surely ends with its first scan: it is sequential, and the scan has all colors."""
    colors, at = 0, 2
    for _ in range(_MAX_SEGMENTS):
        if at + 10 > len(data) or data[at] != 0xFF:
            return False
        marker, length = data[at + 1], int.from_bytes(data[at + 2 : at + 4], "big")
        if marker == 0xDA:  # start of scan
            return 0 < colors == data[at + 4]
        if marker in (0xC0, 0xC1, 0xC9):  # frames without progression
            colors = data[at + 9]
        elif not (0xE0 <= marker <= 0xEF or marker in (0xC4, 0xCC, 0xDB, 0xDD, 0xFE)):  # tables and comments
            return False
        at += 2 + length
    return False


def jpeg_orientation(data: bytes) -> int:
    """Return the EXIF orientation of a JPEG, 1 to 8, from its header; 1 if upright or the tag is damaged.

    Pillow, which takes as long as decoding a small image, is only asked if the header may hold another value.
    """
    at = 2
    for _ in range(_MAX_SEGMENTS):
        marker = data[at : at + 2]
        if marker == b"\xff\xda":  # the scan begins
            return 1
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if marker[:1] != b"\xff" or (marker == b"\xff\xe1" and _may_rotate(data[at + 4 : end])):
            break
        at = end
    try:
        with pillow_errors(), open_image(data) as image:
            return orientation_of(image)
    except DataError:
        return 1


def _may_rotate(segment: bytes) -> bool:
    """Check whether a JPEG's APP1 segment may hold an orientation other than upright."""
    if segment.startswith(_XMP):
        return _ROTATED_BY_XMP.search(segment) is not None
    if not segment.startswith(_EXIF):
        return False
    exif = segment[len(_EXIF) :]
    if exif[:4] not in _UPRIGHT_TAGS or len(exif) < 8:
        return True
    order, upright = _UPRIGHT_TAGS[exif[:4]]
    (first,) = struct.unpack_from(order + "I", exif, 4)
    if len(exif) < first + 2:
        return True
    (count,) = struct.unpack_from(order + "H", exif, first)
    if len(exif) < first + 2 + 12 * count:  # truncated, or continued in another segment
        return True
    tags = (exif[start : start + 10] for start in range(first + 2, first + 2 + 12 * count, 12))
    return any(tag[:2] == upright[:2] and tag != upright for tag in tags)


@cache
def _formats() -> tuple[str, ...]:
    from PIL import Image

    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)  # AVIF and QOI came with later versions


def open_image(content: "bytes | Image") -> "Image":
    """Open a file's bytes with Pillow without decoding it; call it inside ``pillow_errors``.

    Raises:
        DataError: the image has more than ``MAX_PIXELS`` pixels, or is made to take much time or memory.
    """
    from PIL import Image

    if not isinstance(content, bytes):
        _refuse_too_large(content.height, content.width)
        align_transparent_color(content)
        return content
    if content.startswith((b"qoif", *_TEXT)) and len(content) > _MAX_SLOW:
        raise DataError(f"file of more than {_MAX_SLOW >> 20} MiB in a format that is slow to read")
    if content.startswith(_TEXT) and content.count(b"#") > _MAX_COMMENTS:
        raise DataError("file with too many comments, which are slow to read")
    image = Image.open(io.BytesIO(content), formats=_formats())
    _refuse_too_large(image.height, image.width)
    if content.startswith(b"\xff\xd8\xff"):
        _refuse_many_scans(content, image.height * image.width)
    if image.format == "TIFF":  # Pillow unpacks whole tiles, however little of them the image needs
        tags = getattr(image, "tag_v2", {})
        wide, high = tags.get(322, 0), tags.get(323, 0)
        if not isinstance(wide, int) or not isinstance(high, int):
            raise DataError("image does not decode: the size of its tiles is not a number")
        if wide * high > max(_MAX_TILE, 4 * image.width * image.height):
            raise DataError(f"tiles of {wide} x {high} pixels are larger than the image")
    align_transparent_color(image)
    return image


@contextmanager
def pillow_errors() -> Iterator[None]:
    """Convert errors that Pillow raises to DataError, and ignore its warnings."""
    from PIL import Image, UnidentifiedImageError

    with _silence:
        try:
            yield
        except UnidentifiedImageError as error:
            raise DataError("not an image in a known format") from error
        except Image.DecompressionBombError as error:
            raise DataError(f"image has more than {MAX_PIXELS} pixels") from error
        except PILLOW_ERRORS as error:
            raise DataError(f"image does not decode: {error}") from error


class _Silence:
    """Ignore Pillow's warnings; threads that decode at the same time share one change of Python's filters."""

    def __init__(self) -> None:
        self._lock, self._inside = Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._filters = warnings.catch_warnings()
                self._filters.__enter__()
                warnings.filterwarnings("ignore", module="PIL")
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._filters.__exit__(None, None, None)


_silence = _Silence()
