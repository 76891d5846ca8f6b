"""The base classes of objectives and of local terms, and the in-batch recall that most objectives report.

Letters: B rows of this rank, N rows of all ranks, O embedding dimension, K identities of a pair.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from clipkit.batch import Batch
from clipkit.cli import setting
from clipkit.config import Config, DistillConfig, ModelConfig, Section, at_least, require, require_use
from clipkit.distributed import gather_row_counts, max_over_ranks, sum_over_ranks
from clipkit.model.architectures import Architecture, TextArchitecture
from clipkit.model.clip import CLIP
from clipkit.model.towers import at_least_float32
from clipkit.objectives.distill import Teaching, distillation_loss
from clipkit.objectives.tiles import (
    ColumnSums,
    GlobalBatch,
    check_features,
    compute_tiles,
    positive_pairs,
    row_sums,
    split_negatives,
)

_NONE = -1e30  # a cosine that is not compared
_ROUNDING = 8  # times the dtype's epsilon: products of equal rows differ by their position


class Outputs(NamedTuple):
    """What a model returns for this rank's part of a batch.

    Attributes:
        images: (B, O) features, unit norm.
        texts: (B, O) features of the captions, then those of further or wrong captions, if any; or (C, O) of all
            texts.
        scale: exp(t).
        bias: SigLIP's bias, of a model that has one.
    """

    images: Tensor
    texts: Tensor
    scale: Tensor
    bias: Tensor | None = None


class ObjectiveState:
    """State of the objective and its terms which is neither weights nor the optimizer's.

    A step reads ``tensors`` and proposes new values, which replace them if the update is made. All ranks have and
    propose the same values, so a checkpoint does not depend on their number.

    Args:
        tensors: the initial values by name, which begins with the section that they belong to.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)
        self._proposals: dict[str, tuple[Tensor | slice, Tensor]] = {}

    def propose(self, name: str, values: Tensor, rows: Tensor | None = None) -> None:
        """Remember new values of a tensor, or of (N,) int64 rows of it; the values of a repeated row are equal."""
        self._proposals[name] = (slice(None) if rows is None else rows, values.detach())

    @torch.no_grad()
    def update(self, *, skip: Tensor) -> None:
        """Take the values of the last proposals unless ``skip``, a bool scalar on the device."""
        for name, (rows, values) in self._proposals.items():
            tensor = self.tensors[name]
            tensor[rows] = torch.where(skip, tensor[rows], values.to(tensor.dtype))
        self._proposals.clear()


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
        all_texts: (N, O) features of the captions of all ranks, which get the gradient, for an objective with
            ``gathers_captions``; None: not gathered yet.
        weights: (B,) weights of the pairs, or (MB,) as identities; None without ``data.weight``.
        precision: the setting ``loss.precision``.
        state: state of the objective, if it has any.
        numbers: (B,) int64 numbers of the samples, below that of all samples; None without state.
        progress: fraction of the run's steps that have been made.
    """

    identities: Tensor
    tokens: Tensor
    same: str
    smoothing: float = 0.0
    negatives: Tensor | None = None
    all_texts: Tensor | None = None
    weights: Tensor | None = None
    precision: str = "float32"
    state: ObjectiveState | None = None
    numbers: Tensor | None = None
    progress: float = 0.0


class Objective(Section):
    """An objective of ``loss.name``: the loss of the global batch's features, and everything that depends on it.

    If it has settings, the class is a frozen dataclass of them, with ``section`` = the name in ``OBJECTIVES`` and a
    dot.

    Attributes:
        summary: a sentence for ``train.py --settings``.
        texts_are_classes: whether texts are all rows of the text tower, not the batch's captions.
        over_classes: whether these are the classes of ``model.text=classes:FILE``.
        initial_scale: exp(t) of fresh weights; None: the model's own.
        initial_bias: initial value of a trained bias of the logits; None: no bias.
        max_scale: upper bound of exp(t).
        tiled: whether logits exist only a tile at a time, for the memory estimate.
        gathers_captions: whether it compares images with the captions of all ranks, also in ``loss.precision``.
        uses_same: whether it supports ``loss.same`` other than negatives.
        smooths: whether it supports ``loss.smoothing``.
        more_texts: whether it supports ``data.negatives``, ``data.caption_count``, ``data.image_fields`` and
            ``data.text_fields``.
        weighs_pairs: whether it supports ``data.weight``.
        has_divergence: whether it can be combined with ``distill``.
        sample_bytes: bytes of its state for each sample of the training data.
        note: what to print at the start of a training with fresh weights.
    """

    summary: ClassVar[str]
    texts_are_classes: ClassVar[bool] = False
    over_classes: ClassVar[bool] = False
    initial_scale: ClassVar[float | None] = None
    initial_bias: ClassVar[float | None] = None
    max_scale: ClassVar[float] = 100.0
    tiled: ClassVar[bool] = False
    gathers_captions: ClassVar[bool] = False
    uses_same: ClassVar[bool] = True
    smooths: ClassVar[bool] = True
    more_texts: ClassVar[bool] = False
    weighs_pairs: ClassVar[bool] = False
    has_divergence: ClassVar[bool] = True
    sample_bytes: ClassVar[int] = 0
    note: ClassVar[str] = ""

    def create_state(self, samples: int) -> dict[str, Tensor]:
        """Return the initial values of its state by name, see ``ObjectiveState``, for a number of samples."""
        return {}

    def loss(self, outputs: Outputs, targets: Targets) -> Tensor:
        """Compute the loss of the global batch; all ranks call it together.

        Every parameter needs a gradient, so it depends on images and texts; scale and bias may be unused.

        Returns:
            A scalar, the same on all ranks. The mean over ranks of its gradients is that of the global batch.
        """
        raise NotImplementedError

    def figures(self, images: Tensor, texts: Tensor, targets: Targets) -> dict[str, float]:
        """Return further metrics of features by name; all ranks call it together.

        By default ``image_to_text_R@1`` and ``text_to_image_R@1``. With wrong captions also ``negatives_acc``, the
        fraction of images with one that are closer to their own.
        """
        texts, negatives = split_negatives(texts, targets.negatives)
        to_text, to_image = compute_recall(images, texts, targets.identities).tolist()
        figures = {"image_to_text_R@1": to_text, "text_to_image_R@1": to_image}
        if negatives is not None:
            wrong, has_negative = negatives
            closer = (images * (texts - wrong)).sum(1) > 0
            counts = torch.stack([closer[has_negative].sum(), has_negative.sum()])
            right, count = sum_over_ranks(counts).tolist()
            if count:
                figures["negatives_acc"] = right / count
        return figures

    def chance(self, targets: Targets, text_rows: int) -> float | None:
        """Return the lowest loss of a model with equal logits, or None; all ranks call it together."""
        return None

    def floor(self, targets: Targets, text_rows: int) -> float:
        """Return the entropy of the targets, below which the loss cannot fall; all ranks call it together."""
        return 0.0

    def divergence(self, outputs: Outputs, teaching: Teaching, distill: DistillConfig) -> Tensor:
        """Compute the loss against a teacher, by default ``distillation_loss`` over the batch."""
        images, texts, scale, _ = outputs
        return distillation_loss(images, texts, scale, teaching.images, teaching.texts, teaching.scale)

    def text_rows(self, text: TextArchitecture, batch_size: int) -> int:
        """Return the number of text features with which each image is compared."""
        return text.vocab_size if self.texts_are_classes else batch_size

    def check(self, config: Config) -> None:
        """Raise ConfigError if other settings do not fit; overrides call this one too."""
        loss, distill, model = config.loss, config.distill, config.model
        name = f"loss.name={loss.name}"
        alone = f"cannot be combined with {name}"
        if not self.more_texts:
            for setting_name in ("negatives", "image_fields", "text_fields"):
                value = getattr(config.data, setting_name)
                require(not value, f"data.{setting_name}", value, alone)
            require(config.data.caption_count == 1, "data.caption_count", config.data.caption_count, alone)
        elif config.data.caption_count > 1:
            expected = "expected positives or ignored with data.caption_count above 1"
            require(loss.same != "negatives", "loss.same", loss.same, expected)
        if not self.uses_same:
            expected = f"expected negatives with {name}: set loss.same=negatives"
            require(loss.same == "negatives", "loss.same", loss.same, expected)
        if not self.smooths:
            expected = f"expected 0 with {name}: set loss.smoothing=0"
            require(not loss.smoothing, "loss.smoothing", loss.smoothing, expected)
        if not self.gathers_captions:
            expected = f"expected float32 with {name}"
            require(loss.precision == "float32", "loss.precision", loss.precision, expected)
            require(not config.log.samples, "log.samples", True, alone)
            require(config.select.fraction == 1, "select.fraction", config.select.fraction, alone)
        if not self.weighs_pairs:
            require(not config.data.weight, "data.weight", config.data.weight, alone)
        if not self.has_divergence:
            require(not distill.teacher, "distill.teacher", distill.teacher, alone)
            require(not distill.features, "distill.features", distill.features, alone)
        if not self.over_classes:
            require(not model.over_classes, "model.text", model.text, "requires loss.name=classes")
            require(not config.shape.distilled, "shape.distilled", True, "requires loss.name=classes")
            temperature = distill.temperature
            require_use("distill.hard", distill.hard, "loss.name=classes", not distill.hard)
            require_use("distill.temperature", temperature, "loss.name=classes", temperature == 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class TermBatch:
    """What a local term is made of in one step.

    Attributes:
        batch: this rank's rows.
        seed: differs in each step and from those of other terms.
        shape: the model's architecture.
        teach: encodes the batch with averaged weights, see ``encode_pairs`` in clipkit/training/step.py; all
            ranks call it together.
        state: state of the terms that have any.
    """

    batch: Batch
    seed: int
    shape: Architecture
    teach: Callable[[], Teaching]
    state: ObjectiveState = field(default_factory=lambda: ObjectiveState({}))


def weight_setting(text: str = "0: none") -> float:
    """Define the setting ``weight`` of a term."""
    return setting(0.0, f"Weight of the term, which is added to the loss; {text}.", at_least(0))


def after_setting(text: str = "; its weights are locked until then") -> int:
    """Define the setting ``after`` of a term."""
    return setting(0, f"Number of first steps without the term{text}.", at_least(0), needs="weight")


class Term(Section):
    """A local term: a loss that needs no other sample of the batch, added to the objective's loss.

    The class is a frozen dataclass of its settings, of which ``weight`` and ``after`` are required; ``section`` is
    the name in ``TERMS`` and a dot. The term begins after ``after`` steps. It is the sum over samples of ``total``,
    divided by the number of targets in the global batch.

    Attributes:
        stream: number that distinguishes its random draws from those of other terms.
        reads_tokens: whether ``total`` reads tokens.
        reads_features: whether ``total`` has an argument ``features`` for those of images, (R, O) of unit norm.
        reads_words: whether ``inputs`` reads ``Batch.words``.
        reads_images: whether ``inputs`` or ``total`` read images or the tokens of captions, which ``lock.store``
            replaces by features.
        trains_image_tower: whether ``lock.image=all`` leaves it nothing to train.
        allows_classes: whether it can be combined with an objective over classes.
    """

    weight: float
    after: int
    stream: ClassVar[int]
    reads_tokens: ClassVar[bool] = False
    reads_features: ClassVar[bool] = False
    reads_words: ClassVar[bool] = False
    reads_images: ClassVar[bool] = True
    trains_image_tower: ClassVar[bool] = False
    allows_classes: ClassVar[bool] = False

    @property
    def uses_average(self) -> bool:
        """Whether ``inputs`` calls ``teach``."""
        return False

    @property
    def encodes_again(self) -> bool:
        """Whether ``total`` computes blocks of a tower once more, so that their gradients are sums of several."""
        return False

    def check(self, config: Config) -> None:
        """Raise ConfigError if other settings do not fit; called if ``weight`` is not 0. Overrides call it too."""
        if self.trains_image_tower:
            locked = f"cannot be combined with {self.section}weight, which trains the image tower"
            require(config.lock.image != "all", "lock.image", "all", locked)

    def heads(self, shape: Architecture, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of ``Architecture`` that the term sets; ConfigError if the towers do not support it."""
        return {}

    def create_state(self, shape: Architecture) -> dict[str, Tensor]:
        """Return the initial values of its state by name, see ``ObjectiveState``."""
        return {}

    def inputs(self, draw: TermBatch) -> tuple[dict[str, Any], int]:
        """Return arguments of ``total`` by name, each of B rows, and the number of this rank's targets."""
        raise NotImplementedError

    def total(self, model: CLIP, images: Tensor, tokens: Sequence[Tensor], **inputs: Any) -> Tensor:
        """Sum the losses of rows, such as −log-likelihoods, to a scalar.

        Args:
            model: the model.
            images: (R, C, S, S) uint8, R of the B rows.
            tokens: those that ``CLIP.forward`` returns with ``return_tokens``; empty unless ``reads_tokens``.
            **inputs: R rows of each of ``inputs``.
        """
        raise NotImplementedError


