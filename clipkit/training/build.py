"""The model that a training begins with, and what its steps count for."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from clipkit.api import load
from clipkit.config import LossConfig, ModelConfig, SmallConfig, require
from clipkit.errors import CheckpointError, ConfigError
from clipkit.formats.checkpoint import load_model, stored_preprocess
from clipkit.model import IMAGE_TOWERS
from clipkit.model.architectures import Architecture, selected
from clipkit.model.clip import CLIP, create
from clipkit.model.flops import counted_flops, step_flops, trained_blocks
from clipkit.model.names import architecture
from clipkit.objectives import OBJECTIVES, Objective
from clipkit.training.depth import TOWERS, Place, places, tower_of
from clipkit.training.ema import AveragedWeights, RunningStatistics
from clipkit.training.parallel import gathered

__all__ = [
    "Unfreezing",
    "check_split",
    "first_model",
    "flops_of_steps",
    "free_depths",
    "lock",
    "patch_counts",
    "scored_weights",
    "shape_of",
    "still_statistics",
]


def check_split(batch_size: int, *, world: int, parts: int) -> None:
    """Raise ConfigError if a batch has too few pairs for ``world`` ranks that compute it in ``parts``."""
    if batch_size < world * parts:
        raise ConfigError(
            f"batch_size = {batch_size} cannot be split over {world} processes × accumulate = {parts}"
        )


def shape_of(model: ModelConfig, loss: LossConfig, small: SmallConfig) -> Architecture:
    """Return the architecture that settings name, with a bias if the objective needs one.

    Raises:
        ConfigError: a name is unknown, or this image tower cannot drop patches or see smaller images.
    """
    shape = architecture(
        model.name,
        image=model.image,
        text=model.text,
        image_size=model.image_size,
        context_length=model.context_length,
    )
    if model.patch_dropout and shape.vision.patches is None:
        raise ConfigError(
            f"model.patch_dropout = {model.patch_dropout} is for clipkit's own image towers, not for {model.label}"
        )
    if small.steps:
        _check_small(small, shape, model.label)
    has_bias = OBJECTIVES[loss.name].initial_bias is not None
    return replace(shape, logit_bias=True) if has_bias else shape


def _check_small(small: SmallConfig, shape: Architecture, label: str) -> None:
    if small.image_size:
        step, largest = shape.vision.size_step, shape.vision.image_size
        if not step:
            raise ConfigError(
                f"small.image_size = {small.image_size} does not fit {label}: it is for clipkit's own image towers"
            )
        if small.image_size % step or small.image_size > largest:
            raise ConfigError(
                f"small.image_size = {small.image_size} does not fit {label}: a multiple of its patch size, "
                f"{step}, and at most its image size, {largest}"
            )
    if small.context_length and shape.text.classes:
        raise ConfigError(
            f"small.context_length = {small.context_length} does not fit {label}: a class is one token"
        )
    if small.context_length and not 2 <= small.context_length <= shape.text.context_length:
        raise ConfigError(
            f"small.context_length = {small.context_length} does not fit: 2 to {shape.text.context_length}"
        )


def first_model(
    model: ModelConfig,
    loss: LossConfig,
    shape: Architecture,
    *,
    seed: int,
    small: SmallConfig,
    checkpoint: Path | None = None,
) -> CLIP:
    """Fresh weights, or those of ``model.weights``, in training mode on the CPU.

    A run that resumes does not need the weights that it began with: they, the tokenizer and the preprocessing are
    in its ``checkpoint``, and ``model.weights`` may be gone by now. The preprocessing is always the checkpoint's.

    Raises:
        ConfigError: the weights are of another architecture.
        CheckpointError: they cannot be loaded.
    """
    objective = OBJECTIVES[loss.name]
    if model.weights and checkpoint is not None:
        first = _resumed(checkpoint, shape, model)
    elif model.weights:
        first = load(model.weights, image_size=model.image_size, context_length=model.context_length)
        if shape.logit_bias and first.logit_bias is None:
            first.reset_bias()
            _set_initial(first, objective)
        if not _fits(first, shape):
            raise ConfigError(f"model.weights = {model.weights!r} {_misfit(first, shape, model)}")
        first.name = first.name or model.label
    else:
        first = create(shape, name=model.label, seed=seed)
        _set_initial(first, objective)
        if checkpoint is not None:
            first.preprocess = stored_preprocess(checkpoint)
        if small.steps and small.image_size:
            shape.vision.smooth_positions(first.visual, small.image_size)
    if first.logit_bias is not None:
        first.logit_bias.requires_grad_(objective.initial_bias is not None)
    return first.train()


@torch.no_grad()
def _set_initial(model: CLIP, objective: Objective) -> None:
    """Set temperature and bias to those that the objective starts with."""
    if objective.initial_scale is not None:
        model.logit_scale.fill_(math.log(objective.initial_scale))
    if objective.initial_bias is not None and model.logit_bias is not None:
        model.logit_bias.fill_(objective.initial_bias)


def _fits(first: CLIP, shape: Architecture) -> bool:
    """A bias that weights have stays, as softmax does not see it, and how fresh ones would be drawn is past."""
    return replace(first.architecture, logit_bias=shape.logit_bias, small_data=shape.small_data) == shape


def _misfit(first: CLIP, shape: Architecture, model: ModelConfig) -> str:
    """How weights differ from the architecture that settings name, and what to do."""
    own, given = first.architecture.text.classes, shape.text.classes
    if given:
        if own and own != given and _fits_but_text(first, shape):
            return f"are of {_other_classes(own, given)}: give {model.text} as it was for them"
        if not own:
            return (
                f"have a text tower and no rows of classes, not those of {model.text}: `python -m eval "
                "fine-tune` makes such a head of them and trains it"
            )
    elif own:
        return (
            f"have a head of classes and no text tower, not that of {model.label}: give other weights, or "
            "loss.name=classes and the model.text=classes:FILE of these"
        )
    name, *others = first.name.split(" + ")
    named = {"model.name": name}
    for one in others:
        if one != "classes":
            named["model.image" if selected(one, IMAGE_TOWERS) else "model.text"] = one
    set_to = " ".join(f"{key}={value}" for key, value in named.items()) if name else "model.name"
    return f"are of {first.name or 'another architecture'}, not of {model.label}: set {set_to}"


def _fits_but_text(first: CLIP, shape: Architecture) -> bool:
    return _fits(first, replace(shape, text=first.architecture.text))


def _other_classes(own: Sequence[str], given: Sequence[str]) -> str:
    """How two lists of class names differ."""
    if len(own) != len(given):
        return f"{len(own):,} classes, not of {len(given):,}"
    pairs = zip(own, given, strict=True)
    number, (old, new) = next((i, pair) for i, pair in enumerate(pairs, start=1) if pair[0] != pair[1])
    order = "classes in another order" if sorted(own) == sorted(given) else "other classes"
    return f"{order}, number {number} is {old[:80]!r} and not {new[:80]!r}"


def _resumed(checkpoint: Path, shape: Architecture, model: ModelConfig) -> CLIP:
    first = load_model(checkpoint)
    if not _fits(first, shape):
        own, given = first.architecture.text.classes, shape.text.classes
        if own and given and _fits_but_text(first, shape):
            raise CheckpointError(
                f"{checkpoint} is of {_other_classes(own, given)}: give {model.text} as it was when the run "
                "began, or set out=… for a new run"
            )
        raise CheckpointError(f"{checkpoint} is of another architecture than {model.label}")
    first.name = first.name or model.label
    if not shape.text.classes:
        first.tokenizer(["a"])  # reads its files now: the checkpoint goes when newer ones take its place
    return first


def patch_counts(shape: Architecture, patch_dropout: float, image_size: int) -> tuple[int, int] | None:
    """Return the number of patches of an image, and how many are kept; None for all."""
    if not patch_dropout:
        return None
    patches = shape.vision.resized(image_size).patches
    assert patches is not None
    return patches, max(1, round(patches * (1 - patch_dropout)))


def flops_of_steps(
    model: CLIP, patch_dropout: float, global_rows: int
) -> Callable[[Sequence[int], int], int] | None:
    """Return a function of a batch's caption lengths and image size: the FLOPs of this rank's part of a step.

    None where a tower's FLOPs are not known.
    """
    counted = counted_flops(model)
    if counted is None:
        return None
    image_blocks, text_blocks = trained_blocks(model)

    def of_step(lengths: Sequence[int], image_size: int) -> int:
        shape = model.architecture
        if shape.vision.size_step:
            shape = shape.resized(image_size=image_size)
        counts = patch_counts(shape, patch_dropout, image_size)
        return step_flops(
            shape,
            rows=len(lengths),
            lengths=lengths,
            global_rows=global_rows,
            patches=counts[1] if counts else None,
            image_blocks=image_blocks,
            text_blocks=text_blocks,
            counted=counted,
        )

    return of_step


@contextmanager
def scored_weights(model: CLIP, averaged: AveragedWeights | None, *, reshard: bool = True) -> Iterator[None]:
    """The model as it is scored: averaged where it is averaged, and whole and the same on every rank."""
    RunningStatistics(model).broadcast()
    with nullcontext() if averaged is None else averaged.applied(), gathered(model, reshard=reshard):
        yield


# --------------------------------------------------------------------------------------------------------------
# Which parameters are trained: whole towers or their lower depths locked, for good or for a while.
#
# Depths are counted from the top: 1 is what makes features of the last block's output, 2 the last block too,
# and so on, see clipkit/training/depth.py. The temperature is always trained. Everything follows from the
# settings and the step.

ALL = "all"
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def lock(model: CLIP, *, image: str | int = "", text: str | int = "") -> None:
    """Lock towers or parts of them, for good: their parameters get no gradient and no update.

    With a trained image tower locked, the text tower learns to read it out (LiT; Zhai et al. 2022,
    https://arxiv.org/abs/2111.07991). Fine-tuned on handwriting with its image tower locked, the quickstart's
    model learns less and forgets less: 71.4%, and 82.7% of unseen fonts, where all that is free gives 89.1% and
    79.9%; with the text tower locked 85.3% and 79.7% (bench/finetuning.py, one seed).

    Args:
        model: a CLIP, before its optimizer is made.
        image: "" locks nothing; "all" the image tower; a number, 2 or "2", all but that many of its top depths.
        text: the same of the text tower.

    Raises:
        ConfigError: a tower has not so many depths, they are not known, or nothing but the temperature is left.
    """
    kept: dict[str, int] = {}
    for tower, setting in zip(TOWERS, (image, text), strict=True):
        wanted = str(setting)
        fits = wanted in ("", ALL) or (wanted.isascii() and wanted.isdecimal())
        require(fits, f"lock.{tower}", setting, 'expected empty, "all" or a number of depths')
        if wanted:
            kept[tower] = 0 if wanted == ALL else int(wanted)
    where: Mapping[str, Place] = places(model) if any(kept.values()) else {}
    for tower, depths in kept.items():
        if depths:
            count = 1 + max(place.top for place in where.values() if place.tower == tower)
            require(
                depths <= count,
                f"lock.{tower}",
                depths,
                f"expected at most {count}, the tower's layers, both ends counted",
            )
    for name, parameter in model.named_parameters():
        depths = kept.get(tower_of(name), -1)
        if depths == 0 or (depths > 0 and where[name].above >= depths):
            parameter.requires_grad_(False)
    if not any(p.requires_grad for name, p in model.named_parameters() if tower_of(name)):
        raise ConfigError(
            f"lock.image = {image!r} and lock.text = {text!r} leave nothing to train: unlock a tower"
        )
    still_statistics(model)


def still_statistics(model: nn.Module) -> None:
    """Put batch norms whose parameters are all locked into evaluation mode; after each ``model.train()``.

    Otherwise their running statistics, and with them a locked tower's features, would change.
    """
    for module in model.modules():
        if isinstance(module, _BATCH_NORMS):
            own = list(module.parameters(recurse=False))
            if own and not any(parameter.requires_grad for parameter in own):
                module.eval()


def free_depths(step: int, *, every: int, first: int = 1) -> int:
    """How many of the top depths of each tower are trained in update ``step`` = 0, 1, … under ``Unfreezing``.

    Args:
        step: updates made before.
        every: steps until the next lower depth is trained too.
        first: how many are trained from the start.
    """
    return first + step // every


class Unfreezing:
    """Gradual unfreezing (ULMFiT; Howard & Ruder 2018, https://arxiv.org/abs/1801.06146): from the top down.

    A fine-tuning begins with the top depths of both towers, and every so many steps the next lower ones join. What
    was locked for good stays so. On the quickstart's model, fine-tuned on handwriting, it changes nothing to speak
    of: 88.5%, and 79.7% of unseen fonts, where all layers from the start give 89.1% and 79.9%
    (bench/finetuning.py).
    """

    def __init__(self, model: CLIP, *, every: int, first: int = 1) -> None:
        """Of a model whose free parameters are those that are to be trained in the end.

        Args:
            model: a CLIP, after ``lock``.
            every: steps between two depths, at least 1.
            first: depths that are trained from the start, at least 1.

        Raises:
            ConfigError: a number is too small, or a tower's depths are not known.
        """
        require(every >= 1, "lock.unfreeze_every", every, "expected at least 1")
        require(first >= 1, "lock.unfreeze_first", first, "expected at least 1")
        self.every, self.first = every, first
        self._model = model
        where = places(model)
        self._above = [
            (parameter, where[name].above if tower_of(name) else 0)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        ]

    @property
    def layers(self) -> int:
        """How many are trained in the end, of the tower with the most of them."""
        return 1 + max((above for _, above in self._above), default=0)

    def lock_for_step(self, step: int) -> bool:
        """Set what is trained in update ``step``; returns whether that differs from what it was.

        What was built around the model's trainable parameters, such as DistributedDataParallel, must then be built
        anew. The optimizer need not: it has all of them from the start, and skips those without a gradient.
        """
        depths = free_depths(step, every=self.every, first=self.first)
        changed = False
        for parameter, above in self._above:
            free = above < depths
            changed |= parameter.requires_grad != free
            parameter.requires_grad_(free)
            if not free:
                parameter.grad = None
        if changed:
            self._model.train(self._model.training)
            still_statistics(self._model)
        return changed
