"""Training objectives by name. Imports no torch, so that configurations can be checked against the names.

To add an objective, write its loss in a separate file and add an entry to ``OBJECTIVES``. A loss is a function of
the model's outputs (image features, text features, exp(t), and the bias of a model that has one) and the batch's
``Targets``, and returns the scalar of the global batch; so a weighted sum of several is a loss too.

``TERMS`` are objectives that need no other sample of the batch, which are added to the loss. Each is computed in
the model's ``forward`` as a sum over samples, and divided by the number of its targets in the global batch. To add
one, write its functions in a separate file, and add an entry to ``TERMS`` and a section with ``weight`` and
``after`` to ``clipkit.config.Config``.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clipkit.config import late

if TYPE_CHECKING:
    from torch import Tensor

    from clipkit.model.architectures import TextArchitecture

__all__ = ["OBJECTIVES", "TERMS", "Objective", "Targets", "Term"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Targets:
    """The targets of a batch.

    Attributes:
        identities: (B, K) int64 numbers of the image and of the caption; equal for pairs that show the same thing.
            With ``data.caption_count`` M there are (MB, K): further captions follow.
        tokens: (B, L) int64 captions; (B, 1) numbers of classes for an objective over classes.
        same: the setting ``loss.same``.
        smoothing: the setting ``loss.smoothing``.
        negatives: (B,) bool, images with a wrong caption of their own, whose features follow those of the captions;
            None without ``data.negatives``.
    """

    identities: "Tensor"
    tokens: "Tensor"
    same: str
    smoothing: float = 0.0
    negatives: "Tensor | None" = None


_RECALL = late("clipkit.objectives.clip:recall_figures")
_DIVERGENCE = late("clipkit.objectives.distill:batch_divergence")


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The registry entry of an objective.

    Attributes:
        summary: a sentence for ``train.py --settings``.
        loss: ``(image_features, text_features, logit_scale, logit_bias=None, *, targets)`` → scalar, the same on
            all ranks; the mean of its gradients over ranks is the gradient of the global batch.
        figures: ``(image_features, text_features, targets)`` → further metrics by name; all ranks call it together.
        chance: ``(targets, text_rows)`` → the lowest loss of a model with equal logits; all ranks call it together.
            None if there is no such level.
        floor: ``(targets, text_rows)`` → the entropy of the targets, below which the loss cannot fall; all ranks
            call it together. None if the loss can reach 0.
        over_classes: whether texts are the classes of ``model.text=classes:FILE``, not the batch's captions.
        over_words: whether texts are all words of ``model.text=words``.
        initial_scale: exp(t) of fresh weights; None: the model's own.
        initial_bias: initial value of a trained bias of the logits; None: no bias.
        max_scale: upper bound of exp(t).
        tiled: whether logits exist only a tile at a time, for the memory estimate.
        uses_same: whether it supports ``loss.same`` other than negatives.
        smooths: whether it supports ``loss.smoothing``.
        more_texts: whether it supports ``data.negatives`` and ``data.caption_count``.
        divergence: ``(image_features, text_features, logit_scale, teaching, *, distill)`` → the loss against a
            teacher; None if it cannot be combined with ``distill``.
        compares: whether it compares images with texts.
        note: what to print at the start of a training with fresh weights.
    """

    summary: str
    loss: Callable[..., "Tensor"]
    figures: Callable[["Tensor", "Tensor", Targets], dict[str, float]] = _RECALL
    chance: Callable[[Targets, int], float] | None = None
    floor: Callable[[Targets, int], float] | None = None
    over_classes: bool = False
    over_words: bool = False
    initial_scale: float | None = None
    initial_bias: float | None = None
    max_scale: float = 100.0
    tiled: bool = False
    uses_same: bool = True
    smooths: bool = True
    more_texts: bool = False
    divergence: Callable[..., "Tensor"] | None = _DIVERGENCE
    compares: bool = True
    note: str = ""

    def text_rows(self, text: "TextArchitecture", batch_size: int) -> int:
        """Return the number of text features with which each image is compared."""
        return len(text.classes) if self.over_classes else text.words if self.over_words else batch_size


