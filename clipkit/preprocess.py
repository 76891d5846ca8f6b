"""From a picture in any form to the model's input: decode, resize, crop.

Pictures stay uint8 until the model normalizes them on its device. A JPEG goes through simplejpeg, everything
else (and a CMYK JPEG) through Pillow. As in CLIP, an EXIF orientation is not applied and an alpha channel is
dropped.
"""

import io
import struct
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from os import PathLike
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeAlias, Union

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clipkit.errors import CheckpointError, DataError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "OPENAI_MEAN",
    "OPENAI_STD",
    "ImageLike",
    "Preprocess",
    "decode_image",
    "eval_transform",
    "load_image",
]

OPENAI_MEAN = (0.48145466, 0.4578275, 0.40821073)
OPENAI_STD = (0.26862954, 0.26130258, 0.27577711)
MAX_PIXELS = 178_956_970  # Pillow's own limit against decompression bombs
_EXTREME = 16  # ratio of sides from which only the middle is resized
# what pictures come in; Pillow reads more, among them EPS, which it hands to another program to run
_FORMATS = (
    "PNG", "JPEG", "WEBP", "GIF", "AVIF", "TIFF", "BMP", "DIB", "ICO", "JPEG2000", "PCX", "PPM", "QOI", "TGA",
)  # fmt: skip
# what Pillow's readers were seen or are documented to raise on broken files
_BROKEN = (
    OSError, SyntaxError, ValueError, EOFError, RuntimeError, LookupError, TypeError, ArithmeticError, MemoryError,
    struct.error,
)  # fmt: skip

ImageLike: TypeAlias = Union[str, PathLike[str], bytes, "Image", npt.NDArray[Any], Tensor]


@dataclass(frozen=True, kw_only=True)
class Preprocess:
    """How pictures become a model's input: the shorter side is resized to ``image_size`` and the centre cut out.

    ``mean`` and ``std`` are per channel (red, green, blue) of values in 0–1.
    """

    image_size: int
    mean: tuple[float, float, float] = OPENAI_MEAN
    std: tuple[float, float, float] = OPENAI_STD
    interpolation: str = "bicubic"
    resize_mode: str = "shortest"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as stored beside weights."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Preprocess":
        """The inverse of ``to_dict``.

        Raises:
            CheckpointError: a field is unknown, or asks for something that this version does not do.
        """
        try:
            mean, std = tuple(map(float, values["mean"])), tuple(map(float, values["std"]))
            own = cls(**{**values, "mean": mean, "std": std})
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the stored preprocessing is not one this version knows: {error}"
            ) from error
        if (
            type(own.image_size) is not int
            or own.image_size < 1
            or len(own.mean) != 3
            or len(own.std) != 3
            or (own.interpolation, own.resize_mode) != ("bicubic", "shortest")
        ):
            raise CheckpointError(f"the stored preprocessing is not one this version knows: {own}")
        return own


def decode_image(data: bytes) -> npt.NDArray[np.uint8]:
    """Decode a JPEG, PNG, WebP, GIF (first frame), TIFF, BMP, AVIF, JPEG 2000 or the like to (H, W, 3) uint8 RGB.

    Sixteen bits of grey are scaled to eight.

    Raises:
        DataError: it does not decode, is cut short, or has more than ``MAX_PIXELS`` pixels.
    """
    if data[:3] == b"\xff\xd8\xff":
        decoded = _decode_jpeg(data)
        if decoded is not None:
            return decoded
    from PIL import Image

    with _pillow(), Image.open(io.BytesIO(data), formats=_formats()) as image:
        return _to_array(image)


def _decode_jpeg(data: bytes) -> npt.NDArray[np.uint8] | None:
    """A JPEG as (H, W, 3), or None where Pillow has to do it."""
    import simplejpeg

    try:
        height, width, color_space, _ = simplejpeg.decode_jpeg_header(data)
        if color_space in ("CMYK", "YCCK"):
            return None
        if height * width > MAX_PIXELS:
            raise DataError(f"picture has more than {MAX_PIXELS} pixels")
        decoded: npt.NDArray[np.uint8] = simplejpeg.decode_jpeg(data, colorspace="RGB")
    except ValueError:
        return None  # Pillow has the clearer message, and reads some files that simplejpeg refuses
    return decoded


