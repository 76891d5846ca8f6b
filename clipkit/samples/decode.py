"""Decode image files to pixels, and reject files that would take too much time or memory.

``load_image`` decides depth, channels, colors, transparency and orientation. Training (``decode_pixels``) and
evaluation (``clipkit.model.preprocess``) call it and differ only in how they resize. JPEGs for training are decoded
with simplejpeg, which is faster than Pillow and gives the same pixels. Other formats, CMYK JPEGs and files that
simplejpeg rejects are decoded with Pillow, further ones by ``clipkit.samples.formats``. As in CLIP, by default the
EXIF orientation is ignored and the alpha channel dropped (clipkit/samples/traits.py). Deep images are mapped to 8
bits (clipkit/samples/depth.py). Only the first frame of an animation is used.

Malicious files from the web may take minutes to decode or exhaust memory. The following are rejected before
decoding: images with more pixels than Pillow allows, very large files, JPEGs with many scans (each scan passes over
all pixels; 125 kB took 20 s), TIFFs with tiles far larger than the image, and large files in formats that Pillow
decodes in Python.

Letters: C channels, H height, W width.
"""

import io
import logging
import re
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from clipkit.errors import DataError
from clipkit.samples.depth import (
    STRETCH,
    Bands,
    gray_values,
    has_deep_colors,
    has_swapped_bytes,
    has_unread_planes,
    is_deep,
    is_white_zero,
    refuse_deep_alpha,
    samples_per_pixel,
)
from clipkit.samples.formats import (
    MAX_PIXELS,
    MAX_TILE,
    describe_unreadable,
    image_format,
    read_bands,
    refuse_too_large,
    register_heif,
)
from clipkit.samples.traits import (
    PILLOW_ERRORS,
    Decoding,
    Traits,
    align_transparent_color,
    blend_onto,
    get_alpha,
    is_transparent,
    read_orientation,
    upright_array,
    upright_image,
)

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_BYTES = 64 << 20  # size limit of files decoded for training
_MAX_SCANS = 500  # per JPEG; progressive JPEGs have about ten
_MAX_SCANNED = 16 * MAX_PIXELS  # pixels times scans
_MAX_SEGMENTS = 1000  # before a JPEG's first scan
# prefixes of APP1 segments in JPEGs
_EXIF = b"Exif\0\0"
_XMP = b"http://ns.adobe.com/xap/1.0/\0"
_ROTATED_BY_XMP = re.compile(rb'tiff:Orientation(="|>)[02-9]')
# by the first bytes of EXIF data: byte order for struct, and the orientation entry of upright images
_UPRIGHT_TAGS = {
    b"II*\0": ("<", b"\x12\x01\x03\x00\x01\x00\x00\x00\x01\x00"),
    b"MM\0*": (">", b"\x01\x12\x00\x03\x00\x00\x00\x01\x00\x01"),
}
_MAX_SLOW = 1 << 20  # size limit of files that Pillow decodes in Python, in bytes
_MAX_COMMENTS = 1000  # in a plain-text PPM; Pillow copies up to a MiB for each
# Pillow reads further formats, including EPS, which it passes to another program
_FORMATS = (
    "PNG", "JPEG", "WEBP", "GIF", "AVIF", "TIFF", "BMP", "DIB", "ICO", "JPEG2000", "PCX", "PPM", "QOI", "TGA",
)  # fmt: skip
_ANIMATED = ("GIF", "PNG", "WEBP", "AVIF")
_MAX_PAGES = 1024  # of a TIFF that are counted
_REFUSED_BY_SIMPLEJPEG = (ValueError, KeyError)  # KeyError for an unknown chroma subsampling
_TEXT = (b"P1", b"P2", b"P3")  # plain-text PPM


class Decoded(NamedTuple):
    """An image's pixels, (C, H, W) uint8 with channels last in memory, and the file's traits."""

    pixels: npt.NDArray[np.uint8]
    traits: Traits


