"""Samples for comparing a model with its export.

The images have exactly the model's image size, so that no library resizes them.
Letters: N images or texts, S image side, O embedding dimension.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from clipkit.model.clip import CLIP
from clipkit.model.preprocess import preprocess_images
from clipkit.model.tokenizer import ClassTokenizer

if TYPE_CHECKING:
    from PIL.Image import Image

TEXTS = (
    "a photo of a cat",
    "two red circles on a blue ground",
    "x",
    "The quick brown fox doesn't jump over 13 lazy dogs.",
    "price: 12.50 $, 3 for 30 (today only!)",
    "eine Straße in der Abenddämmerung",
    "猫の写真",
    "many words, more than fit: " + "a long road with trees on both sides, " * 30,
)


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Inputs and the model's outputs for them.

    Attributes:
        images: N images of S x S pixels; arrays (S, S, C) if C is not 3.
        texts: N texts, one longer than any context length; for a class head, class names.
        pixels: (N, C, S, S) float32, the preprocessed and normalized images.
        image_features: (N, O) float32, not normalized.
    """

    images: tuple["Image | npt.NDArray[np.uint8]", ...]
    texts: tuple[str, ...]
    pixels: Tensor
    image_features: Tensor
    text_features: Tensor

    @property
    def image_embeddings(self) -> Tensor:
        """(N, O), unit norm."""
        return F.normalize(self.image_features, dim=-1)

    @property
    def text_embeddings(self) -> Tensor:
        """(N, O), unit norm."""
        return F.normalize(self.text_features, dim=-1)


@torch.no_grad()
def draw_samples(model: CLIP) -> Samples:
    """Create sample images, and encode them and ``select_texts(model)``; the model must be in evaluation mode."""
    from PIL import Image

    texts = select_texts(model)
    size, channels = model.preprocess.image_size, model.preprocess.channels
    images: list[Image.Image | npt.NDArray[np.uint8]] = []
    for seed in range(len(TEXTS)):  # a gradient with a rectangle and noise
        random = np.random.default_rng(seed)
        ends = random.uniform(0, 255, (2, channels))
        slope = np.linspace(0, 1, size)[:, None, None] * random.uniform(0.2, 1, (1, size, 1))
        canvas = ends[0] + (ends[1] - ends[0]) * slope  # (S, S, C)
        (top, left), (high, wide) = (
            random.integers(0, max(1, size // 2), 2),
            random.integers(1, size // 2 + 2, 2),
        )
        canvas[top : top + high, left : left + wide] = random.uniform(0, 255, channels)
        canvas += random.normal(0, 12, canvas.shape)
        values = canvas.clip(0, 255).astype(np.uint8)
        images.append(Image.fromarray(values) if channels == 3 else values)
    pixels = normalize_pixels(preprocess_images(images, model.preprocess), model)
    return Samples(
        images=tuple(images),
        texts=texts,
        pixels=pixels,
        image_features=model.encode_image(pixels, normalize=False),
        text_features=model.encode_text(model.tokenizer(texts), normalize=False),
    )


def select_texts(model: CLIP) -> tuple[str, ...]:
    """Return ``TEXTS``, or the same number of class names for a model with a class head."""
    if not isinstance(model.tokenizer, ClassTokenizer):
        return TEXTS
    names = model.tokenizer.names
    return tuple(names[i % len(names)] for i in range(len(TEXTS)))


def normalize_pixels(pixels: Tensor, model: CLIP) -> Tensor:
    """Normalize pixels with the model's mean and standard deviation: (N, C, S, S) uint8 → float32."""
    mean = torch.tensor(model.preprocess.mean).view(-1, 1, 1)
    std = torch.tensor(model.preprocess.std).view(-1, 1, 1)
    return (pixels.float() / 255 - mean) / std


def max_difference(values: object, expected: Tensor) -> float:
    """Return the largest absolute difference of two arrays of the same shape; NaN counts as infinite."""
    other = torch.as_tensor(values, dtype=torch.float32)
    assert other.shape == expected.shape, (tuple(other.shape), tuple(expected.shape))
    return float((other - expected).abs().max().nan_to_num(nan=torch.inf))
