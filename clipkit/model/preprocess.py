"""From a picture in any form to the model's input, for evaluation: resize and crop.

``eval_pixels`` does what open_clip's evaluation does, to the last bit: Pillow resizes and crops a picture in its
own mode (palettes by nearest neighbour, colours weighed by their alpha, 16-bit grey as such) and only then makes it
RGB, where training makes it RGB first (``clipkit.files.decode``). As in CLIP, an EXIF orientation is not
applied and an alpha channel is dropped, unless the model's preprocessing has ``upright`` or a ``background``.

Pictures stay uint8 until the model normalizes them. Letters: H, W sides of a picture, S of the input, N pictures.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias, Union

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clipkit.errors import CheckpointError, ConfigError, DataError
from clipkit.files.decode import decode_jpeg, jpeg_orientation, open_image, pillow_errors, upright_array
from clipkit.files.traits import (
    Color,
    Decoding,
    Traits,
    color_of,
    flattened,
    is_rgb,
    is_transparent,
    orientation_of,
    upright_image,
)

if TYPE_CHECKING:
    from PIL.Image import Image, Resampling

__all__ = [
    "OPENAI_MEAN",
    "OPENAI_STD",
    "ImageLike",
    "Preprocess",
    "batch_of",
    "eval_pixels",
    "pixels_and_traits",
]

OPENAI_MEAN = (0.48145466, 0.4578275, 0.40821073)
OPENAI_STD = (0.26862954, 0.26130258, 0.27577711)
MAX_IMAGE_SIZE = 4096  # of a model's input
_INTERPOLATIONS = ("bicubic", "bilinear")
_RESIZE_MODES = ("shortest", "longest", "squash")
_WHOLE = 2**24  # pixels after resizing above which only what the crop keeps is resized

ImageLike: TypeAlias = Union[
    str, PathLike[str], bytes, bytearray, memoryview, "Image", npt.NDArray[Any], Tensor
]


@dataclass(frozen=True, kw_only=True)
class Preprocess:
    """How pictures become a model's input. Names and meanings are open_clip's, but for the last two.

    Attributes:
        image_size: S, the side of the square that the model takes.
        mean: per channel (red, green, blue) of values in 0–1; ``std`` likewise.
        interpolation: "bicubic" or "bilinear", both antialiased.
        resize_mode: "shortest" resizes the shorter side to S and cuts the centre out; "longest" resizes the longer
            side to S and adds a border; "squash" resizes both to S.
        fill_color: of that border, 0–255 in every channel.
        background: red, green and blue, each 0–255, that transparent images are laid on; None drops their alpha
            channel, as open_clip does.
        upright: whether an EXIF orientation is applied, which open_clip does not do.

    Raises:
        ConfigError: a value is not one of these.
    """

    image_size: int
    mean: tuple[float, float, float] = OPENAI_MEAN
    std: tuple[float, float, float] = OPENAI_STD
    interpolation: str = "bicubic"
    resize_mode: str = "shortest"
    fill_color: int = 0
    # not in repr and, by default, not stored: a model that does without them keeps its hash and its files
    background: Color | None = field(default=None, repr=False)
    upright: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        size, fill, ground = self.image_size, self.fill_color, self.background
        for name, right, want in (
            ("image_size", type(size) is int and 0 < size <= MAX_IMAGE_SIZE, f"from 1 to {MAX_IMAGE_SIZE}"),
            ("mean", _is_colour(self.mean), "three numbers"),
            ("std", _is_colour(self.std) and min(self.std) > 0, "three numbers above 0"),
            ("interpolation", self.interpolation in _INTERPOLATIONS, " or ".join(_INTERPOLATIONS)),
            ("resize_mode", self.resize_mode in _RESIZE_MODES, " or ".join(_RESIZE_MODES)),
            ("fill_color", type(fill) is int and 0 <= fill <= 255, "from 0 to 255"),
            ("background", ground is None or is_rgb(ground), "three whole numbers from 0 to 255"),
            ("upright", type(self.upright) is bool, "true or false"),
        ):
            if not right:
                raise ConfigError(f"{name} must be {want}, not {getattr(self, name)!r}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as stored beside weights."""
        values = asdict(self)
        if self.decoding == Decoding():
            del values["background"], values["upright"]
        return values

    @property
    def decoding(self) -> Decoding:
        """What is done about transparency and orientation."""
        return Decoding(background=self.background, upright=self.upright)

    def with_decoding(self, *, background: str | Color | None = None, upright: bool | None = None) -> Self:
        """The same with another background or orientation.

        Args:
            background: a color, by name, as "#rrggbb" or as red, green and blue; "none" drops the alpha channel;
                None keeps what it is.
            upright: whether an EXIF orientation is applied; None keeps what it is.

        Raises:
            ConfigError: ``background`` is no color.
        """
        changed = self
        if background is not None:
            changed = replace(changed, background=color_of(background))
        return changed if upright is None else replace(changed, upright=upright)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Preprocess":
        """The inverse of ``to_dict``; also reads what other libraries' configurations mean by the same names.

        An image size may be two equal numbers, one mean or std may stand for three channels, and "random"
        interpolation is bicubic outside of training.

        Raises:
            CheckpointError: a field is unknown, or asks for something that this version does not do.
        """
        try:
            own = dict(values)
            size = own["image_size"]
            if isinstance(size, list | tuple) and len(size) == 2:
                if size[0] != size[1]:
                    raise ConfigError(f"image_size {size[0]} x {size[1]} is not square, and only squares are")
                own["image_size"] = size[0]
            for name in own.keys() & {"mean", "std"}:
                one = own[name]
                own[name] = (float(one),) * 3 if isinstance(one, int | float) else tuple(map(float, one))
            if isinstance(own.get("background"), list):
                own["background"] = tuple(own["background"])
            if own.get("interpolation") == "random":
                own["interpolation"] = "bicubic"
            return cls(**own)
        except (ConfigError, KeyError, TypeError, ValueError, OverflowError) as error:
            cause = f"no {error}" if isinstance(error, KeyError) else error
            raise CheckpointError(
                f"the stored preprocessing is not one this version knows: {cause}"
            ) from error


