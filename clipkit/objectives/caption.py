"""The caption term, and the objective that has no contrastive loss beside it."""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from clipkit.config import CaptionConfig
from clipkit.model.architectures import Architecture
from clipkit.model.clip import CLIP
from clipkit.model.decoder import TextInput
from clipkit.model.towers import chosen_rows
from clipkit.objectives import Targets

__all__ = ["caption_inputs", "caption_sum", "no_figures", "no_loss"]


class _Captions(Protocol):
    @property
    def tokens(self) -> Tensor: ...
    @property
    def lengths(self) -> Sequence[int]: ...
    @property
    def rows(self) -> Tensor: ...


def caption_inputs(
    settings: CaptionConfig, batch: _Captions, seed: int, shape: Architecture, teach: object = None
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


def no_loss(images: Tensor, texts: Tensor, scale: Tensor, *bias: Tensor, targets: Targets) -> Tensor:
    """Return 0, which depends on all outputs, so that each parameter has a gradient."""
    return 0.0 * sum((one.sum() for one in (texts, scale, *bias)), images.sum())


def no_figures(images: Tensor, texts: Tensor, targets: Targets) -> dict[str, float]:
    """Return no metrics."""
    return {}
