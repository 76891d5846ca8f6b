"""The model that a training begins with, and what its steps count for."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from clipkit.api import load
from clipkit.architectures import Architecture, ClassTable, VisionTower
from clipkit.averaging import AveragedWeights
from clipkit.checkpoint import load_model, stored_preprocess
from clipkit.config import LossConfig, ModelConfig, SmallConfig
from clipkit.errors import CheckpointError, ConfigError
from clipkit.family import architecture
from clipkit.flops import counted_flops, patches_of, step_flops, trained_blocks
from clipkit.model import CLIP, create
from clipkit.parallel import gathered
from clipkit.resample import smooth_grid
from clipkit.running_statistics import RunningStatistics
from clipkit.towers import VisionTransformer

__all__ = ["first_model", "flops_of_steps", "patch_counts", "scored_weights", "shape_of"]


def shape_of(model: ModelConfig, loss: LossConfig, small: SmallConfig) -> Architecture:
    """The architecture that settings name; with the bias that the sigmoid loss needs.

    Raises:
        ConfigError: a name is unknown, or this image tower cannot drop patches or see smaller pictures.
    """
    shape = architecture(
        model.name,
        image=model.image,
        text=model.text,
        image_size=model.image_size,
        context_length=model.context_length,
    )
    if model.patch_dropout and not isinstance(shape.vision, VisionTower):
        raise ConfigError(
            f"model.patch_dropout = {model.patch_dropout} is for clipkit's own image towers, not for {model.label}"
        )
    if small.steps:
        _check_small(small, shape, model.label)
    return replace(shape, logit_bias=True) if loss.name == "siglip" else shape


def _check_small(small: SmallConfig, shape: Architecture, label: str) -> None:
    if small.image_size:
        vision = shape.vision
        if not isinstance(vision, VisionTower):
            raise ConfigError(
                f"small.image_size = {small.image_size} does not fit {label}: it is for clipkit's own image towers"
            )
        if small.image_size % vision.patch_size or small.image_size > vision.image_size:
            raise ConfigError(
                f"small.image_size = {small.image_size} does not fit {label}: a multiple of its patch size, "
                f"{vision.patch_size}, and at most its image size, {vision.image_size}"
            )
    if small.context_length and isinstance(shape.text, ClassTable):
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
    if model.weights and checkpoint is not None:
        first = _resumed(checkpoint, shape, model)
    elif model.weights:
        first = load(model.weights, image_size=model.image_size, context_length=model.context_length)
        if shape.logit_bias and first.logit_bias is None:
            first.reset_bias()
        if not _fits(first, shape):
            raise ConfigError(f"model.weights = {model.weights!r} {_misfit(first, shape, model)}")
        first.name = first.name or model.label
    else:
        first = create(shape, name=model.label, seed=seed)
        if checkpoint is not None:
            first.preprocess = stored_preprocess(checkpoint)
        if small.steps and small.image_size and isinstance(first.visual, VisionTransformer):
            smooth_grid(first.visual.positional_embedding, small.image_size // first.visual.patch_size)
    if first.logit_bias is not None:
        first.logit_bias.requires_grad_(loss.name == "siglip")
    return first.train()


def _fits(first: CLIP, shape: Architecture) -> bool:
    """A bias that weights have stays, as softmax does not see it, and how fresh ones would be drawn is past."""
    return replace(first.architecture, logit_bias=shape.logit_bias, small_data=shape.small_data) == shape


def _misfit(first: CLIP, shape: Architecture, model: ModelConfig) -> str:
    """How weights differ from the architecture that settings name, and what to do."""
    own = first.architecture.text
    if isinstance(shape.text, ClassTable):
        if isinstance(own, ClassTable) and own != shape.text and _fits_but_text(first, shape):
            return f"are of {_other_classes(own, shape.text)}: give {model.text} as it was for them"
        if not isinstance(own, ClassTable):
            return (
                f"have a text tower and no rows of classes, not those of {model.text}: `python -m eval "
                "fine-tune` makes such a head of them and trains it"
            )
    elif isinstance(own, ClassTable):
        return (
            f"have a head of classes and no text tower, not that of {model.label}: give other weights, or "
            "loss.name=classes and the model.text=classes:FILE of these"
        )
    name, *others = first.name.split(" + ")
    named = {"model.name": name, **{_key(one): one for one in others if one != "classes"}}
    set_to = " ".join(f"{key}={value}" for key, value in named.items()) if name else "model.name"
    return f"are of {first.name or 'another architecture'}, not of {model.label}: set {set_to}"


def _key(tower: str) -> str:
    return "model.image" if tower.startswith("timm:") else "model.text"


def _fits_but_text(first: CLIP, shape: Architecture) -> bool:
    return _fits(first, replace(shape, text=first.architecture.text))


def _other_classes(own: ClassTable, given: ClassTable) -> str:
    """What of the names is another."""
    if len(own.names) != len(given.names):
        return f"{len(own.names):,} classes, not of {len(given.names):,}"
    pairs = zip(own.names, given.names, strict=True)
    number, (old, new) = next((i, pair) for i, pair in enumerate(pairs, start=1) if pair[0] != pair[1])
    order = "classes in another order" if sorted(own.names) == sorted(given.names) else "other classes"
    return f"{order}, number {number} is {old[:80]!r} and not {new[:80]!r}"


def _resumed(checkpoint: Path, shape: Architecture, model: ModelConfig) -> CLIP:
    first = load_model(checkpoint)
    if not _fits(first, shape):
        own = first.architecture.text
        if (
            isinstance(own, ClassTable)
            and isinstance(shape.text, ClassTable)
            and _fits_but_text(first, shape)
        ):
            raise CheckpointError(
                f"{checkpoint} is of {_other_classes(own, shape.text)}: give {model.text} as it was when the run "
                "began, or set out=… for a new run"
            )
        raise CheckpointError(f"{checkpoint} is of another architecture than {model.label}")
    first.name = first.name or model.label
    if not isinstance(shape.text, ClassTable):
        first.tokenizer(["a"])  # reads its files now: the checkpoint goes when newer ones take its place
    return first


def patch_counts(shape: Architecture, patch_dropout: float, image_size: int) -> tuple[int, int] | None:
    """How many patches a picture has, and how many of them are seen; None for all."""
    if not patch_dropout:
        return None
    assert isinstance(shape.vision, VisionTower)
    patches = patches_of(replace(shape.vision, image_size=image_size))
    return patches, max(1, round(patches * (1 - patch_dropout)))


def flops_of_steps(
    model: CLIP, patch_dropout: float, global_rows: int
) -> Callable[[Sequence[int], int], int] | None:
    """A function of a batch's caption lengths and picture size to the model FLOPs of this rank's share of a step.

    None where a tower's FLOPs are not known.
    """
    counted = counted_flops(model)
    if counted is None:
        return None
    image_blocks, text_blocks = trained_blocks(model)

    def of_step(lengths: Sequence[int], image_size: int) -> int:
        shape = model.architecture
        if isinstance(shape.vision, VisionTower):
            shape = replace(shape, vision=replace(shape.vision, image_size=image_size))
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
    RunningStatistics(model).take_chiefs()
    with nullcontext() if averaged is None else averaged.applied(), gathered(model, reshard=reshard):
        yield
