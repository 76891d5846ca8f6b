"""The model that a training begins with, and what its steps count for."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from clipkit.api import load
from clipkit.architectures import Architecture, ClassTable, VisionTower
from clipkit.averaging import AveragedWeights
from clipkit.checkpoint import load_model
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
    if not 2 <= (small.context_length or 2) <= shape.text.context_length:
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
    in its ``checkpoint``, and ``model.weights`` may be gone by now.

    Raises:
        ConfigError: the weights are of another architecture.
        CheckpointError: they cannot be loaded.
    """
    if model.weights and checkpoint is not None:
        first = _resumed(checkpoint, shape, model.label)
    elif model.weights:
        first = load(model.weights, image_size=model.image_size, context_length=model.context_length)
        if shape.logit_bias and first.logit_bias is None:
            first.reset_bias()
        # a bias that they have stays; softmax does not see it
        if replace(first.architecture, logit_bias=shape.logit_bias) != shape:
            raise ConfigError(
                f"model.weights = {model.weights!r} are of {first.name or 'another architecture'}, "
                f"not of {model.label}: set model.name{f'={first.name}' if first.name else ''}"
            )
    else:
        first = create(shape, name=model.label, seed=seed)
        if small.steps and small.image_size and isinstance(first.visual, VisionTransformer):
            smooth_grid(first.visual.positional_embedding, small.image_size // first.visual.patch_size)
    if first.logit_bias is not None:
        first.logit_bias.requires_grad_(loss.name == "siglip")
    return first.train()


def _resumed(checkpoint: Path, shape: Architecture, label: str) -> CLIP:
    first = load_model(checkpoint)
    if replace(first.architecture, logit_bias=shape.logit_bias) != shape:
        raise CheckpointError(f"{checkpoint} is of another architecture than {label}")
    first.name = first.name or label
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
