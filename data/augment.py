"""What happens to a training picture by chance: a function of (seed, epoch, sample id) and nothing else."""

import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from clipkit.config import DataConfig, load_config
from clipkit.errors import ConfigError, DataError
from clipkit.files.decode import decode_file, jpeg_orientation, jpeg_size
from clipkit.files.traits import Decoding, Traits, color_of

__all__ = [
    "Augmentation",
    "JpegOfRow",
    "Recipe",
    "Undecoded",
    "decode_into",
    "draw_recipe",
    "empty_batch",
    "follow_recipe",
    "image_settings",
    "jpeg_decoder",
    "preload",
    "random_of",
    "require_nvjpeg",
    "training_pixels",
]

_ASPECT = (3 / 4, 4 / 3)
_TRIES = 10
_REDUCTIONS = (8, 4, 2)  # of a side, that JPEGs can be decoded at
_SPARE = 2  # what scaled decoding leaves of the crop's sides, in sides of the result
_JITTERED = 0.8  # of the pictures, where colours are changed at all
_HUE = 0.25  # of the strength, as a share of the colour circle (Chen et al. 2020, https://arxiv.org/abs/2002.05709)


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """What a training picture goes through.

    Attributes:
        crop_scale: smallest share of the area that the random crop keeps; 1 cuts the centre.
        flip: probability of the mirror image.
        color_jitter: largest relative change of brightness, contrast and saturation, made to 4 of 5 pictures;
            the hue turns by up to a quarter of it, as a share of the circle.
        grayscale: probability that the colours go.
        scaled_decode: decode a JPEG at 1/2, 1/4 or 1/8 of its size where the crop then still has twice the sides of
            the result. The crop is the same, rounded to pixels of the smaller picture, which moves it by at most a
            quarter of a pixel of the result. Over 12 photographs of 1024 pixels a side, for 224 pixels, values so
            differ by 0.7 of 255 on average (median 47 dB), by 0.2 (54 dB) where little has to be rounded; of 2048
            pixels by 0.9 (42 dB) and 0.3 (53 dB). See bench/decode.py.
    """

    crop_scale: float = DataConfig.crop_scale
    flip: float = DataConfig.flip
    color_jitter: float = DataConfig.color_jitter
    grayscale: float = DataConfig.grayscale
    scaled_decode: bool = DataConfig.scaled_decode

    @classmethod
    def of(cls, settings: DataConfig) -> "Augmentation":
        """Take every field from the setting of the same name."""
        return cls(**{field.name: getattr(settings, field.name) for field in fields(cls)})


def image_settings(words: Sequence[str]) -> tuple[Augmentation, Decoding, list[str]]:
    """Take settings of augmentation and decoding, as ``data.NAME=VALUE``, out of a command's arguments.

    Returns:
        The augmentation, the decoding, and the other words.

    Raises:
        ConfigError: a setting is unknown, invalid, or has no effect on images.
    """
    overrides = [word for word in words if re.match(r"data\.\w+=", word)]
    known = [
        f"data.{name}" for name in (*(field.name for field in fields(Augmentation)), "background", "upright")
    ]
    settings = load_config(Path(os.devnull), overrides).data
    for name in (word.partition("=")[0] for word in overrides):
        if name not in known:
            raise ConfigError(f"{name} has no effect here: only {', '.join(known)} have")
    decoding = Decoding(
        background=color_of(settings.background) if settings.background else None,
        upright=settings.upright is True,
    )
    return Augmentation.of(settings), decoding, [word for word in words if word not in overrides]


_AS_OPEN_CLIP = Decoding()
_Box = tuple[int, int, int, int]  # top, left, height, width


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What chance has made of an ``Augmentation`` for one picture.

    Attributes:
        box: top, left, height and width of the crop.
        mirrored: whether it is flipped.
        colours: factors of brightness, contrast and saturation and the turn of the hue, None for no change.
        grey: whether the colours go.
    """

    box: _Box
    mirrored: bool
    colours: tuple[float, float, float, float] | None
    grey: bool


def preload(augmentation: Augmentation) -> None:
    """Import what the first picture needs, so that worker processes share it instead of each importing it."""
    import simplejpeg  # noqa: F401
    from PIL import Image

    Image.init()
    if augmentation.color_jitter or augmentation.grayscale:
        _functional()


def empty_batch(count: int, image_size: int) -> Tensor:
    """(B, 3, S, S) uint8 with channels last in memory, as decoders and resizing have them; values are undefined."""
    return torch.empty(
        (count, 3, image_size, image_size), dtype=torch.uint8, memory_format=torch.channels_last
    )


def random_of(*stream: int) -> np.random.Generator:
    """The generator of one sample in one epoch; streams that differ anywhere are independent."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(stream)))


