"""What a model and its export are both asked to encode, so that the two can be compared.

The pictures have exactly the model's size: then no library resizes them, and what differs is the model alone.
Letters: N pictures or texts, S image side, O embedding dimension.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from clipkit.model import CLIP
from clipkit.preprocess import batch_of
from clipkit.text_input import ClassTokenizer

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["TEXTS", "Samples", "difference", "draw_samples", "normalized", "texts_of"]

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
    """Inputs and what the model makes of them.

    Attributes:
        pictures: N of S x S pixels.
        texts: N, one of which is longer than any context; of a head of classes, names of these.
        pixels: the pictures as the model sees them, normalized float32 (N, 3, S, S).
        image_features: (N, O) float32, not normalized.
        text_features: likewise.
    """

    pictures: tuple["Image", ...]
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
    """Draw pictures, and encode them and ``texts_of`` the model, which is in evaluation mode."""
    texts = texts_of(model)
    pictures = tuple(_picture(number, model.preprocess.image_size) for number in range(len(TEXTS)))
    pixels = normalized(batch_of(pictures, model.preprocess), model)
    return Samples(
        pictures=pictures,
        texts=texts,
        pixels=pixels,
        image_features=model.encode_image(pixels, normalize=False),
        text_features=model.encode_text(model.tokenizer(texts), normalize=False),
    )


def texts_of(model: CLIP) -> tuple[str, ...]:
    """As many texts as ``TEXTS``: these, or for a head of classes, which reads nothing else, names of its own."""
    if not isinstance(model.tokenizer, ClassTokenizer):
        return TEXTS
    names = model.tokenizer.names
    return tuple(names[number % len(names)] for number in range(len(TEXTS)))


def normalized(pixels: Tensor, model: CLIP) -> Tensor:
    """(N, 3, S, S) uint8 → float32 with the model's mean and standard deviation."""
    mean, std = (torch.tensor(one).view(3, 1, 1) for one in (model.preprocess.mean, model.preprocess.std))
    return (pixels.float() / 255 - mean) / std


def difference(found: object, expected: Tensor) -> float:
    """The largest difference of two equally large arrays; not a number counts as infinite."""
    other = torch.as_tensor(found, dtype=torch.float32)
    assert other.shape == expected.shape, (tuple(other.shape), tuple(expected.shape))
    return float((other - expected).abs().max().nan_to_num(nan=torch.inf))


def _picture(number: int, size: int) -> "Image":
    """A gradient with a rectangle on it, and noise: another one for each number."""
    from PIL import Image

    random = np.random.default_rng(number)
    ends = random.uniform(0, 255, (2, 3))
    slope = np.linspace(0, 1, size)[:, None, None] * random.uniform(0.2, 1, (1, size, 1))
    canvas = ends[0] + (ends[1] - ends[0]) * slope  # (S, S, 3)
    (top, left), (high, wide) = random.integers(0, max(1, size // 2), 2), random.integers(1, size // 2 + 2, 2)
    canvas[top : top + high, left : left + wide] = random.uniform(0, 255, 3)
    canvas += random.normal(0, 12, canvas.shape)
    return Image.fromarray(canvas.clip(0, 255).astype(np.uint8))
