"""Preprocess images for evaluation: resize and crop.

``eval_pixels`` gives bit for bit what open_clip's evaluation gives: Pillow resizes and crops an image in its
own mode (palettes by nearest neighbor, colors weighted by alpha) and then converts it to RGB. Training converts to
RGB first. Everything else is decided for both by ``clipkit.samples.decode.load_image``: as in CLIP, EXIF
orientation is not applied and alpha channels are dropped, unless there is ``upright`` or ``background``.
Unlike open_clip, which clips them at 255, deep images are mapped to 8 bits before they are resized
(``clipkit.samples.depth``). Channels of multispectral images are resized one by one.

Images stay uint8 until the model normalizes them.
Letters: H, W sides of an image, S of the input, C channels, N images.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias, Union

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clipkit.errors import CheckpointError, ConfigError, DataError
from clipkit.model.naflex import PatchBudget
from clipkit.samples.decode import load_image, pillow_errors, to_array
from clipkit.samples.depth import Bands, PixelRange, is_pixel_range, parse_pixel_range
from clipkit.samples.traits import Color, Decoding, Traits, color_of, is_rgb

if TYPE_CHECKING:
    from PIL.Image import Image

OPENAI_MEAN = (0.48145466, 0.4578275, 0.40821073)
OPENAI_STD = (0.26862954, 0.26130258, 0.27577711)
MAX_IMAGE_SIZE = 4096  # of a model's input
INTERPOLATIONS = ("bicubic", "bilinear")
_RESIZE_MODES = ("shortest", "longest", "squash")
# tensors of these become arrays of the same type
_NUMPY_FLOATS = (torch.float16, torch.float32, torch.float64)
_MAX_RESIZED = 2**24  # pixels; of larger images only the part that the crop keeps is resized

ImageLike: TypeAlias = Union[
    str, PathLike[str], bytes, bytearray, memoryview, "Image", npt.NDArray[Any], Tensor
]


@dataclass(frozen=True, kw_only=True)
class Preprocess:
    """Preprocessing of a model. Names and meanings are open_clip's, except for the last three.

    Attributes:
        image_size: S, the side of the model's input.
        mean: mean per channel (red, green, blue, …) of values in 0–1; likewise ``std``.
        interpolation: "bicubic" or "bilinear", both antialiased.
        resize_mode: "shortest" resizes the shorter side to S and crops the center; "longest" resizes the longer
            side to S and pads; "squash" resizes both sides to S.
        fill_color: value of the padding in all channels, 0–255.
        background: red, green and blue, 0–255, behind transparent images; None drops the alpha channel.
        pixel_range: the values of deep images that become black and white, see ``clipkit.samples.depth``.
        patches: for a model of images of variable size: images become strips of patches instead of squares, without
            a crop, see ``clipkit.model.naflex``; ``resize_mode`` is not used then.
    """

    image_size: int
    mean: tuple[float, ...] = OPENAI_MEAN
    std: tuple[float, ...] = OPENAI_STD
    interpolation: str = "bicubic"
    resize_mode: str = "shortest"
    fill_color: int = 0
    # not in repr and, by default, not stored: models without them keep their hash and their files
    background: Color | None = field(default=None, repr=False)
    upright: bool = field(default=False, repr=False)
    pixel_range: PixelRange = field(default="auto", repr=False)
    patches: PatchBudget | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        def is_finite(values: tuple[float, ...]) -> bool:
            return len(values) == max(1, self.channels) and all(map(math.isfinite, values))

        size = self.image_size
        fill = self.fill_color
        background = self.background
        pixel_range = self.pixel_range
        for name, is_valid, expected in (
            ("image_size", type(size) is int and 0 < size <= MAX_IMAGE_SIZE, f"from 1 to {MAX_IMAGE_SIZE}"),
            ("mean", is_finite(self.mean), "numbers, one for each channel"),
            ("std", is_finite(self.std) and min(self.std) > 0, "numbers above 0, as many as mean has"),
            ("interpolation", self.interpolation in INTERPOLATIONS, " or ".join(INTERPOLATIONS)),
            ("resize_mode", self.resize_mode in _RESIZE_MODES, " or ".join(_RESIZE_MODES)),
            ("fill_color", type(fill) is int and 0 <= fill <= 255, "from 0 to 255"),
            ("background", background is None or is_rgb(background), "three whole numbers from 0 to 255"),
            ("upright", type(self.upright) is bool, "true or false"),
            ("pixel_range", pixel_range == "auto" or is_pixel_range(pixel_range), "auto, dtype or LOW,HIGH"),
            ("patches", isinstance(self.patches, PatchBudget | None), "the side and the number of patches"),
        ):
            if not is_valid:
                raise ConfigError(f"{name} must be {expected}, not {getattr(self, name)!r}")

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain values, as stored with weights."""
        values = asdict(self)
        for name in ("background", "upright", "pixel_range"):
            del values[name]
        if self.patches is None:
            del values["patches"]
        return values | self.decoding.to_dict()

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """Shape of a preprocessed image: (C, S, S), or that of a strip of patches."""
        if self.patches is not None:
            return self.patches.strip_shape(self.channels)
        return self.channels, self.image_size, self.image_size

    @property
    def channels(self) -> int:
        """Number of channels of images, 3 for RGB."""
        return len(self.mean)

    @property
    def decoding(self) -> Decoding:
        """Handling of depth, channels, transparency and orientation."""
        return Decoding(
            background=self.background,
            upright=self.upright,
            pixel_range=self.pixel_range,
            channels=self.channels,
        )

    def replace_decoding(
        self,
        *,
        background: str | Color | None = None,
        upright: bool | None = None,
        pixel_range: PixelRange | None = None,
    ) -> Self:
        """Change background, orientation or pixel range; None keeps the current value.

        Args:
            background: a color, by name, as "#rrggbb" or as red, green and blue; "none" drops the alpha channel.
            upright: whether to apply EXIF orientation.
            pixel_range: "auto", "dtype", "LOW,HIGH" or two numbers.
        """
        changed = self
        if background is not None:
            changed = replace(changed, background=color_of(background))
        if pixel_range is not None:
            changed = replace(changed, pixel_range=parse_pixel_range(pixel_range))
        return changed if upright is None else replace(changed, upright=upright)

    def replace_channels(self, channels: int) -> Self:
        """Return the preprocessing for more channels, which get the averages of all three, or for fewer."""

        def extend_channels(values: tuple[float, ...]) -> tuple[float, ...]:
            average = sum(values) / len(values)
            return (*values, *(average,) * channels)[:channels]

        return replace(self, mean=extend_channels(self.mean), std=extend_channels(self.std))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Preprocess":
        """Invert ``to_dict``, and convert the same fields of other libraries.

        An image size may be two equal numbers, one mean or std may stand for three channels, and "random"
        interpolation is bicubic outside of training.
        """
        try:
            arguments = dict(values)
            size = arguments["image_size"]
            if isinstance(size, list | tuple) and len(size) == 2:
                if size[0] != size[1]:
                    raise ConfigError(f"image_size {size[0]} x {size[1]} is not square")
                arguments["image_size"] = size[0]
            for name in arguments.keys() & {"mean", "std"}:
                value = arguments[name]
                numbers = (value,) * 3 if isinstance(value, int | float) else value
                arguments[name] = tuple(map(float, numbers))
            if isinstance(arguments.get("background"), list):
                arguments["background"] = tuple(arguments["background"])
            if isinstance(arguments.get("patches"), dict):
                arguments["patches"] = PatchBudget(**arguments["patches"])
            if "pixel_range" in arguments:
                arguments["pixel_range"] = parse_pixel_range(arguments["pixel_range"])
            if arguments.get("interpolation") == "random":
                arguments["interpolation"] = "bicubic"
            return cls(**arguments)
        except (ConfigError, KeyError, TypeError, ValueError, OverflowError) as error:
            cause = f"no {error}" if isinstance(error, KeyError) else error
            raise CheckpointError(f"the stored preprocessing is not supported: {cause}") from error