def training_pixels(
    data: bytes,
    *,
    image_size: int,
    augmentation: Augmentation,
    random: np.random.Generator,
    out: Tensor,
    decoding: Decoding = _AS_OPEN_CLIP,
) -> Traits:
    """An encoded picture → ``out``, (3, S, S) uint8: a random crop resized by antialiased bicubic, flip, colours.

    The crop keeps a share of the area between ``crop_scale`` and 1 at an aspect ratio between 3:4 and 4:3
    (Szegedy et al. 2015); a ``crop_scale`` of 1 keeps the largest centred square. What bounds the time of a JPEG is
    libjpeg's decoding, and torch's resizing.

    Args:
        data: the file's bytes.
        image_size: S.
        augmentation: what happens to it.
        random: the stream of this picture, see ``random_of``.
        out: where the pixels go, such as a row of ``empty_batch``; undefined after an error.
        decoding: what is done about transparency and orientation.

    Returns:
        Whether the image is transparent or has an EXIF orientation.

    Raises:
        DataError: as for ``clipkit.files.decode.decode_image``.
    """
    size = jpeg_size(data) if augmentation.scaled_decode else None
    if size is None:
        image, traits = decode_file(data, decoding=decoding)
        recipe = draw_recipe(image.shape[0], image.shape[1], augmentation, random)
        box = recipe.box
    else:  # the crop comes first, so that it is the same at every scale
        if decoding.upright and jpeg_orientation(data) >= 5:  # these exchange height and width
            size = size[1], size[0]
        recipe = draw_recipe(*size, augmentation, random)
        box = recipe.box
        reduce = _reduction(min(box[2:]), image_size)
        image, traits = decode_file(data, reduce=reduce, decoding=decoding)
        if image.shape[:2] != size:  # it stays whole where Pillow had to decode it
            box = _reduced(box, size, image.shape[:2], reduce)
    top, left, height, width = box
    # torch's fast path for bytes takes pixels without gaps; it would copy them too, but more slowly
    cut = np.require(image[top : top + height, left : left + width], requirements=("C", "W"))
    # one picture as a batch with channels last; torch would not know pixels[None] for that, and copy the result
    _finish(torch.from_numpy(cut[None]).permute(0, 3, 1, 2), recipe, out)
    return traits


def draw_recipe(height: int, width: int, augmentation: Augmentation, random: np.random.Generator) -> Recipe:
    """What happens to a picture of this size; options that are off draw nothing."""
    box = _crop(height, width, augmentation.crop_scale, random)
    mirrored = bool(augmentation.flip) and random.random() < augmentation.flip
    strength, colours = augmentation.color_jitter, None
    if strength and random.random() < _JITTERED:
        low, high = max(0.0, 1 - strength), 1 + strength
        brightness, contrast, saturation = (random.uniform(low, high) for _ in range(3))
        colours = brightness, contrast, saturation, random.uniform(-1, 1) * _HUE * strength
    grey = bool(augmentation.grayscale) and random.random() < augmentation.grayscale
    return Recipe(box=box, mirrored=mirrored, colours=colours, grey=grey)


def follow_recipe(pixels: Tensor, recipe: Recipe, out: Tensor) -> None:
    """A whole picture, (3, H, W) uint8, → ``out``, (3, S, S) uint8, on any one device, as ``training_pixels`` does.

    On a GPU torch resizes in float32, so that values differ by 1 of 255 here and there.
    """
    top, left, height, width = recipe.box
    _finish(pixels[None, :, top : top + height, left : left + width], recipe, out)


def _finish(pixels: Tensor, recipe: Recipe, out: Tensor) -> None:
    """The crop, (1, 3, H, W) uint8, → (3, S, S)."""
    if pixels.shape[1:] != out.shape:
        given = pixels if pixels.device.type == "cpu" else pixels.float()  # torch has no other kernel there
        resized = torch.nn.functional.interpolate(
            given, size=out.shape[1:], mode="bicubic", align_corners=False, antialias=True
        )
        pixels = resized if resized.dtype == torch.uint8 else resized.round_().clamp_(0, 255).to(torch.uint8)
    pixels = pixels[0]
    if recipe.mirrored:
        pixels = pixels.flip(-1)
    out.copy_(_recolour(pixels, recipe))


def _reduction(side: int, image_size: int) -> int:
    """By how much a picture may be decoded smaller whose crop has this shorter side."""
    return next((by for by in _REDUCTIONS if side >= by * _SPARE * image_size), 1)


