"""The term that predicts pixels of Image GPT."""

from typing import Protocol

from torch import Tensor

from clipkit.config import PixelsConfig
from clipkit.model.architectures import Architecture, PixelTower
from clipkit.model.clip import CLIP
from clipkit.model.pixels import PixelTransformer
from clipkit.model.towers import kept_patches

__all__ = ["pixel_inputs", "pixel_sum"]


class _Images(Protocol):
    @property
    def images(self) -> Tensor: ...
    @property
    def rows(self) -> Tensor: ...


def pixel_inputs(
    settings: PixelsConfig, batch: _Images, seed: int, shape: Architecture, teach: object = None
) -> tuple[dict[str, Tensor], int]:
    """Return the arguments of ``PixelTransformer.nll`` and the number of predicted pixels, see ``Term``."""
    vision = shape.vision
    assert isinstance(vision, PixelTower)
    pixels = vision.image_size**2
    if vision.causal:
        return {}, len(batch.images) * pixels
    rows = batch.rows.to(batch.images.device)
    keep = max(1, round(settings.fraction * pixels))
    chosen = kept_patches(seed=seed, rows=rows, patches=pixels, keep=keep)
    return {"chosen": chosen}, chosen.numel()


def pixel_sum(
    model: CLIP, images: Tensor, image_tokens: Tensor, text_tokens: Tensor | None, **given: Tensor
) -> Tensor:
    """Compute ``PixelTransformer.nll``."""
    assert isinstance(model.visual, PixelTransformer)
    return model.visual.nll(images, image_tokens, **given)
