"""Random changes of training images, such as crops and flips: a function of (seed, epoch, sample id)."""

import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from clipkit.config import RENAMED, DataConfig, load_config
from clipkit.errors import ConfigError, DataError
from clipkit.model import PatchBudget
from clipkit.samples import (
    Decoding,
    Traits,
    color_of,
    decode_pixels,
    jpeg_orientation,
    jpeg_size,
    parse_pixel_range,
)

_TRIES = 10  # random crops tried before the center crop is used
_REDUCTIONS = (8, 4, 2)  # factors by which JPEGs can be decoded smaller
_MARGIN = 2  # minimum side of the crop after scaled decoding, in units of the output side
_JITTERED = 0.8  # fraction of images with changed colors
_BLUR = (0.1, 2.0)  # standard deviation in pixels (Chen et al. 2020, https://arxiv.org/abs/2002.05709)
_HUE = 0.25  # of color_jitter, as a fraction of the color circle (Chen et al. 2020)
_AFFINE = (
    10.0,
    0.1,
    0.1,
    0.2,
    15.0,
    15.0,
)  # largest angle, shifts, change of size and shears at strength 1 (PLIP)
_AFFINE_FILL = 127.0


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Random changes of training images.

    Attributes:
        crop_scale: smallest fraction of the area that a random crop covers; 1 takes the center square.
        crop_aspect: largest ratio of the sides of a random crop, in both directions; of images of variable size,
            relative to the ratio of the image.
        flip: probability of mirroring.
        vertical_flip: probability of turning the image upside down.
        rotate90: probability of a rotation by 90, 180 or 270 degrees.
        color_jitter: largest relative change of brightness, contrast and saturation, applied to 4 of 5
            images; the hue shifts by up to a quarter of it, as a fraction of the color circle.
        grayscale: probability of conversion to grayscale.
        blur: probability of a Gaussian blur.
        affine: strength of random affine transformations, of images that are resized to the output.
        scaled_decode: decode a JPEG at 1/2, 1/4 or 1/8 of its size if the crop remains at least twice as large as
            the output. The crop is rounded to pixels of the smaller image, which moves it by at most a quarter of
            an output pixel. Values differ by 0.7 of 255 on average (bench/decode.py).
        interpolation: "bicubic" or "bilinear", that of the model, see ``Preprocess``.
    """

    crop_scale: float = DataConfig.crop_scale
    crop_aspect: float = DataConfig.crop_aspect
    flip: float = DataConfig.flip
    vertical_flip: float = DataConfig.vertical_flip
    rotate90: float = DataConfig.rotate90
    color_jitter: float = DataConfig.color_jitter
    grayscale: float = DataConfig.grayscale
    blur: float = DataConfig.blur
    affine: float = DataConfig.affine
    scaled_decode: bool = DataConfig.scaled_decode
    interpolation: str = "bicubic"

    @classmethod
    def of(cls, settings: DataConfig, *, interpolation: str = "bicubic") -> "Augmentation":
        """Return the augmentation of a configuration for a model with this interpolation."""
        values = {name: getattr(settings, name) for name in cls.settings()}
        return cls(**values, interpolation=interpolation)

    @classmethod
    def settings(cls) -> list[str]:
        """Return the names of the settings ``data.NAME``."""
        return [field.name for field in fields(cls) if field.name != "interpolation"]

    @property
    def is_random(self) -> bool:
        """Whether an image differs from one epoch to the next."""
        changes = (
            self.flip, self.vertical_flip, self.rotate90, self.color_jitter, self.grayscale, self.blur, self.affine
        )  # fmt: skip
        return self.crop_scale < 1 or any(changes)


def image_settings(words: Sequence[str]) -> tuple[Augmentation, Decoding, list[str]]:
    """Separate settings of images (``data.NAME=VALUE``, ``pixels.NAME=VALUE``) from a command's other arguments.

    Returns:
        The augmentation, the decoding, and the other arguments.
    """
    overrides = [word for word in words if re.match(r"(data|pixels)\.\w+=", word)]
    allowed = [f"data.{name}" for name in Augmentation.settings()]
    allowed += [f"pixels.{name}" for name in ("background", "channels", "range", "upright")]
    config = load_config(Path(os.devnull), overrides)
    for name in (word.partition("=")[0] for word in overrides):
        if RENAMED.get(name, name) not in allowed:
            raise ConfigError(f"{name} has no effect here; settings with an effect: {', '.join(allowed)}")
    pixels = config.pixels
    decoding = Decoding(
        background=color_of(pixels.background) if pixels.background else None,
        upright=pixels.upright is True,
        pixel_range=parse_pixel_range(pixels.range),
        channels=pixels.channels,
    )
    return Augmentation.of(config.data), decoding, [word for word in words if word not in overrides]


_Box = tuple[int, int, int, int]  # top, left, height, width


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """The random choices for one image.

    Attributes:
        box: top, left, height and width of the crop.
        mirrored: whether to flip it.
        colors: factors of brightness, contrast and saturation, and the hue shift; None for no change.
        gray: whether to convert it to grayscale.
        upside_down: whether to flip it vertically.
        turns: number of rotations by 90 degrees, counterclockwise.
        blur: standard deviation of the Gaussian in pixels; 0 for none.
        affine: angle in degrees, shift to the right and down as fractions of the side, factor of the size, and
            horizontal and vertical shear in degrees; None for no change.
        interpolation: "bicubic" or "bilinear".
    """

    box: _Box
    mirrored: bool
    colors: tuple[float, float, float, float] | None
    gray: bool
    upside_down: bool
    turns: int
    blur: float
    affine: tuple[float, ...] | None
    interpolation: str


def preload(augmentation: Augmentation) -> None:
    """Import the modules that decoding needs, before worker processes are forked."""
    import simplejpeg  # noqa: F401
    from PIL import Image

    Image.init()
    if augmentation.affine:
        from torchvision.transforms.v2 import functional  # noqa: F401


def empty_batch(
    count: int, image_size: int, channels: int = 3, *, patches: PatchBudget | None = None
) -> Tensor:
    """Return an uninitialized (B, C, S, S) uint8 tensor in channels-last memory format, or one of strips."""
    shape = patches.strip_shape(channels) if patches else (channels, image_size, image_size)
    return torch.empty((count, *shape), dtype=torch.uint8, memory_format=torch.channels_last)


CROP, SUBSTITUTE, CAPTION, NEGATIVE, WORDS = range(5)  # purposes of random numbers; part of their seed


def random_of(*stream: int) -> np.random.Generator:
    """Return the random generator for a tuple of integers such as (seed, purpose, epoch, sample)."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(stream)))


