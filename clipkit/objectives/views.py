"""The term that compares local views with the whole image: self-distillation by the average of the weights.

As in SILC (Naeem et al. 2023, https://arxiv.org/abs/2310.13355) and SigLIP 2 (Tschannen et al. 2025,
https://arxiv.org/abs/2502.14786), the model encodes small crops of an image, and the averaged weights, its teacher,
encode the whole image. Here distributions over the texts of the batch are compared, not over learned prototypes, so
there are no centers and no other state.

Letters in shape comments: B images, N texts of the global batch, V views of an image, s side of a view in pixels,
O embedding dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from clipkit.cli import Within, setting
from clipkit.config import Config, ModelConfig, at_least, require, require_use
from clipkit.distributed import gather_row_counts, gather_rows
from clipkit.errors import ConfigError
from clipkit.model.architectures import Architecture
from clipkit.model.clip import CLIP
from clipkit.model.towers import at_least_float32, draw_uniform
from clipkit.objectives.base import Term, TermBatch, after_setting, weight_setting

_ASPECT = 4 / 3  # of a crop at most, and its inverse at least
_LOGITS = 1 << 22  # in memory at a time


@dataclass(frozen=True, kw_only=True)
class Views(Term):
    """Self-distillation by crops of images (SILC, SigLIP 2).

    Features of small crops are compared with those that averaged weights compute for the whole image. Requires
    ``optim.average``. See clipkit/objectives/views.py.
    """

    section = "views."
    stream = 3
    trains_image_tower = True

    weight: float = weight_setting()
    count: int = setting(8, "Number of crops of each image.", at_least(1), needs="weight")
    area: tuple[float, ...] = setting(
        (0.05, 0.4),
        "Least and greatest area of a crop, as fractions of the image's.",
        Within(
            words="two increasing fractions, more than 0 and at most 1",
            holds=lambda value: len(value) == 2 and 0 < value[0] <= value[1] <= 1,
        ),
        needs="weight",
    )
    size: int = setting(
        0,
        "Side of a crop in pixels, after resizing; 0: half of the image's, in whole patches.",
        at_least(0),
        needs="weight",
    )
    after: int = after_setting("")

    @property
    def uses_average(self) -> bool:
        return True

    @property
    def encodes_again(self) -> bool:
        return True

    def check(self, config: Config) -> None:
        super().check(config)
        require_use("views.weight", self.weight, "optim.average", bool(config.optim.average))
        alone = "cannot be combined with views.weight"
        require(
            not (self.weight and config.model.projections),
            "model.projections",
            config.model.projections,
            alone,
        )

    def heads(self, shape: Architecture, model: ModelConfig) -> dict[str, Any]:
        step = shape.vision.size_step
        largest = shape.vision.image_size
        if not step:
            raise ConfigError(
                f"views.weight requires an image tower that encodes other sizes, not {model.label}"
            )
        fitting = f"expected a multiple of the patch size, {step}, and at most the image size, {largest}"
        require(self.size % step == 0 and self.size <= largest, "views.size", self.size, fitting)
        return {}

    def inputs(self, draw: TermBatch) -> tuple[dict[str, Any], int]:
        """Return the arguments of ``total`` and the number of images."""
        teaching = draw.teach()
        images = draw.batch.images
        rows = draw.batch.rows
        texts = gather_rows(teaching.texts, gather_row_counts(len(teaching.texts)))
        inputs = {
            "boxes": draw_boxes(seed=draw.seed, rows=rows, count=self.count, area=self.area),
            "teacher_images": teaching.images,
            # the same for all images: (B, …) without memory, as arguments have a row for each image
            "texts": texts.expand(len(images), -1, -1),
            "scales": teaching.scale.expand(len(images)),
            "sides": [select_view_side(self, draw.shape, image_size=images.shape[-1])] * len(images),
        }
        return inputs, len(images)

    def total(self, model: CLIP, images: Tensor, tokens: Sequence[Tensor], **inputs: Any) -> Tensor:
        """Sum over images the mean over views of ``sum_view_divergence``: a scalar, at least float32.

        Args:
            model: the model, with an image tower that encodes other sizes.
            images: (B, 3, S, S) uint8.
            tokens: not used.
            **inputs: ``boxes`` (B, V, 4), see ``draw_boxes``, and the teacher's features of the whole images,
                ``teacher_images`` (B, O); the same for each image are the teacher's features of all texts,
                ``texts`` (B, N, O), its exp(t), ``scales`` (B,), and s, ``sides``.
        """
        boxes = inputs["boxes"]
        crops = cut_views(images, boxes, side=inputs["sides"][0]).flatten(0, 1)  # (BV, 3, s, s)
        mean, std = model.colors
        features = model.encode_image(crops.div_(255).sub_(mean.to(crops.dtype)).div_(std.to(crops.dtype)))
        features = features.unflatten(0, boxes.shape[:2])
        return sum_view_divergence(
            features, inputs["teacher_images"], inputs["texts"][0], inputs["scales"][0]
        )


def select_view_side(settings: Views, shape: Architecture, *, image_size: int) -> int:
    """Return the side of a view: the setting, or half of the image's in whole patches; at most the image's."""
    step = shape.vision.size_step
    return min(image_size, settings.size or max(step, image_size // 2 // step * step))


def draw_boxes(*, seed: int, rows: Tensor, count: int, area: Sequence[float]) -> Tensor:
    """Draw boxes in images: (B, V, 4) float32 left, top, width and height, as fractions of the image's side.

    The area is uniform, the logarithm of the aspect ratio too (3/4 to 4/3), and so is the place.

    Args:
        seed: any integer, different in each step.
        rows: (B,) int64, positions of the images in the global batch.
        count: V.
        area: least and greatest area of a box, as fractions of the image's.
    """
    uniform = draw_uniform(seed=seed, rows=rows, count=4 * count).view(-1, count, 4)
    sizes, aspects, lefts, tops = uniform.unbind(-1)
    sizes = area[0] + (area[1] - area[0]) * sizes
    aspects = _ASPECT ** (2 * aspects - 1)
    widths = (sizes * aspects).sqrt().clamp(max=1)
    heights = (sizes * (1 / aspects)).sqrt().clamp(max=1)
    return torch.stack([lefts * (1 - widths), tops * (1 - heights), widths, heights], dim=-1).float()


def cut_views(images: Tensor, boxes: Tensor, *, side: int) -> Tensor:
    """Cut boxes out of uint8 images, and resize them bilinearly to (B, V, 3, s, s) float32 from 0 to 255."""
    count = boxes.shape[1]
    centers = (torch.arange(side, device=images.device) + 0.5) / side  # centers of pixels
    left, top, width, height = boxes[..., None].unbind(dim=2)  # (B, V, 1) each
    x = 2 * (left + width * centers) - 1  # (B, V, s)
    y = 2 * (top + height * centers) - 1
    grid = torch.stack(torch.broadcast_tensors(x[:, :, None], y[..., None]), dim=-1)  # (B, V, s, s, 2)
    cut = F.grid_sample(images.float(), grid.flatten(1, 2), padding_mode="border", align_corners=False)
    crops: Tensor = cut.unflatten(2, (count, side)).transpose(1, 2)  # from (B, 3, Vs, s)
    return crops


def sum_view_divergence(features: Tensor, whole: Tensor, texts: Tensor, scale: Tensor) -> Tensor:
    """Sum over images the mean over views of KL(softmax(scale · texts · whole) ‖ softmax(scale · texts · view)).

    Gradients are computed in the forward pass, a tile of images at a time.

    Args:
        features: (B, V, O) features of views, unit norm.
        whole: (B, O) the teacher's features of the whole images, unit norm; no gradient.
        texts: (N, O) the teacher's features of texts, unit norm; no gradient.
        scale: scalar; no gradient.

    Returns:
        a scalar in float32 (float64 for float64).
    """
    with torch.autocast(features.device.type, enabled=False):
        features = at_least_float32(features)
        taught = [tensor.detach().to(features.dtype) for tensor in (whole, texts, scale)]
        total: Tensor = _Divergence.apply(features, *taught)
        return total


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, features: Tensor, images: Tensor, texts: Tensor, scale: Tensor) -> Tensor:
        total = features.new_zeros(())
        gradient = torch.empty_like(features)
        rows = max(1, _LOGITS // (features.shape[1] * len(texts)))
        for start in range(0, len(features), rows):
            tile = slice(start, start + rows)
            teacher = (scale * images[tile] @ texts.T).log_softmax(dim=-1)[:, None]  # (R, 1, N)
            student = (scale * features[tile] @ texts.T).log_softmax(dim=-1)  # (R, V, N)
            total += (teacher.exp() * (teacher - student)).sum()
            gradient[tile] = scale * (student.exp_() - teacher.exp()) @ texts
        ctx.save_for_backward(gradient.div_(features.shape[1]))
        return total / features.shape[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, scale: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return gradient * scale, None, None, None