@torch.no_grad()
def compare_pairs(
    image_features: Tensor, text_features: Tensor, scale: Tensor, identities: Tensor | None = None
) -> Tensor:
    """Return the losses and margins of this rank's pairs among all pairs of the global batch.

    The loss of an image is the cross-entropy of its own text over all texts, and its margin the cosine with its own
    text minus the cosine with the nearest other one; likewise for texts. All ranks call it together. It costs one
    of the four products of ``clip_loss``.

    Args:
        image_features: (B, O) this rank's rows, unit norm. B may differ from rank to rank.
        text_features: (B, O) the matching rows.
        scale: scalar, exp(t).
        identities: (B, K) int64, see ``clip_loss``: pairs that show the same thing are not compared.

    Returns:
        (4, B) float32 (float64 for float64 features): losses of images and texts, margins of images and texts. A
        margin is about 1e30 if there is no other pair.

    Raises:
        ValueError: the features are not two matrices of one shape, or identities are not (B, K) integers.
    """
    check_features(image_features, text_features)
    with torch.autocast(image_features.device.type, enabled=False):
        images, texts = at_least_float32(image_features), at_least_float32(text_features)
        batch = GlobalBatch(images)
        pairs = positive_pairs(batch, images, identities, "ignored")
        pair_cosines = images.new_empty(len(images))
        image_sums = images.new_empty(2, len(images))
        nearest_text = images.new_empty(len(images))
        text_sums = ColumnSums(batch.size, images)
        nearest_image = images.new_full((batch.size,), _NONE)
        for tile, cosines in compute_tiles(images, batch.gather(texts), images.new_ones(())):
            pairs.fill_ignored(cosines, tile, _NONE)
            diagonal = cosines.diagonal(batch.local_rows.start + tile.start)
            pair_cosines[tile] = diagonal
            logits = cosines * scale.to(cosines.dtype)
            image_sums[:, tile] = row_sums(logits)
            text_sums.add(logits)
            diagonal.fill_(_NONE)
            nearest_text[tile] = cosines.amax(1)
            nearest_image = torch.maximum(nearest_image, cosines.amax(0))
        by_text = text_sums.combine_ranks()[0][:, batch.local_rows]  # (2, B)
        greatest, totals = torch.stack([image_sums, by_text], dim=1)  # (2, B) each
        losses = greatest + totals.log() - scale * pair_cosines
        nearest = torch.stack([nearest_text, max_over_ranks(nearest_image)[batch.local_rows]])
        return torch.cat([losses, pair_cosines - nearest])


def compute_recall(image_features: Tensor, text_features: Tensor, identities: Tensor | None = None) -> Tensor:
    """Return the fraction of images with their own text as the nearest of the global batch, and the same for texts.

    A tie (a lead below 8 epsilon of the dtype, 1e-6 in float32) counts as wrong, so the recall of equal features is
    0. All ranks call it together. Arguments and errors are those of ``compare_pairs``.

    Returns:
        (2,) float32 (float64 for float64 features) in [0, 1], the same on all ranks: image to text, text to image.
        No gradient.
    """
    margins = compare_pairs(image_features, text_features, image_features.new_ones(()), identities)[2:]
    right = margins > _ROUNDING * torch.finfo(margins.dtype).eps  # (2, B)
    return sum_over_ranks(right.sum(1).to(margins.dtype)) / sum(gather_row_counts(right.shape[1]))
