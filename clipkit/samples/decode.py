"""Decode image files, and reject files that would take too much time or memory.

JPEGs are decoded with simplejpeg, which is faster than Pillow; other formats, CMYK JPEGs and files that simplejpeg
rejects are decoded with Pillow. As in CLIP, by default the EXIF orientation is ignored and the alpha channel
dropped (clipkit/samples/traits.py). Deep grayscale images are mapped to 8 bits (clipkit/samples/depth.py). Only the
first frame of an animation is used.

Malicious files from the web may take minutes to decode or exhaust memory. The following are rejected before
decoding: images with more pixels than Pillow allows, very large files, JPEGs with many scans (each scan passes over
all pixels; 125 kB took 20 s), TIFFs with tiles far larger than the image, and large files in formats that Pillow
decodes in Python.

Letters: H height, W width.
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
from clipkit.samples.depth import STRETCH
from clipkit.samples.image_types import describe_unreadable
from clipkit.samples.traits import (
    PILLOW_ERRORS,
    Decoding,
    Traits,
    align_transparent_color,
    apply_decoding,
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
    "readable_formats",
    "upright_array",
]

MAX_PIXELS = 178_956_970  # Pillow's limit against decompression bombs
MAX_BYTES = 64 << 20  # size limit of files decoded for training
_MAX_SCANS = 500  # per JPEG; progressive JPEGs have about ten
_MAX_SCANNED = 16 * MAX_PIXELS  # pixels times scans
_MAX_SEGMENTS = 1000  # before a JPEG's first scan
_EXIF, _XMP = b"Exif\0\0", b"http://ns.adobe.com/xap/1.0/\0"  # prefixes of APP1 segments in JPEGs
_ROTATED_BY_XMP = re.compile(rb'tiff:Orientation(="|>)[02-9]')
# by the first bytes of EXIF data: byte order for struct, and the orientation entry of upright images
_UPRIGHT_TAGS = {
    b"II*\0": ("<", b"\x12\x01\x03\x00\x01\x00\x00\x00\x01\x00"),
    b"MM\0*": (">", b"\x01\x12\x00\x03\x00\x00\x00\x01\x00\x01"),
}
_MAX_TILE = 2**24  # pixels per TIFF tile, unless the image has at least a quarter as many
_MAX_SLOW = 1 << 20  # size limit of files that Pillow decodes in Python, in bytes
_MAX_COMMENTS = 1000  # in a plain-text PPM; Pillow copies up to a MiB for each
# Pillow reads further formats, including EPS, which it passes to another program
_FORMATS = (
    "PNG", "JPEG", "WEBP", "GIF", "AVIF", "TIFF", "BMP", "DIB", "ICO", "JPEG2000", "PCX", "PPM", "QOI", "TGA",
)  # fmt: skip
_REFUSED_BY_SIMPLEJPEG = (ValueError, KeyError)  # KeyError for an unknown chroma subsampling
_TEXT = (b"P1", b"P2", b"P3")  # plain-text PPM


class Decoded(NamedTuple):
    """An image's pixels, (H, W, 3) uint8 RGB, and the file's traits."""

    pixels: npt.NDArray[np.uint8]
    traits: Traits


def decode_image(data: bytes, *, reduce: int = 1) -> npt.NDArray[np.uint8]:
    """Decode a JPEG, PNG, WebP, GIF (first frame), TIFF, BMP, AVIF, JPEG 2000 or similar to (H, W, 3) uint8 RGB.

    For display and to compare images: deep grayscale images are stretched from their own minimum to their own
    maximum. For the pixels of a model, use ``decode_file`` or ``clipkit.model.preprocess.eval_pixels``.

    Args:
        data: the file's bytes.
        reduce: 2, 4 or 8 decodes JPEGs for which ``jpeg_size`` returns a size at 1/2, 1/4 or 1/8 of their sides,
            rounded up, which is faster; other images keep their size.

    Raises:
        DataError: the image cannot be decoded, is truncated, exceeds ``MAX_PIXELS`` or ``MAX_BYTES``, or would take
            too much time or memory.
    """
    return decode_file(data, reduce=reduce, decoding=_FOR_DISPLAY).pixels


_FOR_DISPLAY = Decoding(pixel_range=STRETCH)
_AS_OPEN_CLIP = Decoding()


def decode_file(data: bytes, *, reduce: int = 1, decoding: Decoding = _AS_OPEN_CLIP) -> Decoded:
    """Decode like ``decode_image``, with depth, transparency and orientation handled according to ``decoding``.

    Raises:
        DataError: as for ``decode_image``.
        PixelRangeError: the image is deep and the pixel range does not fit.
    """
    if len(data) > MAX_BYTES:
        raise DataError(f"file of more than {MAX_BYTES >> 20} MiB")
    if (pixels := decode_jpeg(data, reduce=reduce)) is not None:
        orientation = jpeg_orientation(data)
        if decoding.upright:
            pixels = upright_array(pixels, orientation)
        return Decoded(pixels, Traits(rotated=orientation != 1))
    with pillow_errors(), open_image(data) as opened:
        image, traits = apply_decoding(opened, decoding)
        return Decoded(np.asarray(image if image.mode == "RGB" else image.convert("RGB")), traits)


def decode_jpeg(data: bytes, *, reduce: int = 1) -> npt.NDArray[np.uint8] | None:
    """Decode a JPEG to (H, W, 3) uint8 RGB; return None if only Pillow can decode it.

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
        return None  # Pillow has clearer messages, and decodes some files that simplejpeg rejects
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
    """Read height and width from the header of a JPEG that simplejpeg can decode; None for other images.

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
    """Return ``jpeg_size`` of a complete sequential JPEG, which every decoder can read; None for other images."""
    whole = data.endswith(b"\xff\xd9") and len(data) <= MAX_BYTES
    return jpeg_size(data) if whole and _has_one_scan(data) else None


def _refuse_too_large(height: int, width: int) -> None:
    if height * width > MAX_PIXELS:
        raise DataError(f"image has more than {MAX_PIXELS} pixels")


def _refuse_many_scans(data: bytes, pixels: int) -> None:
    if _has_one_scan(data):
        return
    # coded data has a zero after each 0xff; bytes in other segments and after the end may be counted too
    scans = data.count(b"\xff\xda")
    if scans > min(_MAX_SCANS, _MAX_SCANNED // max(1, pixels)):
        raise DataError(f"JPEG has {scans} scans, which would take too long to decode")


def _has_one_scan(data: bytes) -> bool:
    """Check that a JPEG has only one scan: it is sequential, and the first scan contains all colors."""
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

    Pillow, which takes as long as decoding a small image, is used only if the header may contain another value.
    """
    at = 2
    for _ in range(_MAX_SEGMENTS):
        marker = data[at : at + 2]
        if marker == b"\xff\xda":  # start of scan
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
    """Check whether an APP1 segment of a JPEG may contain an orientation other than upright."""
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
def readable_formats() -> tuple[str, ...]:
    """Return Pillow's names of the formats that are read, for ``PIL.Image.open``."""
    from PIL import Image

    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)  # AVIF and QOI require recent versions