def _is_colour(values: tuple[float, ...]) -> bool:
    return len(values) == 3 and all(map(math.isfinite, values))


def eval_pixels(source: ImageLike, preprocess: Preprocess, *, fast: bool = False) -> Tensor:
    """One picture as a model sees it: (3, S, S) uint8, bit for bit what open_clip's evaluation makes of it.

    The exception is a picture so long that, resized, it would have more than 2**24 pixels (for 224 pixels, sides
    in a ratio above 334): to save memory only what the crop keeps is resized, and values may differ by rounding.

    Args:
        source: a path, the bytes of an encoded picture, a PIL image, an array (H, W, 3) or (H, W) uint8, or a
            tensor (3, H, W), (H, W, 3) or (H, W) uint8.
        preprocess: the model's.
        fast: decode and resize a JPEG by simplejpeg and torchvision, in about half the time. Of the values then
            one in some hundreds differs by 1 (of 255) and one in a million by 2.

    Raises:
        DataError: the file cannot be read or decoded, or the array has another shape or dtype.
    """
    return pixels_and_traits(source, preprocess, fast=fast)[0]


def pixels_and_traits(
    source: ImageLike, preprocess: Preprocess, *, fast: bool = False
) -> tuple[Tensor, Traits]:
    """``eval_pixels``, and whether the image is transparent or has an EXIF orientation.

    Raises:
        DataError: as for ``eval_pixels``.
    """
    with _naming(source):
        content = _content(source)
        if fast and isinstance(content, bytes) and (pixels := _fast_pixels(content, preprocess)) is not None:
            return pixels, Traits(rotated=jpeg_orientation(content) != 1)
        with pillow_errors():
            image = _opened(content)
            image.load()
            transparent, orientation = is_transparent(image), orientation_of(image)
            if transparent and preprocess.background is not None:
                image = flattened(image, preprocess.background)
            if preprocess.upright:
                image = upright_image(image, orientation)
            rgb = np.array(_fitted(image, preprocess).convert("RGB"))  # (S, S, 3)
    pixels = torch.from_numpy(rgb).permute(2, 0, 1).contiguous()
    return pixels, Traits(transparent=transparent, rotated=orientation != 1)


def batch_of(images: Sequence[ImageLike], preprocess: Preprocess, *, fast: bool = False) -> Tensor:
    """Pictures → (N, 3, S, S) uint8, each as by ``eval_pixels``."""
    return torch.stack([eval_pixels(image, preprocess, fast=fast) for image in images])


@contextmanager
def _naming(source: ImageLike) -> Iterator[None]:
    """Puts the path, where there is one, before the message of a DataError."""
    try:
        yield
    except DataError as error:
        if isinstance(source, str | PathLike):
            raise DataError(f"picture {Path(source)}: {error}") from error
        raise


def _content(source: ImageLike) -> Union[bytes, npt.NDArray[np.uint8], "Image"]:
    """A picture read but not decoded: encoded bytes, (H, W, 3) uint8, or a PIL image."""
    from PIL import Image

    if isinstance(source, bytearray | memoryview):
        return bytes(source)
    if isinstance(source, bytes | Image.Image):
        return source
    if isinstance(source, str | PathLike):
        try:
            return Path(source).read_bytes()
        except (OSError, ValueError) as error:
            raise DataError(getattr(error, "strerror", None) or str(error)) from error
    if isinstance(source, Tensor):
        if source.dtype != torch.uint8 or source.layout != torch.strided or source.is_meta:
            raise DataError(
                "a picture must be a dense uint8 tensor (3, H, W), (H, W, 3) or (H, W), this one is "
                f"{source.dtype} {tuple(source.shape)}, {source.layout}, on {source.device}"
            )
        source = source.detach().cpu().numpy()
        if source.ndim == 3 and source.shape[0] == 3:
            source = source.transpose(1, 2, 0)
    if not isinstance(source, np.ndarray):
        raise DataError(
            f"a picture must be a path, bytes, PIL image, array or tensor, not {type(source).__name__}"
        )
    if source.dtype.kind in "USO":
        raise DataError("an array of paths or objects is no picture: give a list, as its tolist() makes it")
    if source.ndim == 2:
        source = np.repeat(source[..., None], 3, axis=2)
    if source.dtype != np.uint8 or source.ndim != 3 or source.shape[2] != 3 or 0 in source.shape:
        raise DataError(
            f"a picture must be uint8 (H, W, 3) or (H, W), this one is {source.dtype} {source.shape}"
        )
    return source