def decode_image(data: bytes, *, reduce: int = 1) -> npt.NDArray[np.uint8]:
    """Decode an image for display or to compare it with others: (H, W, 3) uint8 RGB.

    Deep images are stretched from their own minimum to their own maximum; of more than three channels, the first
    three are shown. For the pixels of a model, use ``decode_pixels`` or ``clipkit.model.preprocess.eval_pixels``.

    Args:
        data: the file's bytes.
        reduce: 2, 4 or 8 decodes JPEGs for which ``jpeg_size`` returns a size at 1/2, 1/4 or 1/8 of their sides,
            rounded up, which is faster; other images keep their size.
    """
    return decode_pixels(data, _FOR_DISPLAY, reduce=reduce).pixels.transpose(1, 2, 0)


_FOR_DISPLAY = Decoding(pixel_range=STRETCH)
_AS_OPEN_CLIP = Decoding()


def decode_pixels(data: bytes, rule: Decoding = _AS_OPEN_CLIP, *, reduce: int = 1) -> Decoded:
    """Decode an image file to the channels of ``rule``, with depth, transparency and orientation as it says.

    Args:
        data: the file's bytes: a JPEG, PNG, WebP, GIF (first frame), TIFF, BMP, AVIF, JPEG 2000 or similar, or a
            format of ``clipkit.samples.formats``.
        rule: how to decode it; by default as open_clip.
        reduce: see ``decode_image``.

    Raises:
        DataError: the image cannot be decoded, is truncated, exceeds ``MAX_PIXELS`` or ``MAX_BYTES``, or would take
            too much time or memory.
        PixelRangeError: the image is deep and the pixel range does not fit, or it has other channels.
    """
    if len(data) > MAX_BYTES:
        raise DataError(f"file of more than {MAX_BYTES >> 20} MiB")
    pixels = None
    if rule.channels == 3:
        pixels = decode_jpeg(data, reduce=reduce)
    if pixels is not None:
        orientation = jpeg_orientation(data)
        if rule.upright:
            pixels = upright_array(pixels, orientation)
        traits = Traits(rotated=orientation != 1)
    else:
        image, traits = load_image(data, rule)
        with pillow_errors():
            pixels = to_array(image)
    return Decoded(pixels.transpose(2, 0, 1), traits)


def load_image(
    content: "bytes | Image | Bands", rule: Decoding
) -> tuple["Image | npt.NDArray[np.uint8]", Traits]:
    """Load an image in its size, with 8 bits and the channels, background and orientation that ``rule`` says.

    Returns:
        For three channels, a Pillow image in the mode of the file, which evaluation resizes in this mode like
        open_clip; otherwise (H, W, C). And the file's traits.
    """

    with pillow_errors():
        bands = read_beyond_pillow(content, rule)
        if bands is not None:
            pixels, clamped = bands.to_8_bits(rule.pixel_range, channels=rule.channels)
            traits = Traits(
                clamped=clamped, frames=bands.several, pages=bands.pages > 0, file_channels=bands.pages
            )
            if rule.channels == 3:
                return _from_array(pixels), traits
            return pixels, traits
        assert not isinstance(content, Bands)
        image = open_image(content)
        traits = _load(image)
        if isinstance(content, bytes) and image.format == "TIFF" and getattr(image, "is_animated", False):
            traits = _add_page_traits(traits, content)
        orientation = read_orientation(image) if rule.upright else 1
        background = rule.background if traits.transparent else None
        if is_deep(image) or rule.channels != 3:
            pixels, clamped = _bands_of(image).to_8_bits(rule.pixel_range, channels=rule.channels)
            traits = traits._replace(clamped=clamped)
            if rule.channels != 3:
                return upright_array(pixels, orientation), traits
            alpha = image
            image = _from_array(pixels)
            if background is not None:
                image.putalpha(get_alpha(alpha))
        if background is not None:
            image = blend_onto(image, background)
        return upright_image(image, orientation), traits


