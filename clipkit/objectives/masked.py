"""The term that predicts masked patches of images, see clipkit/model/masked.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from clipkit.cli import Within, setting
from clipkit.config import Config, ModelConfig, require, require_use
from clipkit.errors import ConfigError
from clipkit.model.architectures import Architecture
from clipkit.model.clip import CLIP
from clipkit.model.masked import corrupt_patches
from clipkit.model.towers import VisionTransformer
from clipkit.objectives.base import Term, TermBatch, after_setting, weight_setting


@dataclass(frozen=True, kw_only=True)
class Masked(Term):
    """Predict masked patches of images, in addition to ``loss.name``; see clipkit/model/masked.py.

    Images with masked patches are encoded in a further pass. The term is the mean over the chosen patches.
    """

    section = "masked."
    stream = 2

    weight: float = weight_setting()
    fraction: float = setting(
        0.5,
        "Fraction of the patches that is chosen: 80% of them are masked, 10% replaced by another patch of the "
        "image, and 10% kept.",
        Within(words="more than 0, at most 1", holds=lambda value: 0 < value <= 1),
        needs="weight",
    )
    target: str = setting(
        "color",
        "Prediction target: the class of a patch's mean color among 512, those of its 4 × 4 cells (small), its "
        "normalized pixels, or its token with averaged weights (features).",
        registry="clipkit.model.architectures:MASKED",
        needs="weight",
    )
    after: int = after_setting()

    @property
    def uses_average(self) -> bool:
        return self.target == "features"

    @property
    def encodes_again(self) -> bool:
        return True

    def check(self, config: Config) -> None:
        super().check(config)
        if self.target == "features":
            require_use("masked.target", self.target, "optim.average", bool(config.optim.average))
        if self.target in ("color", "small"):
            rgb = "requires RGB images: pixels.channels = 3"
            require(config.pixels.channels == 3, "masked.target", self.target, rgb)

    def heads(self, shape: Architecture, model: ModelConfig) -> dict[str, Any]:
        if not shape.vision.masked_outputs(self.target):
            raise ConfigError(
                f"masked.weight requires clipkit's own ViT as the image tower, not {model.label}"
            )
        return {"masked": self.target}

    def inputs(self, draw: TermBatch) -> tuple[dict[str, Any], int]:
        """Return the arguments of ``MaskedPatchHead.sum_losses`` and the number of predicted patches."""
        batch = draw.batch
        inputs: dict[str, Any] = corrupt_patches(
            batch.images,
            target=self.target,
            side=draw.shape.vision.size_step,
            fraction=self.fraction,
            seed=draw.seed,
            rows=batch.rows,
        )
        if self.target == "features":
            tokens = draw.teach().tokens
            assert tokens is not None
            # after the class token
            index = (inputs["chosen"] + 1)[..., None].expand(-1, -1, tokens.shape[-1])
            inputs["labels"] = F.layer_norm(tokens.gather(1, index).float(), tokens.shape[-1:])
        return inputs, inputs["chosen"].numel()

    def total(self, model: CLIP, images: Tensor, tokens: Sequence[Tensor], **inputs: Any) -> Tensor:
        assert model.masked_head is not None and isinstance(model.visual, VisionTransformer)
        return model.masked_head.sum_losses(model.visual, images, colors=model.colors, **inputs)
