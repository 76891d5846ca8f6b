"""The term that predicts masked patches."""

from typing import Protocol

from torch import Tensor

from clipkit.config import MaskedConfig
from clipkit.model.architectures import Architecture
from clipkit.model.masked import corrupted

__all__ = ["masked_inputs"]


class _Images(Protocol):
    @property
    def images(self) -> Tensor: ...
    @property
    def rows(self) -> Tensor: ...


def masked_inputs(
    settings: MaskedConfig, batch: _Images, seed: int, shape: Architecture
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
    return given, given["chosen"].numel()