def eval_pixels(source: ImageLike, preprocess: Preprocess) -> Tensor:
    """Convert an image to the model's input, (C, S, S) uint8, bit for bit as open_clip's evaluation.

    With ``preprocess.patches``, it is a strip of patches, see ``clipkit.model.naflex``.

    The exception are images so long that they would have more than 2**24 pixels after resizing (for 224 pixels, an
    aspect ratio above 334): only the part that the crop keeps is resized, and values may differ by rounding.

    Args:
        source: a path, the bytes of an encoded image, a PIL image, an array (H, W, C) or (H, W), or a tensor
            (C, H, W), (H, W, C) or (H, W). Arrays and tensors may have other integer types than uint8, or floats,
            like deep images.
    """
    return pixels_and_traits(source, preprocess)[0]


def pixels_and_traits(source: ImageLike, preprocess: Preprocess) -> tuple[Tensor, Traits]:
    """Convert an image like ``eval_pixels``, and return its traits, which preprocessing may have ignored."""
    from PIL import Image

    try:
        with pillow_errors():
            image, traits = load_image(_read_source(source, preprocess.channels), preprocess.decoding)
            if isinstance(image, np.ndarray):
                channels = [Image.fromarray(channel) for channel in np.moveaxis(image, 2, 0)]
                pixels = np.stack([np.asarray(_resize_image(channel, preprocess)) for channel in channels])
            else:
                pixels = to_array(_resize_image(image, preprocess)).transpose(2, 0, 1)
    except DataError as error:
        if isinstance(source, str | PathLike):
            raise type(error)(f"image {Path(source)}: {error}") from error
        raise
    resized = torch.from_numpy(pixels.copy())  # (C, S, S)
    if preprocess.patches is None:
        return resized, traits
    strip = torch.empty(preprocess.input_shape, dtype=torch.uint8)
    preprocess.patches.write_strip(resized, strip)
    return strip, traits