def _from_array(pixels: npt.NDArray[np.uint8]) -> "Image":
    from PIL import Image

    return Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)


def read_beyond_pillow(content: "bytes | Image | Bands", rule: Decoding) -> Bands | None:
    """Return the values of an image that Pillow does not read, or only with fewer bits or channels; else None."""
    if not isinstance(content, bytes):
        return content if isinstance(content, Bands) else None
    name = image_format(content)
    with _silence:
        if name == "TIFF" and rule.channels == 3 and not _is_beyond_pillow(content, rule):
            return None
        return read_bands(content, name, channels=rule.channels)


def _is_beyond_pillow(tiff: bytes, rule: Decoding) -> bool:
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(io.BytesIO(tiff), formats=("TIFF",))
    except UnidentifiedImageError:
        return True
    if len(image.getbands()) == 1 and samples_per_pixel(image) > 1:  # Pillow would read the first band
        return True
    if has_unread_planes(image) or (tiff.startswith(b"MM") and has_swapped_bytes(image)):
        return True
    return image.mode == "RGB" and has_deep_colors(image) and rule.pixel_range not in ("auto", STRETCH)


def _load(image: "Image") -> Traits:
    """Decode an opened image; deep colors are not recognized in one that was loaded before, except a TIFF."""
    refuse_deep_alpha(image)
    deep_colors = has_deep_colors(image)
    several = image.format in _ANIMATED and getattr(image, "is_animated", False)
    cmyk = image.mode == "CMYK"
    channels = samples_per_pixel(image)
    extra_channels = image.mode != "P" and channels > len(image.getbands())
    image.load()
    return Traits(
        transparent=is_transparent(image),
        rotated=read_orientation(image) != 1,
        deep_colors=deep_colors,
        frames=several,
        cmyk=cmyk,
        extra_channels=extra_channels,
        file_channels=channels if extra_channels else 0,
    )


def _add_page_traits(traits: Traits, tiff: bytes) -> Traits:
    """Add whether a TIFF has further pages that are not smaller than the first, which may be a copy."""
    pages = []
    with open_image(tiff) as image, suppress(*PILLOW_ERRORS):  # EOFError after the last page
        for i in range(_MAX_PAGES):
            image.seek(i)
            pages.append((image.size, image.mode, samples_per_pixel(image)))
    (width, height), mode, channels = pages[0]
    if channels == 1 and mode != "P" and len(pages) > len({*pages}) == 1:
        return traits._replace(pages=True, file_channels=len(pages))
    return traits._replace(frames=any(size[0] * size[1] >= width * height for size, _, _ in pages[1:]))


def _bands_of(image: "Image") -> Bands:
    """Return the channels of a loaded image as they are stored; colors of a palette become RGB."""
    if is_deep(image):
        return Bands(gray_values(image)[..., None], white_zero=is_white_zero(image))
    mode = {"1": "L", "P": "RGB", "PA": "RGBA", "LA": "L", "La": "L"}.get(image.mode, image.mode)
    values = np.asarray(image if image.mode == mode else image.convert(mode))
    return Bands(values if values.ndim == 3 else values[..., None])


def to_array(image: "Image | npt.NDArray[np.uint8]") -> npt.NDArray[np.uint8]:
    """Return the pixels of a result of ``load_image``: (H, W, C) uint8."""
    if isinstance(image, np.ndarray):
        return image
    return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))


def decode_jpeg(data: bytes, *, reduce: int = 1) -> npt.NDArray[np.uint8] | None:
    """Decode a JPEG to (H, W, 3) uint8 RGB; return None if only Pillow can decode it."""
    size = jpeg_size(data)
    if size is None:
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


def jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Read height and width from the header of a JPEG that simplejpeg can decode; None for other images."""
    if not data.startswith(b"\xff\xd8\xff"):
        return None
    import simplejpeg

    try:
        height, width, color_space, _ = simplejpeg.decode_jpeg_header(data)
    except _REFUSED_BY_SIMPLEJPEG:
        return None
    if color_space in ("CMYK", "YCCK"):
        return None
    refuse_too_large(height, width)
    _refuse_many_scans(data, height * width)
    return height, width


def plain_jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Return ``jpeg_size`` of a complete sequential JPEG, which every decoder can read; None for other images."""
    is_complete = data.endswith(b"\xff\xd9") and len(data) <= MAX_BYTES
    if is_complete and _has_one_scan(data):
        return jpeg_size(data)
    return None


def _refuse_many_scans(data: bytes, pixels: int) -> None:
    if _has_one_scan(data):
        return
    # coded data has a zero after each 0xff; bytes in other segments and after the end may be counted too
    scans = data.count(b"\xff\xda")
    if scans > min(_MAX_SCANS, _MAX_SCANNED // max(1, pixels)):
        raise DataError(f"JPEG has {scans} scans, which would take too long to decode")


def _has_one_scan(data: bytes) -> bool:
    """Check that a JPEG has only one scan: it is sequential, and the first scan contains all colors."""
    colors = 0
    at = 2
    for _ in range(_MAX_SEGMENTS):
        if at + 10 > len(data) or data[at] != 0xFF:
            return False
        marker = data[at + 1]
        length = int.from_bytes(data[at + 2 : at + 4], "big")
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
            return read_orientation(image)
    except DataError:
        return 1


def _may_rotate(segment: bytes) -> bool:
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


def readable_formats(data: bytes = b"") -> tuple[str, ...]:
    """Return Pillow's names of the formats in which an image is read, for ``PIL.Image.open``."""
    if image_format(data) == "HEIC":
        register_heif()
        return ("HEIF",)
    return _pillow_formats()


@cache
def _pillow_formats() -> tuple[str, ...]:
    from PIL import Image

    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)  # AVIF and QOI require recent versions


def open_image(content: "bytes | Image") -> "Image":
    """Open a file's bytes with Pillow without decoding it; call it inside ``pillow_errors``."""
    from PIL import Image, UnidentifiedImageError

    if not isinstance(content, bytes):
        refuse_too_large(content.height, content.width)
        align_transparent_color(content)
        return content
    if content.startswith((b"qoif", *_TEXT)) and len(content) > _MAX_SLOW:
        raise DataError(f"file of more than {_MAX_SLOW >> 20} MiB in a format that is slow to read")
    if content.startswith(_TEXT) and content.count(b"#") > _MAX_COMMENTS:
        raise DataError("file with too many comments, which are slow to read")
    try:
        image = Image.open(io.BytesIO(content), formats=readable_formats(content))
    except UnidentifiedImageError as error:
        raise DataError(describe_unreadable(content)) from error
    refuse_too_large(image.height, image.width)
    if content.startswith(b"\xff\xd8\xff"):
        _refuse_many_scans(content, image.height * image.width)
    if image.format == "TIFF":  # Pillow unpacks whole tiles, even if the image covers only a small part
        tags = getattr(image, "tag_v2", {})
        wide = tags.get(322, 0)
        high = tags.get(323, 0)
        if not isinstance(wide, int) or not isinstance(high, int):
            raise DataError("image does not decode: the size of its tiles is not a number")
        if wide * high > max(MAX_TILE, 4 * image.width * image.height):
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
            raise DataError(f"image does not decode: {' '.join(str(error).split())}") from error


@cache
def _quiet_pillow() -> None:
    # otherwise it prints what is unusual in a TIFF, for each image
    logging.getLogger("PIL").setLevel(logging.CRITICAL)


class _Silence:
    """Suppress the libraries' warnings; concurrent threads share one change of Python's warning filters."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._inside = 0

    def __enter__(self) -> None:
        _quiet_pillow()
        with self._lock:
            if self._inside == 0:
                self._filters = warnings.catch_warnings()
                self._filters.__enter__()
                warnings.filterwarnings("ignore", module="PIL|pydicom|tifffile")
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._filters.__exit__(None, None, None)


_silence = _Silence()
