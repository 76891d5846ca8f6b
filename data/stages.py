"""Smaller pictures and shorter texts for the first steps of a training.

Training at a small size and finishing at the full one costs a fraction of the compute for nearly the same model
(CLIPA, Li et al. 2023, https://arxiv.org/abs/2305.07017; its finish is arXiv 2306.15658). On the quickstart it
costs much: with 900 of 1,200 steps on pictures of 8 pixels, 4 patches, handwriting 45.2% and unseen fonts 56.5%,
where all at 16 pixels give 62.3% and 84.5% (bench/options.py, one seed).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from clipkit.config import SmallConfig
from clipkit.errors import ConfigError

__all__ = ["Stage", "check_stages", "small_stages", "stage_at"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """The sizes of the steps before ``until_step``, from the end of the stage before it.

    Attributes:
        until_step: how many steps are made by then, from the beginning of the training.
        image_size: side of the pictures in pixels.
        context_length: longest text in tokens; a longer one is cut and still ends with its end of text.
    """

    until_step: int
    image_size: int
    context_length: int


def small_stages(small: SmallConfig, *, image_size: int, context_length: int) -> tuple[Stage, ...]:
    """The stage that settings name, if any; the sizes that it leaves open are the model's own."""
    if not small.steps:
        return ()
    return (
        Stage(
            until_step=small.steps,
            image_size=small.image_size or image_size,
            context_length=small.context_length or context_length,
        ),
    )


def stage_at(stages: Sequence[Stage], step: int) -> Stage | None:
    """The stage of the batch after ``step`` others; None for the full sizes, once all stages are over."""
    return next((stage for stage in stages if step < stage.until_step), None)


def check_stages(stages: Sequence[Stage]) -> None:
    """See that stages follow one another and have sizes.

    Raises:
        ConfigError: they do not.
    """
    before = 0
    for stage in stages:
        if stage.until_step <= before:
            raise ConfigError(
                f"stages: one ends at step {stage.until_step}, which is not after step {before}: each must end "
                "later than the one before it"
            )
        if stage.image_size < 1 or stage.context_length < 2:
            raise ConfigError(
                f"stages: image_size = {stage.image_size} and context_length = {stage.context_length} do not fit: "
                "at least 1 pixel and 2 tokens"
            )
        before = stage.until_step
