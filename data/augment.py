"""A training picture's random crop: a function of (seed, epoch, sample id) and nothing else."""

import math
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from clipkit.preprocess import channels_first

__all__ = ["preload", "random_of", "train_transform"]

_ASPECT = (3 / 4, 4 / 3)
_TRIES = 10


def preload() -> None:
    """Import what the first picture needs, so that worker processes share it instead of each importing it."""
    _resize()


def random_of(*stream: int) -> np.random.Generator:
    """The generator of one sample in one epoch; streams that differ anywhere are independent."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(stream)))


def train_transform(
    image: npt.NDArray[np.uint8], *, image_size: int, crop_scale: float, random: np.random.Generator
) -> Tensor:
    """(H, W, 3) uint8 → (3, S, S) uint8: a random crop resized by antialiased bicubic.

    The crop keeps a share of the area between ``crop_scale`` and 1 at an aspect ratio between 3:4 and 4:3
    (Szegedy et al. 2015); a ``crop_scale`` of 1 keeps the largest centred square.
    """
    height, width = image.shape[:2]
    top, left, crop_height, crop_width = _crop(height, width, crop_scale, random)
    pixels = channels_first(image)[:, top : top + crop_height, left : left + crop_width]
    if (crop_height, crop_width) == (image_size, image_size):
        return pixels.contiguous()
    resized: Tensor = _resize()(pixels, [image_size, image_size])
    return resized


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

    from torchvision.transforms.v2 import InterpolationMode, functional

    return partial(functional.resize, interpolation=InterpolationMode.BICUBIC, antialias=True)