def _reduced(box: _Box, size: tuple[int, ...], smaller: tuple[int, ...], by: int) -> _Box:
    """The box in the picture decoded at 1/by."""
    if smaller != tuple(-(-side // by) for side in size):
        raise DataError("picture does not decode: it has two sizes")
    top, left, height, width = box
    first_row, first_column = round(top / by), round(left / by)
    last_row, last_column = round((top + height) / by), round((left + width) / by)
    return first_row, first_column, last_row - first_row, last_column - first_column


def _recolour(pixels: Tensor, recipe: Recipe) -> Tensor:
    """(3, S, S) uint8 → the same with other colours."""
    if recipe.colours is not None:
        change = _functional()
        brightness, contrast, saturation, hue = recipe.colours
        pixels = change.adjust_brightness(pixels, brightness)
        pixels = change.adjust_contrast(pixels, contrast)
        pixels = change.adjust_saturation(pixels, saturation)
        pixels = change.adjust_hue(pixels, hue)
    if recipe.grey:
        pixels = _functional().rgb_to_grayscale(pixels, num_output_channels=3)
    return pixels


def _crop(height: int, width: int, crop_scale: float, random: np.random.Generator) -> _Box:
    """Top, left, height and width of the crop; the largest centred one of a fitting aspect if no draw fits."""
    if crop_scale < 1:
        for _ in range(_TRIES):
            area = height * width * random.uniform(crop_scale, 1.0)
            aspect = math.exp(random.uniform(math.log(_ASPECT[0]), math.log(_ASPECT[1])))
            crop_width, crop_height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if 0 < crop_width <= width and 0 < crop_height <= height:
                top = int(random.integers(height - crop_height + 1))
                left = int(random.integers(width - crop_width + 1))
                return top, left, crop_height, crop_width
        low, high = _ASPECT
    else:
        low = high = 1.0
    crop_height, crop_width = min(height, round(width / low)), min(width, round(height * high))
    return (height - crop_height) // 2, (width - crop_width) // 2, max(1, crop_height), max(1, crop_width)


@cache
def _functional() -> Any:
    from torchvision.transforms.v2 import functional

    return functional


# --------------------------------------------------------------------------------------------------------------
# JPEGs that are decoded where the model is: by nvJPEG on a GPU, through torchcodec, all of a batch in one call.
#
# Loader processes then only read, draw the crops and tokenize. What they leave over is plain JPEGs that are
# there to their end; they decode everything else themselves. nvJPEG rounds in other places than libjpeg does.


class JpegOfRow(NamedTuple):
    """A JPEG that is yet to be decoded.

    ``row`` is its place in the batch, ``size`` its height and width by its header.
    """

    row: int
    data: bytes
    size: tuple[int, int]
    recipe: Recipe


@dataclass(frozen=True, kw_only=True)
class Undecoded:
    """The JPEGs of a batch that are yet to be decoded.

    Attributes:
        content: uint8, the files one after the other: each tensor takes a file descriptor on its way from a loader
            process.
        ends: where each ends in ``content``.
        jpegs: what else is known of them, their data left out.
    """

    content: Tensor
    ends: tuple[int, ...]
    jpegs: tuple[JpegOfRow, ...]

    @classmethod
    def of(cls, jpegs: Sequence[JpegOfRow]) -> "Undecoded":
        """These JPEGs, their data together."""
        content = torch.frombuffer(bytearray().join(one.data for one in jpegs), dtype=torch.uint8)
        ends = np.cumsum([len(one.data) for one in jpegs]).tolist()
        return cls(content=content, ends=tuple(ends), jpegs=tuple(one._replace(data=b"") for one in jpegs))


def decode_into(images: Tensor, undecoded: Undecoded) -> None:
    """Decode on the device of ``images``, (B, 3, S, S) uint8, and write each picture into its row.

    Raises:
        DataError: one does not decode; which one is not told.
    """
    files = list(undecoded.content.tensor_split(undecoded.ends[:-1]))
    try:
        decoded = jpeg_decoder()(files, mode="RGB", device=images.device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise DataError(f"a picture does not decode on {images.device}: {error}") from error
    for pixels, one in zip(decoded, undecoded.jpegs, strict=True):
        if tuple(pixels.shape[1:]) != one.size:
            raise DataError("picture does not decode: it has two sizes")
        follow_recipe(pixels, one.recipe, images[one.row])


def require_nvjpeg(device: torch.device) -> None:
    """See before a training that nvJPEG is there.

    Raises:
        ConfigError: it is not, and what to do.
    """
    if device.type != "cuda":
        raise ConfigError("data.nvjpeg = true needs a GPU, and there is none here: leave it out")
    jpeg_decoder()


def jpeg_decoder() -> Callable[..., Any]:
    """torchcodec's decoder of JPEGs.

    Raises:
        ConfigError: it is not installed, or not for this torch.
    """
    try:
        from torchcodec import decoders
    except (ImportError, OSError, RuntimeError) as error:  # what a library of another torch's version raises
        raise ConfigError(
            'data.nvjpeg = true needs torchcodec, of a version for this torch: pip install -e ".[nvjpeg]"'
        ) from error
    decode: Callable[..., Any] = decoders.decode_jpeg
    return decode
