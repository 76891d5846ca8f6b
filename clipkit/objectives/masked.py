"""The term that predicts masked patches."""

from collections.abc import Callable
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from clipkit.config import MaskedConfig
from clipkit.model.architectures import Architecture
from clipkit.model.clip import CLIP
from clipkit.model.masked import corrupted
from clipkit.model.towers import VisionTransformer
from clipkit.objectives.distill import Teaching

__all__ = ["masked_inputs", "masked_sum"]


class _Images(Protocol):
    @property
    def images(self) -> Tensor: ...
    @property
    def rows(self) -> Tensor: ...


def masked_inputs(
    settings: MaskedConfig,
    batch: _Images,
    seed: int,
    shape: Architecture,
    teach: Callable[[], Teaching] | None = None,
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
        assert teach is not None
        tokens = teach().tokens
        assert tokens is not None
        index = (given["chosen"] + 1)[..., None].expand(-1, -1, tokens.shape[-1])
        given["labels"] = F.layer_norm(tokens.gather(1, index).float(), tokens.shape[-1:])
    return given, given["chosen"].numel()


def masked_sum(
    model: CLIP, images: Tensor, image_tokens: Tensor | None, text_tokens: Tensor | None, **given: Tensor
) -> Tensor:
    """Compute ``MaskedPatchHead.nll``."""
    assert model.masked_head is not None and isinstance(model.visual, VisionTransformer)
    return model.masked_head.nll(model.visual, images, colors=model.colors, **given)
