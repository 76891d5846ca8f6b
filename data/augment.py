"""What happens to a training picture by chance: a function of (seed, epoch, sample id) and nothing else."""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from clipkit.preprocess import channels_first

__all__ = ["Augmentation", "preload", "random_of", "train_transform"]

_ASPECT = (3 / 4, 4 / 3)
_TRIES = 10
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
    """

    crop_scale: float = 0.9
    flip: float = 0.0
    color_jitter: float = 0.0
    grayscale: float = 0.0


def preload() -> None:
    """Import what the first picture needs, so that worker processes share it instead of each importing it."""
    _resize()


def random_of(*stream: int) -> np.random.Generator:
    """The generator of one sample in one epoch; streams that differ anywhere are independent."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(stream)))


def train_transform(
    image: npt.NDArray[np.uint8],
    *,
    image_size: int,
    augmentation: Augmentation,
    random: np.random.Generator,
) -> Tensor:
    """(H, W, 3) uint8 → (3, S, S) uint8: a random crop resized by antialiased bicubic, then flip and colours.

    The crop keeps a share of the area between ``crop_scale`` and 1 at an aspect ratio between 3:4 and 4:3
    (Szegedy et al. 2015); a ``crop_scale`` of 1 keeps the largest centred square.
    """
    height, width = image.shape[:2]
    top, left, crop_height, crop_width = _crop(height, width, augmentation.crop_scale, random)
    pixels = channels_first(image)[:, top : top + crop_height, left : left + crop_width]
    if (crop_height, crop_width) != (image_size, image_size):
        pixels = _resize()(pixels, [image_size, image_size])
    if augmentation.flip and random.random() < augmentation.flip:
        pixels = pixels.flip(-1)
    return _recolour(pixels, augmentation, random).contiguous()


def _recolour(pixels: Tensor, augmentation: Augmentation, random: np.random.Generator) -> Tensor:
    """(3, S, S) uint8 → the same with other colours."""
    strength = augmentation.color_jitter
    if strength and random.random() < _JITTERED:
        change = _functional()
        for adjust in (change.adjust_brightness, change.adjust_contrast, change.adjust_saturation):
            pixels = adjust(pixels, random.uniform(max(0.0, 1 - strength), 1 + strength))
        pixels = change.adjust_hue(pixels, random.uniform(-1, 1) * _HUE * strength)
    if augmentation.grayscale and random.random() < augmentation.grayscale:
        pixels = _functional().rgb_to_grayscale(pixels, num_output_channels=3)
    return pixels


def _crop(
    height: int, width: int, crop_scale: float, random: np.random.Generator
) -> tuple[int, int, int, int]:
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
def _resize() -> Any:
    from functools import partial

    from torchvision.transforms.v2 import InterpolationMode

    return partial(_functional().resize, interpolation=InterpolationMode.BICUBIC, antialias=True)


@cache
def _functional() -> Any:
    from torchvision.transforms.v2 import functional

    return functional
