"""Cross-entropy of images over a classification head, and its accuracy; see ``ClassTable``.

Letters: B rows of this rank, C classes, O embedding dimension.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from clipkit.config import Config, DistillConfig, require
from clipkit.distributed import sum_over_ranks
from clipkit.model.architectures import TextArchitecture
from clipkit.model.towers import at_least_float32
from clipkit.objectives.base import Objective, Outputs, Targets
from clipkit.objectives.distill import Teaching
from clipkit.objectives.tiles import mean_over_rows, target_entropy


def class_loss(
    image_features: Tensor,
    class_features: Tensor,
    logit_scale: Tensor,
    logit_bias: Tensor | None = None,
    *,
    labels: Tensor,
    smoothing: float = 0.0,
) -> Tensor:
    """Compute the mean over the images of all ranks of softmax's cross-entropy over all classes.

    Value and gradients on several ranks are as for ``clip_loss``. All ranks call it together.

    Args:
        image_features: (B, O) this rank's rows, unit norm. B may differ from rank to rank.
        class_features: (C, O) unit norm, the same on all ranks.
        logit_scale: scalar, exp(t).
        logit_bias: ignored, since it does not change softmax.
        labels: (B,) int64 numbers of classes.
        smoothing: probability, 0 to 1, that the target spreads evenly over all classes (Szegedy et al. 2016,
            https://arxiv.org/abs/1512.00567).

    Returns:
        A float32 scalar (float64 for float64 features); ln C is the level of chance.
    """
    with torch.autocast(image_features.device.type, enabled=False):
        images, classes = at_least_float32(image_features), at_least_float32(class_features)
        logits = logit_scale.to(images.dtype) * images @ classes.T  # (B, C)
        return mean_over_rows(
            F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing), images
        )


def class_divergence(
    image_features: Tensor,
    class_features: Tensor,
    logit_scale: Tensor,
    teaching: Teaching,
    *,
    distill: DistillConfig,
) -> Tensor:
    """Compute the mean loss of all ranks' images against a teacher's classification of them.

    With temperature τ it is τ² times the Kullback–Leibler divergence from the teacher's softmax of logits / τ to
    the student's (Hinton et al. 2015, https://arxiv.org/abs/1503.02531), and with ``distill.hard`` the
    cross-entropy of the teacher's most likely class (DeiT, Touvron et al. 2021, https://arxiv.org/abs/2012.12877).

    Args:
        image_features, class_features, logit_scale: see ``class_loss``.
        teaching: the teacher's features of the same images (B, P), and of the same classes (C, P).
        distill: settings of distillation.

    Returns:
        A scalar as ``class_loss``; 0 if both agree, unless ``distill.hard``.
    """
    with torch.autocast(image_features.device.type, enabled=False):
        images, classes = at_least_float32(image_features), at_least_float32(class_features)
        logits = logit_scale.to(images.dtype) * images @ classes.T  # (B, C)
        taught = (
            teaching.scale.to(images) * teaching.images.to(images) @ teaching.texts.to(images).T
        ).detach()
        if distill.hard:
            return mean_over_rows(F.cross_entropy(logits, taught.argmax(dim=1), reduction="none"), images)
        student = (logits / distill.temperature).log_softmax(dim=1)
        teacher = (taught / distill.temperature).log_softmax(dim=1)
        divergences = F.kl_div(student, teacher, reduction="none", log_target=True).sum(dim=1)
        return mean_over_rows(distill.temperature**2 * divergences, images)


@torch.no_grad()
def right_classes(image_features: Tensor, class_features: Tensor, labels: Tensor) -> float:
    """Return the fraction of images of all ranks that are nearest to their own class; see ``class_loss``."""
    nearest = (at_least_float32(image_features) @ at_least_float32(class_features).T).argmax(dim=1)
    right = torch.stack([(nearest == labels).sum(), labels.new_tensor(len(labels))])
    correct, count = sum_over_ranks(right).tolist()
    return float(correct / count)


class Classes(Objective):
    """Classification by the rows of a class head."""

    summary = "softmax over all classes of model.text=classes:FILE, whose names are the captions"
    all_texts = True
    over_classes = True
    uses_same = False

    def loss(self, outputs: Outputs, targets: Targets) -> Tensor:
        labels, smoothing = targets.tokens[:, 0], targets.smoothing
        return class_loss(outputs.images, outputs.texts, outputs.scale, labels=labels, smoothing=smoothing)

    def divergence(self, outputs: Outputs, teaching: Teaching, distill: DistillConfig) -> Tensor:
        return class_divergence(outputs.images, outputs.texts, outputs.scale, teaching, distill=distill)

    def figures(self, images: Tensor, texts: Tensor, targets: Targets) -> dict[str, float]:
        """Return the metric ``acc1`` of a batch."""
        return {"acc1": right_classes(images, texts, targets.tokens[:, 0])}

    def chance(self, targets: Targets, text_rows: int) -> float:
        """Return ln C."""
        return math.log(text_rows)

    def floor(self, targets: Targets, text_rows: int) -> float:
        """Return the entropy of a smoothed label."""
        one, classes = torch.tensor([1.0, text_rows], dtype=torch.float64)
        return target_entropy(one, classes, targets.smoothing).item()

    def text_rows(self, text: TextArchitecture, batch_size: int) -> int:
        return len(text.classes)

    def check(self, config: Config) -> None:
        super().check(config)
        name = config.loss.name
        require(config.model.over_classes, "loss.name", name, "requires model.text=classes:FILE")
        teacher = f"cannot be combined with loss.name={name}; use distill.teacher"
        require(not config.distill.features, "distill.features", config.distill.features, teacher)
        for term in config.terms.values():
            alone = f"expected 0 with loss.name={name}"
            require(term.allows_classes, f"{term.section}weight", term.weight, alone)