OBJECTIVES: dict[str, Objective] = {
    "clip": Objective(
        summary="softmax over all pairs of the batch",
        loss=late("clipkit.objectives.clip:clip_objective"),
        chance=late("clipkit.objectives.clip:clip_chance"),
        floor=late("clipkit.objectives.clip:clip_floor"),
        tiled=True,
        more_texts=True,
    ),
    "siglip": Objective(
        summary="an independent binary classification of each image–text pair, with a bias; the loss starts near "
        "10, far above chance, as the bias starts at -10",
        loss=late("clipkit.objectives.siglip:siglip_objective"),
        chance=late("clipkit.objectives.siglip:siglip_chance"),
        initial_scale=10.0,
        initial_bias=-10.0,
        max_scale=math.inf,
        tiled=True,
        smooths=False,
        more_texts=True,
        note="the sigmoid loss starts near 10, above the level of chance, as its bias starts at -10",
    ),
    "classes": Objective(
        summary="softmax over all classes of model.text=classes:FILE, whose names are the captions",
        loss=late("clipkit.objectives.classes:class_objective"),
        figures=late("clipkit.objectives.classes:class_figures"),
        chance=late("clipkit.objectives.classes:class_chance"),
        floor=late("clipkit.objectives.classes:class_floor"),
        over_classes=True,
        uses_same=False,
        divergence=late("clipkit.objectives.classes:class_divergence"),
    ),
    "words": Objective(
        summary="predicts the words of captions, with model.text=words (CLIP's bag-of-words baseline)",
        loss=late("clipkit.objectives.words:word_objective"),
        figures=late("clipkit.objectives.words:word_figures"),
        chance=late("clipkit.objectives.classes:class_chance"),
        floor=late("clipkit.objectives.words:word_floor"),
        over_words=True,
        tiled=True,
        uses_same=False,
        smooths=False,
        divergence=None,
    ),
    "none": Objective(
        summary="no comparison of images with texts: only terms, such as caption.weight",
        loss=late("clipkit.objectives.terms:no_loss"),
        figures=late("clipkit.objectives.terms:no_figures"),
        tiled=True,
        uses_same=False,
        smooths=False,
        divergence=None,
        compares=False,
        note="loss.name=none trains no text features; lock.text=all saves time unless caption.feed=text",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Term:
    """A local term of the loss, with the weight NAME.weight; it begins after NAME.after steps.

    Attributes:
        inputs: ``(settings, batch, seed, architecture, teach)`` → arguments of ``total`` by name, each of B rows,
            and the number of this rank's targets. ``settings`` is the section NAME of the configuration, and
            ``seed`` differs in each step and from those of other terms. ``teach()`` encodes the batch with averaged
            weights, see ``clipkit.training.step.averaged_teaching``; all ranks call it together.
        total: ``(model, images, image_tokens, text, **arguments)`` → the sum over the rows of
            −log-likelihoods or other losses, a scalar. ``text`` is the decoder's input, see ``CLIP.decoder_input``.
        reads_tokens: whether ``total`` uses ``image_tokens`` and ``text``, which are None otherwise.
        averages: settings → whether ``inputs`` calls ``teach``.
        stream: number that distinguishes its random draws from those of other terms.
    """

    inputs: Callable[..., tuple[dict[str, Any], int]]
    total: Callable[..., "Tensor"]
    stream: int
    reads_tokens: bool = False
    averages: Callable[[Any], bool] = lambda settings: False


TERMS: dict[str, Term] = {
    "caption": Term(
        inputs=late("clipkit.objectives.terms:caption_inputs"),
        total=late("clipkit.objectives.terms:caption_sum"),
        stream=1,
        reads_tokens=True,
    ),
    "masked": Term(
        inputs=late("clipkit.objectives.terms:masked_inputs"),
        total=late("clipkit.objectives.terms:masked_sum"),
        stream=2,
        averages=lambda settings: bool(settings.target == "features"),
    ),
    "image_gpt": Term(
        inputs=late("clipkit.objectives.terms:pixel_inputs"),
        total=late("clipkit.objectives.terms:pixel_sum"),
        stream=4,
        reads_tokens=True,
    ),
    "views": Term(
        inputs=late("clipkit.objectives.views:view_inputs"),
        total=late("clipkit.objectives.views:view_sum"),
        stream=3,
        averages=lambda settings: True,
    ),
}
