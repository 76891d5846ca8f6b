"""Cross-entropy of images over a classification head, and its accuracy; see ``ClassTable``.

Letters: B rows of this rank, C classes, O embedding dimension.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from clipkit.config import Config, DistillConfig, require
from clipkit.model.towers import at_least_float32
from clipkit.objectives.base import Objective, Outputs, Targets
from clipkit.objectives.distill import Teaching
from clipkit.objectives.tiles import GlobalBatch, mean_over_rows, target_entropy


class Classes(Objective):
    """Classification by the rows of a class head. The targets' tokens (B, 1) are numbers of classes."""

    summary = "softmax over all classes of model.text=classes:FILE, whose names are the captions"
    texts_are_classes = True
    over_classes = True
    uses_same = False

    def loss(self, outputs: Outputs, targets: Targets) -> Tensor:
        """Compute the mean over the images of all ranks of softmax's cross-entropy over all classes.

        ln C is the level of chance. The target is smoothed over all classes (Szegedy et al. 2016,
        https://arxiv.org/abs/1512.00567).
        """
        with torch.autocast(outputs.images.device.type, enabled=False):
            images, logits = _logits(outputs)
            labels = targets.tokens[:, 0]
            losses = F.cross_entropy(logits, labels, reduction="none", label_smoothing=targets.smoothing)
            return mean_over_rows(losses, images)

    def divergence(self, outputs: Outputs, teaching: Teaching, distill: DistillConfig) -> Tensor:
        """Compute the mean loss of all ranks' images against a teacher's classification of them.

        With temperature τ it is τ² times the Kullback–Leibler divergence from the teacher's softmax of logits / τ
        to the student's (Hinton et al. 2015, https://arxiv.org/abs/1503.02531), and with ``distill.hard`` the
        cross-entropy of the teacher's most likely class (DeiT, Touvron et al. 2021,
        https://arxiv.org/abs/2012.12877).
        """
        with torch.autocast(outputs.images.device.type, enabled=False):
            images, logits = _logits(outputs)
            taught = teaching.scale.to(images) * teaching.images.to(images) @ teaching.texts.to(images).T
            taught = taught.detach()
            if distill.hard:
                losses = F.cross_entropy(logits, taught.argmax(dim=1), reduction="none")
                return mean_over_rows(losses, images)
            student = (logits / distill.temperature).log_softmax(dim=1)
            teacher = (taught / distill.temperature).log_softmax(dim=1)
            divergences = F.kl_div(student, teacher, reduction="none", log_target=True).sum(dim=1)
            return mean_over_rows(distill.temperature**2 * divergences, images)

    @torch.no_grad()
    def figures(self, images: Tensor, texts: Tensor, targets: Targets) -> dict[str, float]:
        """Return the metric ``acc1``, the fraction of images of all ranks that are nearest to their own class."""
        labels = targets.tokens[:, 0]
        nearest = (at_least_float32(images) @ at_least_float32(texts).T).argmax(dim=1)
        return {"acc1": GlobalBatch(images).fraction(nearest == labels)}

    def chance(self, targets: Targets, text_rows: int) -> float:
        """Return ln C."""
        return math.log(text_rows)

    def floor(self, targets: Targets, text_rows: int) -> float:
        """Return the entropy of a smoothed label."""
        positives, classes = torch.tensor([1.0, text_rows], dtype=torch.float64)
        return target_entropy(positives, classes, targets.smoothing).item()

    def check(self, config: Config) -> None:
        super().check(config)
        name = config.loss.name
        require(config.model.over_classes, "loss.name", name, "requires model.text=classes:FILE")
        teacher = f"cannot be combined with loss.name={name}; use distill.teacher"
        require(not config.distill.features, "distill.features", config.distill.features, teacher)
        for term in config.terms.values():
            alone = f"expected 0 with loss.name={name}"
            require(term.allows_classes, f"{term.section}weight", term.weight, alone)


def _logits(outputs: Outputs) -> tuple[Tensor, Tensor]:
    """Return the images' features (B, O) and their logits (B, C), at least float32."""
    images, classes = at_least_float32(outputs.images), at_least_float32(outputs.texts)
    return images, outputs.scale.to(images.dtype) * images @ classes.T