def preprocess_images(images: Sequence[ImageLike], preprocess: Preprocess) -> Tensor:
    """Convert images to (N, 3, S, S) uint8, or strips, each by ``eval_pixels``."""
    return torch.stack([eval_pixels(image, preprocess) for image in images])


def _read_source(source: ImageLike, channels: int) -> Union[bytes, Bands, "Image"]:
    """Read an image without decoding it: encoded bytes, values, or a PIL image."""
    from PIL import Image

    if isinstance(source, bytearray | memoryview):
        return bytes(source)
    if isinstance(source, bytes | Image.Image):
        return source
    if isinstance(source, str | PathLike):
        try:
            if not Path(source).is_file() and Path(source).exists():
                raise DataError("not a file")  # such as a pipe, whose content could be endless
            return Path(source).read_bytes()
        except (OSError, ValueError) as error:
            raise DataError(getattr(error, "strerror", None) or str(error)) from error
    if isinstance(source, Tensor):
        is_dense = source.layout == torch.strided and not source.is_meta and not source.is_quantized
        if not is_dense or source.dtype.is_complex:
            raise DataError(
                f"an image must be a dense tensor of integers or floats, ({channels}, H, W), (H, W, {channels}) or "
                f"(H, W); this one is {source.dtype} {tuple(source.shape)}, {source.layout}, on {source.device}"
            )
        tensor = source.detach().cpu()
        if tensor.dtype.is_floating_point and tensor.dtype not in _NUMPY_FLOATS:
            tensor = tensor.float()
        array = tensor.numpy()
        if array.ndim == 3 and array.shape[0] == channels:
            array = array.transpose(1, 2, 0)
    elif isinstance(source, np.ndarray):
        array = source
    else:
        raise DataError(
            f"an image must be a path, bytes, PIL image, array or tensor, not {type(source).__name__}"
        )
    if array.dtype.kind in "USO":
        raise DataError("an array of paths or objects is not an image: convert it to a list by tolist()")
    if array.ndim == 2:
        array = array[..., None]
    is_image = array.ndim == 3 and array.shape[2] in (1, channels) and array.dtype.kind in "iuf"
    if not is_image or 0 in array.shape:
        channels_first = f"({channels}, H, W), " if isinstance(source, Tensor) else ""
        raise DataError(
            f"an image must be {channels_first}(H, W, {channels}) or (H, W) of integers or floats; this one is "
            f"{source.dtype} {tuple(source.shape)}"
        )
    return Bands(array)


def _resize_image(image: "Image", preprocess: Preprocess) -> "Image":
    """Resize an image to S x S in its own mode with open_clip's rounding, or its colors to a grid of patches."""
    from PIL import ImageOps
    from PIL.Image import Resampling

    size = preprocess.image_size
    resample = Resampling[preprocess.interpolation.upper()]
    width, height = image.size
    if preprocess.patches is not None:
        if image.mode != "L":
            # as in training and in transformers, which resize colors and not numbers of a palette
            image = image.convert("RGB")
        high, wide = preprocess.patches.fit_size(height, width)
        return image.resize((wide, high), resample)
    if preprocess.resize_mode == "squash":
        return image.resize((size, size), resample)
    if preprocess.resize_mode == "longest":
        ratio = max(height / size, width / size)
        image = image.resize((max(1, round(width / ratio)), max(1, round(height / ratio))), resample)
        across, down = size - image.width, size - image.height
        # odd pixels go right and bottom
        border = (across // 2, down // 2, (across + 1) // 2, (down + 1) // 2)
        bands = len(image.getbands())
        fill = preprocess.fill_color
        padded = ImageOps.expand(image, border, fill=(fill,) * bands if bands > 1 else fill)
        palette = image.getpalette()
        if palette is not None:  # keep the palette's color of that number
            padded.putpalette(palette)
        return padded
    shorter = min(width, height)
    wide = int(size * width / shorter)
    high = int(size * height / shorter)
    left = round((wide - size) / 2)
    top = round((high - size) / 2)
    if wide * high <= _MAX_RESIZED:
        return image.resize((wide, high), resample).crop((left, top, left + size, top + size))
    # crop whole pixels first: Pillow's float32 box is too coarse far from 0
    first_x, last_x, x0, x1 = _locate_crop(left, size, scale=width / wide, limit=width)
    first_y, last_y, y0, y1 = _locate_crop(top, size, scale=height / high, limit=height)
    part = image.crop((first_x, first_y, last_x, last_y))
    return part.resize((size, size), resample, (x0, y0, x1, y1))


def _locate_crop(start: int, size: int, *, scale: float, limit: int) -> tuple[int, int, float, float]:
    """Return the first and last pixel that resizing to a crop reads along one side, and the crop within them."""
    begin = start * scale
    end = (start + size) * scale
    margin = 2 * max(1.0, scale) + 1  # reach of the bicubic filter
    first = max(0, math.floor(begin - margin))
    last = min(limit, math.ceil(end + margin))
    return first, last, begin - first, end - first
