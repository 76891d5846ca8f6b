"""The local terms of captions, masked patches and pixels, see ``TERMS``; and the objective without a comparison."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from clipkit.batch import Batch
from clipkit.config import CaptionConfig, ImageGptConfig, MaskedConfig
from clipkit.model.architectures import Architecture, PixelTower
from clipkit.model.clip import CLIP
from clipkit.model.decoder import TextInput
from clipkit.model.masked import corrupted
from clipkit.model.pixels import PixelTransformer
from clipkit.model.towers import VisionTransformer, chosen_rows, kept_patches
from clipkit.objectives import Targets
from clipkit.objectives.distill import Teaching

__all__ = [
    "caption_inputs", "caption_sum", "masked_inputs", "masked_sum", "no_figures", "no_loss",
    "pixel_inputs", "pixel_sum",
]  # fmt: skip

Teach = Callable[[], Teaching]


def caption_inputs(
    settings: CaptionConfig, batch: Batch, seed: int, shape: Architecture, teach: Teach
) -> tuple[dict[str, Any], int]:
    """Return the arguments of ``CaptionDecoder.nll`` and the number of predicted tokens, see ``Term``."""
    given: dict[str, Any] = {"captions": batch.tokens, "lengths": batch.lengths}
    if settings.parallel:
        rows = batch.rows.to(batch.tokens.device)
        given["parallel"] = chosen_rows(seed=seed, rows=rows, fraction=settings.parallel)
    return given, sum(min(length - 1, settings.length) for length in batch.lengths)


def caption_sum(
    model: CLIP, images: Tensor, image_tokens: Tensor, text: TextInput | None, **given: Any
) -> Tensor:
    """Compute ``CaptionDecoder.nll``."""
    assert model.text_decoder is not None
    return model.text_decoder.nll(image_tokens, text=text, **given)


def masked_inputs(
    settings: MaskedConfig, batch: Batch, seed: int, shape: Architecture, teach: Teach
) -> tuple[dict[str, Tensor], int]:
    """Return the arguments of ``MaskedPatchHead.nll`` and the number of predicted patches, see ``Term``."""
    vision = shape.vision.plain
    assert vision is not None
    given = corrupted(
        batch.images,
        target=settings.target,
        side=vision.patch_size,
        fraction=settings.fraction,
        seed=seed,
        rows=batch.rows.to(batch.images.device),
    )
    if settings.target == "features":
        tokens = teach().tokens
        assert tokens is not None
        index = (given["chosen"] + 1)[..., None].expand(-1, -1, tokens.shape[-1])  # after the class token
        given["labels"] = F.layer_norm(tokens.gather(1, index).float(), tokens.shape[-1:])
    return given, given["chosen"].numel()


def masked_sum(
    model: CLIP, images: Tensor, image_tokens: Tensor | None, text: TextInput | None, **given: Tensor
) -> Tensor:
    """Compute ``MaskedPatchHead.nll``."""
    assert model.masked_head is not None and isinstance(model.visual, VisionTransformer)
    return model.masked_head.nll(model.visual, images, colors=model.colors, **given)


def pixel_inputs(
    settings: ImageGptConfig, batch: Batch, seed: int, shape: Architecture, teach: Teach
) -> tuple[dict[str, Tensor], int]:
    """Return the arguments of ``PixelTransformer.nll`` and the number of predicted pixels, see ``Term``."""
    vision = shape.vision
    assert isinstance(vision, PixelTower)
    pixels = vision.image_size**2
    if vision.causal:
        return {}, len(batch.images) * pixels
    rows, keep = batch.rows.to(batch.images.device), max(1, round(settings.fraction * pixels))
    chosen = kept_patches(seed=seed, rows=rows, patches=pixels, keep=keep)
    return {"chosen": chosen}, chosen.numel()


def pixel_sum(
    model: CLIP, images: Tensor, image_tokens: Tensor, text: TextInput | None, **given: Tensor
) -> Tensor:
    """Compute ``PixelTransformer.nll``."""
    assert isinstance(model.visual, PixelTransformer)
    return model.visual.nll(images, image_tokens, **given)


def no_loss(images: Tensor, texts: Tensor, scale: Tensor, *bias: Tensor, targets: Targets) -> Tensor:
    """Return 0 as a function of all outputs, so that each parameter has a gradient."""
    return 0.0 * sum((one.sum() for one in (texts, scale, *bias)), images.sum())


def no_figures(images: Tensor, texts: Tensor, targets: Targets) -> dict[str, float]:
    """Return no metrics."""
    return {}