def _opened(content: Union[bytes, npt.NDArray[np.uint8], "Image"]) -> "Image":
    """The same as a PIL image, not yet decoded."""
    if not isinstance(content, np.ndarray):
        return open_image(content)
    from PIL import Image

    return Image.fromarray(content)


def _resized_to(width: int, height: int, preprocess: Preprocess) -> tuple[int, int]:
    """Width and height before cutting or adding a border, rounded as in open_clip."""
    size = preprocess.image_size
    if preprocess.resize_mode == "squash":
        return size, size
    if preprocess.resize_mode == "longest":
        ratio = max(height / size, width / size)
        return max(1, round(width / ratio)), max(1, round(height / ratio))
    return (size, int(size * height / width)) if width <= height else (int(size * width / height), size)


def _fitted(image: "Image", preprocess: Preprocess) -> "Image":
    """The picture as S x S in its own mode."""
    from PIL.Image import Resampling

    size, resample = preprocess.image_size, Resampling[preprocess.interpolation.upper()]
    wide, high = _resized_to(*image.size, preprocess)
    left, top = round((wide - size) / 2), round((high - size) / 2)
    if wide * high > _WHOLE:
        return _resized_part(image, (left, top), size, (wide, high), resample)
    resized = image.resize((wide, high), resample)
    if preprocess.resize_mode == "longest":
        return _bordered(resized, size, preprocess.fill_color)
    return resized.crop((left, top, left + size, top + size))


def _fast_pixels(data: bytes, preprocess: Preprocess) -> Tensor | None:
    """A JPEG as (3, S, S) by simplejpeg and torchvision, or None for what these would do in another way."""
    if preprocess.resize_mode == "longest" or (decoded := decode_jpeg(data)) is None:
        return None
    if preprocess.upright:
        decoded = upright_array(decoded, jpeg_orientation(data))
    height, width, _ = decoded.shape
    wide, high = _resized_to(width, height, preprocess)
    # Pillow 13 resizes by height first where that is quicker, which gives other values
    if wide * high > _WHOLE or height - high > max(0, 2 * (width - wide)):
        return None
    from torchvision.transforms.v2 import InterpolationMode, functional

    by = InterpolationMode(preprocess.interpolation)
    resized = functional.resize(channels_first(decoded), [high, wide], interpolation=by, antialias=True)
    cropped: Tensor = functional.center_crop(resized, [preprocess.image_size])
    return cropped.contiguous()


def _bordered(image: "Image", size: int, fill_color: int) -> "Image":
    """The picture in the middle of S x S; the odd pixel of the border goes right and below."""
    from PIL import ImageOps

    across, down = size - image.width, size - image.height
    bands = len(image.getbands())
    border = (across // 2, down // 2, (across + 1) // 2, (down + 1) // 2)
    bordered = ImageOps.expand(image, border, fill=(fill_color,) * bands if bands > 1 else fill_color)
    if (palette := image.getpalette()) is not None:  # so the border has the palette's colour of that number
        bordered.putpalette(palette)
    return bordered


def _resized_part(
    image: "Image", corner: tuple[int, int], size: int, whole: tuple[int, int], resample: "Resampling"
) -> "Image":
    """S x S from ``corner`` (x, y) of the picture as it would be if resized to ``whole``."""
    ends = []  # left, right, top and bottom, each of the pixels that matter and of the box among them
    for start, resized, original in zip(corner, whole, image.size, strict=True):
        scale = original / resized
        first, last = start * scale, (start + size) * scale
        margin = 2 * max(1.0, scale) + 1  # as far as the bicubic filter reaches
        # whole pixels are cut off first, as Pillow's float32 box is too coarse far from 0
        low = max(0, math.floor(first - margin))
        ends += [(low, first - low), (min(original, math.ceil(last + margin)), last - low)]
    (left, right, top, bottom), (x0, x1, y0, y1) = zip(*ends, strict=True)
    return image.crop((left, top, right, bottom)).resize((size, size), resample, (x0, y0, x1, y1))


def channels_first(image: npt.NDArray[np.uint8]) -> Tensor:
    """(H, W, 3) → a (3, H, W) view with channels last in memory, as torchvision's fast path likes it."""
    writable = image if image.flags.writeable and min(image.strides) >= 0 else image.copy()
    return torch.from_numpy(writable).permute(2, 0, 1)
