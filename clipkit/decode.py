"""From a picture's file to pixels: which formats are read, by what, and how much of it is refused.

A JPEG is decoded by simplejpeg, which is faster; everything else, CMYK and what simplejpeg refuses by Pillow. As in
CLIP, an EXIF orientation is not applied and an alpha channel is dropped; of moving pictures the first frame counts.
Letters: H, W sides of a picture.
"""

import io
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from clipkit.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["MAX_PIXELS", "decode_image", "decode_jpeg", "jpeg_size", "open_image", "pillow_errors"]

MAX_PIXELS = 178_956_970  # Pillow's own limit against decompression bombs
# what pictures come in; Pillow reads more, among them EPS, which it hands to another program to run
_FORMATS = (
    "PNG", "JPEG", "WEBP", "GIF", "AVIF", "TIFF", "BMP", "DIB", "ICO", "JPEG2000", "PCX", "PPM", "QOI", "TGA",
)  # fmt: skip
# what Pillow's readers were seen or are documented to raise on broken files
_BROKEN = (
    OSError, SyntaxError, ValueError, EOFError, RuntimeError, LookupError, TypeError, ArithmeticError, MemoryError,
    struct.error,
)  # fmt: skip


def decode_image(data: bytes, *, reduce: int = 1) -> npt.NDArray[np.uint8]:
    """Decode a JPEG, PNG, WebP, GIF (first frame), TIFF, BMP, AVIF, JPEG 2000 or the like to (H, W, 3) uint8 RGB.

    Sixteen bits of grey are scaled to eight; 32 bits and floats, of which nothing says the range, are refused.
    ``clipkit.preprocess.eval_pixels`` is for evaluation.

    Args:
        data: the file's bytes.
        reduce: 2, 4 or 8 decode a JPEG that has a ``jpeg_size`` at a half, a quarter or an eighth of its sides,
            rounded up, in less time; other pictures keep their size.

    Raises:
        DataError: it does not decode, is cut short, or has more than ``MAX_PIXELS`` pixels.
    """
    if (decoded := decode_jpeg(data, reduce=reduce)) is not None:
        return decoded
    with pillow_errors(), open_image(data) as image:
        return _to_rgb(image)


def decode_jpeg(data: bytes, *, reduce: int = 1) -> npt.NDArray[np.uint8] | None:
    """A JPEG as (H, W, 3) uint8 RGB, or None where Pillow has to do it.

    Raises:
        DataError: it has more than ``MAX_PIXELS`` pixels.
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
    except ValueError:
        return None  # Pillow has the clearer message, and reads some files that simplejpeg refuses
    return decoded


def jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Height and width of a JPEG that simplejpeg decodes, from its header; None for any other picture.

    Raises:
        DataError: it has more than ``MAX_PIXELS`` pixels.
    """
    if not data.startswith(b"\xff\xd8\xff"):
        return None
    import simplejpeg

    try:
        height, width, color_space, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    if color_space in ("CMYK", "YCCK"):
        return None
    if height * width > MAX_PIXELS:
        raise DataError(f"picture has more than {MAX_PIXELS} pixels")
    return height, width


@cache
def _formats() -> tuple[str, ...]:
    from PIL import Image

    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)  # AVIF and QOI came with later versions


def open_image(content: "bytes | Image") -> "Image":
    """Pillow's picture of a file's bytes, not yet decoded; call it inside ``pillow_errors``.

    Raises:
        DataError: it has more than ``MAX_PIXELS`` pixels.
    """
    from PIL import Image

    image = Image.open(io.BytesIO(content), formats=_formats()) if isinstance(content, bytes) else content
    if image.width * image.height > MAX_PIXELS:
        raise DataError(f"picture has more than {MAX_PIXELS} pixels")
    return image


def _to_rgb(image: "Image") -> npt.NDArray[np.uint8]:
    # Pillow would cut all above 255 off, and floats in 0-1 to black
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):
        grey = (np.asarray(image) >> 8).astype(np.uint8)
        return np.repeat(grey[..., None], 3, axis=2)
    if image.mode in ("I", "F"):
        raise DataError("32-bit grey has no known range: store it with 8 or 16 bits")
    return np.asarray(image.convert("RGB"))


@contextmanager
def pillow_errors() -> Iterator[None]:
    """Around calls of Pillow: what it raises becomes a DataError, its remarks are dropped."""
    from PIL import Image, UnidentifiedImageError

    with _silence:
        try:
            yield
        except UnidentifiedImageError as error:
            raise DataError("not a picture in a known format") from error
        except Image.DecompressionBombError as error:
            raise DataError(f"picture has more than {MAX_PIXELS} pixels") from error
        except _BROKEN as error:
            raise DataError(f"picture does not decode: {error}") from error


class _Silence:
    """Ignores Pillow's warnings; threads that decode at the same time share one change of Python's filters."""

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