def training_pixels(
    data: bytes,
    *,
    image_size: int,
    augmentation: Augmentation,
    random: np.random.Generator,
    out: Tensor,
    decoding: Decoding | None = None,
    patches: PatchBudget | None = None,
) -> Traits:
    """Decode an image into ``out``, (C, S, S) uint8: random crop, antialiased resizing, then the changes.

    The crop has a fraction of the area between ``crop_scale`` and 1 and an aspect ratio of at most ``crop_aspect``
    (Szegedy et al. 2015); a ``crop_scale`` of 1 takes the largest center square. With ``patches``, ``out`` is a
    strip of patches, see ``clipkit.model.naflex``, and a ``crop_scale`` of 1 takes the whole image.

    Args:
        data: content of the image file.
        image_size: S.
        augmentation: random changes.
        random: generator for this image, see ``random_of``.
        out: output, such as a row of ``empty_batch``; undefined after an error.
        decoding: handling of depth, transparency and orientation; default: open_clip's.
        patches: sizes of strips.

    Returns:
        The image's traits, which decoding may have ignored.
    """
    decoding = decoding or Decoding()
    size = jpeg_size(data) if augmentation.scaled_decode else None
    if size is None:
        image, traits = decode_pixels(data, decoding)
        height, width = image.shape[1:]
        recipe = draw_recipe(height, width, augmentation, random, is_square=patches is None)
        box = recipe.box
    else:  # draw the crop before decoding, so that it is the same at every scale
        if decoding.upright and jpeg_orientation(data) >= 5:  # these swap height and width
            size = size[1], size[0]
        recipe = draw_recipe(*size, augmentation, random, is_square=patches is None)
        box = recipe.box
        sides = patches.fit_size(*box[2:]) if patches else (image_size, image_size)
        excess = min(length / side for length, side in zip(box[2:], sides, strict=True))
        by = next((by for by in _REDUCTIONS if excess >= by * _MARGIN), 1)
        image, traits = decode_pixels(data, decoding, reduce=by)
        if image.shape[1:] != size:  # Pillow decodes some files at full size
            if image.shape[1:] != tuple(-(-side // by) for side in size):
                raise DataError("image does not decode: its size differs from its header")
            top = round(box[0] / by)
            left = round(box[1] / by)
            bottom = round((box[0] + box[2]) / by)
            right = round((box[1] + box[3]) / by)
            box = top, left, bottom - top, right - left
    top, left, height, width = box
    # torch's fast path for bytes needs contiguous pixels; it would copy them more slowly
    cut = image.transpose(1, 2, 0)[top : top + height, left : left + width].copy()
    # numpy's cut[None] has a batch stride of 0, for which torch resizes to another memory format than that of out
    _finish(torch.from_numpy(cut)[None].permute(0, 3, 1, 2), recipe, out, patches)
    return traits


def draw_recipe(
    height: int,
    width: int,
    augmentation: Augmentation,
    random: np.random.Generator,
    *,
    is_square: bool = True,
) -> Recipe:
    """Draw the random changes for an image of this size; disabled options draw no random numbers.

    ``is_square`` is whether the crop is resized to a square.
    """
    aspect = 1.0 if is_square else width / height
    box = _crop(height, width, augmentation.crop_scale, augmentation.crop_aspect, random, around=aspect)
    mirrored = bool(augmentation.flip) and random.random() < augmentation.flip
    strength = augmentation.color_jitter
    colors = None
    if strength and random.random() < _JITTERED:
        low = max(0.0, 1 - strength)
        high = 1 + strength
        brightness, contrast, saturation = (random.uniform(low, high) for _ in range(3))
        colors = brightness, contrast, saturation, random.uniform(-1, 1) * _HUE * strength
    gray = bool(augmentation.grayscale) and random.random() < augmentation.grayscale
    upside_down = bool(augmentation.vertical_flip) and random.random() < augmentation.vertical_flip
    turns = 0
    if augmentation.rotate90 and random.random() < augmentation.rotate90:
        turns = int(random.integers(1, 4))
    blur = 0.0
    if augmentation.blur and random.random() < augmentation.blur:
        blur = random.uniform(*_BLUR)
    affine = None
    if augmentation.affine:
        limits = augmentation.affine * np.array(_AFFINE)
        angle, right, down, size, *shears = random.uniform(-limits, limits).tolist()
        affine = angle, right, down, 1 + size, *shears
    return Recipe(
        box=box,
        mirrored=mirrored,
        colors=colors,
        gray=gray,
        upside_down=upside_down,
        turns=turns,
        blur=blur,
        affine=affine,
        interpolation=augmentation.interpolation,
    )


def follow_recipe(pixels: Tensor, recipe: Recipe, out: Tensor) -> None:
    """Apply a recipe to a decoded image, (3, H, W) uint8 → ``out``, (3, S, S) uint8, on one device.

    A GPU resizes in float32, so a few values differ by 1 of 255 from those of ``training_pixels``.
    """
    top, left, height, width = recipe.box
    _finish(pixels[None, :, top : top + height, left : left + width], recipe, out)


def _finish(crop: Tensor, recipe: Recipe, out: Tensor, patches: PatchBudget | None = None) -> None:
    """Resize, flip, rotate, distort, recolor and blur a crop, (1, C, H, W) uint8 → (C, S, S) uint8 or a strip."""
    sides = out.shape[1:] if patches is None else patches.fit_size(*recipe.box[2:])
    if crop.shape[2:] != sides:
        source = crop if crop.device.type == "cpu" else crop.float()  # other devices resize floats only
        resized = torch.nn.functional.interpolate(
            source, size=sides, mode=recipe.interpolation, align_corners=False, antialias=True
        )
        crop = resized if resized.dtype == torch.uint8 else resized.round_().clamp_(0, 255).to(torch.uint8)
    pixels = crop[0]  # (3, S, S)
    if recipe.mirrored:
        pixels = pixels.flip(-1)
    if recipe.upside_down:
        pixels = pixels.flip(-2)
    if recipe.turns:
        pixels = pixels.rot90(recipe.turns, (-2, -1))
    if recipe.affine is not None:
        from torchvision.transforms.v2 import InterpolationMode, functional

        angle, right, down, size, *shears = recipe.affine
        shifts = [round(shift * pixels.shape[-1]) for shift in (right, down)]
        centered = pixels.float() - _AFFINE_FILL  # beyond the crop there are zeros
        moved = functional.affine(centered, angle, shifts, size, shears, InterpolationMode.BILINEAR)
        pixels = (moved + _AFFINE_FILL).round_().to(torch.uint8)
    if recipe.colors is not None:
        pixels = change_colors(pixels, *recipe.colors)
    if recipe.gray:
        pixels = _to_gray(pixels.float()).to(torch.uint8).expand_as(pixels)  # rounded down, as in torchvision
    if recipe.blur:
        pixels = blur(pixels, recipe.blur)
    if patches is None:
        out.copy_(pixels)
    else:
        patches.write_strip(pixels, out)


def change_colors(
    pixels: Tensor, brightness: float, contrast: float, saturation: float, hue: float
) -> Tensor:
    """Change the colors of an image, (3, H, W) uint8, in this order, with the formulas of torchvision.

    Values are rounded once, at the end; torchvision rounds an image of bytes after each change. It takes three to
    four times as long, mostly with the hue.

    Args:
        pixels: the image.
        brightness: factor of all values.
        contrast: factor of their distance from the mean of the grayscale image.
        saturation: factor of their distance from the grayscale image.
        hue: rotation of the color circle of HSV, as a fraction of it.
    """
    values = pixels.flatten(1).to(torch.float32, memory_format=torch.contiguous_format)
    values = values.mul_(brightness).clamp_(max=255)
    # by rows, so that the sum does not depend on the number of threads
    mean = _to_gray(values).mean(dim=-1).mean()
    values = torch.lerp(mean, values, contrast).clamp_(0, 255)
    values = torch.lerp(_to_gray(values), values, saturation).clamp_(0, 255)
    red, green, blue = values
    largest = torch.maximum(torch.maximum(red, green), blue)
    chroma = largest - torch.minimum(torch.minimum(red, green), blue)
    # on the color circle of length 6, red is at 0, green at 2 and blue at 4
    near_green = torch.add(blue - red, chroma, alpha=2)
    near_blue = torch.add(red - green, chroma, alpha=4)
    angle = torch.where(red == largest, green - blue, torch.where(green == largest, near_green, near_blue))
    angle = angle.div_(chroma.clamp(min=1e-6)) + 6 * hue
    # a channel is smallest within 1 of the point opposite to it, and rises to the largest within 1 more
    distance = angle + torch.arange(3, -2, -2, device=values.device)[:, None]
    distance = distance.sub_((distance / 6).round_(), alpha=6).abs_()
    weight = (2 - distance).clamp_(0, 1)
    values = torch.addcmul(largest, chroma, weight, value=-1)
    return values.round_().to(torch.uint8).view(pixels.shape)


def _to_gray(values: Tensor) -> Tensor:
    """Return the brightness of colors, (3, …) → (…), with torchvision's weights (ITU-R BT.601)."""
    red, green, blue = values
    gray: Tensor = red.mul(0.2989).add_(green, alpha=0.587).add_(blue, alpha=0.114)
    return gray


def blur(pixels: Tensor, sigma: float) -> Tensor:
    """Blur an image, (C, H, W) uint8, by a Gaussian of standard deviation ``sigma`` in pixels.

    The image is mirrored at its edges. The Gaussian ends after three standard deviations, or at the length of the
    shorter side. Sums of shifted images take less time than torchvision's convolution with a square.
    """
    radius = min(math.ceil(3 * sigma), min(pixels.shape[-2:]) - 1)
    offsets = np.arange(-radius, radius + 1)
    weights = np.exp(-0.5 * (offsets / sigma) ** 2)
    weights /= weights.sum()
    values = pixels.to(torch.float32, memory_format=torch.contiguous_format)
    values = torch.nn.functional.pad(values, [radius] * 4, mode="reflect")
    for dim, length in ((1, pixels.shape[1]), (2, pixels.shape[2])):
        total = torch.zeros_like(values.narrow(dim, 0, length))
        for start, weight in enumerate(weights.tolist()):
            total.add_(values.narrow(dim, start, length), alpha=weight)
        values = total
    return values.round_().to(torch.uint8)


def _crop(
    height: int,
    width: int,
    crop_scale: float,
    crop_aspect: float,
    random: np.random.Generator,
    *,
    around: float = 1.0,
) -> _Box:
    """Draw a crop; after ``_TRIES`` invalid draws, use the largest center crop of an allowed aspect ratio.

    Aspect ratios are from ``around / crop_aspect`` to ``around * crop_aspect``.
    """
    if crop_scale < 1:
        smallest = math.log(1 / crop_aspect)
        largest = math.log(crop_aspect)
        for _ in range(_TRIES):
            # the formula of random.uniform, which takes three times as long for single numbers
            area = height * width * (crop_scale + (1.0 - crop_scale) * random.random())
            aspect = around * math.exp(smallest + (largest - smallest) * random.random())
            crop_width = round(math.sqrt(area * aspect))
            crop_height = round(math.sqrt(area / aspect))
            if 0 < crop_width <= width and 0 < crop_height <= height:
                top = int(random.integers(height - crop_height + 1))
                left = int(random.integers(width - crop_width + 1))
                return top, left, crop_height, crop_width
        low, high = around / crop_aspect, around * crop_aspect
    else:
        low = high = around
    crop_height = min(height, round(width / low))
    crop_width = min(width, round(height * high))
    return (height - crop_height) // 2, (width - crop_width) // 2, max(1, crop_height), max(1, crop_width)


# --------------------------------------------------------------------------------------------------------------
# Decoding on a GPU with nvJPEG, through torchcodec, in one call per batch. Loader processes read, draw crops and
# tokenize; they decode only images that are not plain, complete JPEGs. nvJPEG rounds differently from libjpeg.


class JpegOfRow(NamedTuple):
    """A JPEG to be decoded: row in the batch, file content, height and width from the header, and recipe."""

    row: int
    data: bytes
    size: tuple[int, int]
    recipe: Recipe


@dataclass(frozen=True, kw_only=True)
class Undecoded:
    """The JPEGs of a batch that are not decoded yet.

    Attributes:
        content: uint8, the concatenated files; a single tensor, because sending a tensor to another process takes a
            file descriptor.
        ends: where each file ends in ``content``.
        jpegs: the JPEGs, with empty ``data``.
    """

    content: Tensor
    ends: tuple[int, ...]
    jpegs: tuple[JpegOfRow, ...]

    @classmethod
    def of(cls, jpegs: Sequence[JpegOfRow]) -> "Undecoded":
        """Concatenate the data of JPEGs."""
        content = torch.frombuffer(bytearray().join(jpeg.data for jpeg in jpegs), dtype=torch.uint8)
        ends = np.cumsum([len(jpeg.data) for jpeg in jpegs]).tolist()
        return cls(content=content, ends=tuple(ends), jpegs=tuple(jpeg._replace(data=b"") for jpeg in jpegs))


def decode_into(images: Tensor, undecoded: Undecoded) -> None:
    """Decode on the device of ``images``, (B, 3, S, S) uint8, and write each image into its row."""
    files = list(undecoded.content.tensor_split(undecoded.ends[:-1]))
    try:
        decoded = jpeg_decoder()(files, mode="RGB", device=images.device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise DataError(f"an image does not decode on {images.device}: {error}") from error
    for pixels, jpeg in zip(decoded, undecoded.jpegs, strict=True):
        if tuple(pixels.shape[1:]) != jpeg.size:
            raise DataError("image does not decode: its size differs from its header")
        follow_recipe(pixels, jpeg.recipe, images[jpeg.row])


def require_nvjpeg(device: torch.device) -> None:
    """Raise ConfigError if nvJPEG is not available."""
    if device.type != "cuda":
        raise ConfigError("data.nvjpeg = true requires a GPU, and this machine has none: remove the setting")
    jpeg_decoder()


def jpeg_decoder() -> Callable[..., Any]:
    """Return torchcodec's JPEG decoder; raise ConfigError if it is not installed for this torch."""
    try:
        from torchcodec import decoders
    except (ImportError, OSError, RuntimeError) as error:  # built for another version of torch
        raise ConfigError(
            'data.nvjpeg = true requires torchcodec built for this torch: pip install -e ".[nvjpeg]"'
        ) from error
    decode: Callable[..., Any] = decoders.decode_jpeg
    return decode
