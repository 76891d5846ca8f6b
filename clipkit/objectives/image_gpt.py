"""The term that predicts pixels, see clipkit/model/pixels.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from clipkit.cli import Within, setting
from clipkit.config import Config, require_use
from clipkit.model.architectures import PixelTower
from clipkit.model.clip import CLIP
from clipkit.model.pixels import PixelTransformer
from clipkit.model.towers import draw_patches
from clipkit.objectives.base import Term, TermBatch, after_setting, weight_setting


@dataclass(frozen=True, kw_only=True)
class ImageGpt(Term):
    """Predict pixels, in addition to ``loss.name``, with ``model.image=pixels:SIZE``; see clipkit/model/pixels.py.

    The term is the mean over the predicted pixels of −log p.
    """

    section = "image_gpt."
    stream = 4
    reads_tokens = True
    trains_image_tower = True
    allows_classes = True

    weight: float = weight_setting()
    fraction: float = setting(
        0.15,
        "Fraction of the pixels that is masked and predicted if the tower is not causal.",
        Within(words="more than 0, at most 1", holds=lambda value: 0 < value <= 1),
        needs="weight",
    )
    after: int = after_setting()

    def check(self, config: Config) -> None:
        super().check(config)
        pixels = config.model.image.startswith("pixels:")
        require_use("image_gpt.weight", self.weight, "model.image=pixels:SIZE", pixels)

    def inputs(self, draw: TermBatch) -> tuple[dict[str, Any], int]:
        """Return the arguments of ``PixelTransformer.nll`` and the number of predicted pixels."""
        batch = draw.batch
        vision = draw.shape.vision
        assert isinstance(vision, PixelTower)
        pixels = vision.image_size**2
        if vision.causal:
            return {}, len(batch.images) * pixels
        keep = max(1, round(self.fraction * pixels))
        chosen = draw_patches(seed=draw.seed, rows=batch.rows, patches=pixels, keep=keep)
        return {"chosen": chosen}, chosen.numel()

    def total(self, model: CLIP, images: Tensor, tokens: Sequence[Tensor], **inputs: Any) -> Tensor:
        assert isinstance(model.visual, PixelTransformer)
        return model.visual.nll(images, tokens[0], **inputs)