@cache
def _formats() -> tuple[str, ...]:
    from PIL import Image

    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)  # AVIF and QOI came with later versions


def _to_array(image: "Image") -> npt.NDArray[np.uint8]:
    if image.width * image.height > MAX_PIXELS:
        raise DataError(f"picture has more than {MAX_PIXELS} pixels")
    if image.mode.startswith("I;16"):  # Pillow would cut all above 255 off
        grey = (np.asarray(image) >> 8).astype(np.uint8)
        return np.repeat(grey[..., None], 3, axis=2)
    return np.asarray(image.convert("RGB"))


@contextmanager
def _pillow() -> Iterator[None]:
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


def load_image(source: ImageLike) -> npt.NDArray[np.uint8]:
    """One picture as (H, W, 3) uint8 RGB.

    Args:
        source: a path, the bytes of an encoded picture, a PIL image, an array (H, W, 3) or (H, W) uint8, or a
            tensor (3, H, W) or (H, W, 3) uint8.

    Raises:
        DataError: the file cannot be read or decoded, or the array has another shape or dtype.
    """
    if isinstance(source, bytes):
        return decode_image(source)
    if isinstance(source, str | PathLike):
        path = Path(source)
        try:
            return decode_image(path.read_bytes())
        except OSError as error:
            raise DataError(f"picture {path}: {error.strerror}") from error
        except ValueError as error:
            raise DataError(f"picture {str(path)!r}: {error}") from error
        except DataError as error:
            raise DataError(f"picture {path}: {error}") from error
    if isinstance(source, Tensor):
        source = source.detach().cpu().numpy()
        if source.ndim == 3 and source.shape[0] == 3:
            source = source.transpose(1, 2, 0)
    if isinstance(source, np.ndarray):
        if source.ndim == 2:
            source = np.repeat(source[..., None], 3, axis=2)
        if source.dtype != np.uint8 or source.ndim != 3 or source.shape[2] != 3 or 0 in source.shape:
            raise DataError(
                f"a picture must be uint8 (H, W, 3) or (H, W), this one is {source.dtype} {source.shape}"
            )
        return source
    if hasattr(source, "convert"):
        with _pillow():
            return _to_array(source)
    raise DataError(
        f"a picture must be a path, bytes, PIL image, array or tensor, not {type(source).__name__}"
    )


def eval_transform(image: npt.NDArray[np.uint8], preprocess: Preprocess) -> Tensor:
    """(H, W, 3) uint8 → (3, S, S) uint8: shorter side to S by antialiased bicubic, centre crop."""
    resize, center_crop = _torchvision()
    pixels = _middle(channels_first(image))
    size = preprocess.image_size
    if min(pixels.shape[1:]) != size:
        pixels = resize(pixels, [size])
    cropped: Tensor = center_crop(pixels, [size, size])
    return cropped


def _middle(pixels: Tensor) -> Tensor:
    """Cut off both ends of a picture (3, H, W) that is very long, as the centre crop does, but before it is large.

    An even number of squares goes at each end: what is left is sampled at the same places, and the crop's
    offset, which is rounded half to even, moves by an even number.
    """
    height, width = pixels.shape[1:]
    short, long = min(height, width), max(height, width)
    if long <= _EXTREME * short:
        return pixels
    end = (long - _EXTREME * short) // (4 * short) * (2 * short)
    return pixels[:, end : height - end] if height > width else pixels[:, :, end : width - end]


def channels_first(image: npt.NDArray[np.uint8]) -> Tensor:
    """(H, W, 3) → a (3, H, W) view with channels last in memory, as torchvision's fast path likes it."""
    writable = image if image.flags.writeable and min(image.strides) >= 0 else image.copy()
    return torch.from_numpy(writable).permute(2, 0, 1)


def batch_of(images: Sequence[ImageLike], preprocess: Preprocess) -> Tensor:
    """Pictures → (N, 3, S, S) uint8."""
    return torch.stack([eval_transform(load_image(image), preprocess) for image in images])


@cache
def _torchvision() -> Any:
    from functools import partial

    from torchvision.transforms.v2 import InterpolationMode, functional

    resize = partial(functional.resize, interpolation=InterpolationMode.BICUBIC, antialias=True)
    return resize, functional.center_crop