def open_image(content: "bytes | Image") -> "Image":
    """Open a file's bytes with Pillow without decoding it; call it inside ``pillow_errors``.

    Raises:
        DataError: the image has more than ``MAX_PIXELS`` pixels, or would take too much time or memory.
    """
    from PIL import Image, UnidentifiedImageError

    if not isinstance(content, bytes):
        _refuse_too_large(content.height, content.width)
        align_transparent_color(content)
        return content
    if content.startswith((b"qoif", *_TEXT)) and len(content) > _MAX_SLOW:
        raise DataError(f"file of more than {_MAX_SLOW >> 20} MiB in a format that is slow to read")
    if content.startswith(_TEXT) and content.count(b"#") > _MAX_COMMENTS:
        raise DataError("file with too many comments, which are slow to read")
    try:
        image = Image.open(io.BytesIO(content), formats=readable_formats())
    except UnidentifiedImageError as error:
        raise DataError(describe_unreadable(content)) from error
    _refuse_too_large(image.height, image.width)
    if content.startswith(b"\xff\xd8\xff"):
        _refuse_many_scans(content, image.height * image.width)
    if image.format == "TIFF":  # Pillow unpacks whole tiles, even if the image covers only a small part
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
    """Convert Pillow's exceptions to DataError, and suppress its warnings."""
    from PIL import Image

    with _silence:
        try:
            yield
        except Image.DecompressionBombError as error:
            raise DataError(f"image has more than {MAX_PIXELS} pixels") from error
        except PILLOW_ERRORS as error:
            raise DataError(f"image does not decode: {error}") from error


class _Silence:
    """Suppress Pillow's warnings; concurrent threads share one change of Python's warning filters."""

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
