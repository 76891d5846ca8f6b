"""The zero-shot score on ImageNet that public runs of a recipe's model reached. Does not import torch."""

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from clipkit.config import Config, LossConfig, ModelConfig, ShapeConfig


@dataclass(frozen=True, kw_only=True)
class PublicRuns:
    """Runs of one model and loss.

    Attributes:
        model: returns the sections of the configuration that select it.
        scores: zero-shot top-1 accuracy on ImageNet in percent for each of the first ``SAMPLES``, the best of the
            study's sweep.
    """

    name: str
    model: Callable[[], tuple[ModelConfig, ShapeConfig, LossConfig]]
    scores: tuple[float, ...]


# LAION-AI/scaling-laws-for-comparison, overview.ipynb (Nezhurina et al. 2025, https://arxiv.org/abs/2506.04598):
# trained on DataComp-1.4B with a cosine schedule. Its MaMMUT differs from clipkit's (configs/mammut_vit_b_16.toml).
SAMPLES = (1.28e6, 3e6, 6.4e6, 12.8e6, 30e6, 128e6, 1.28e9, 3e9)
_SOURCE = "LAION-AI/scaling-laws-for-comparison"
GRID = (
    PublicRuns(
        name="CLIP S/32",
        model=lambda: (ModelConfig(name="ViT-S-32"), ShapeConfig(), LossConfig()),
        scores=(1.3, 3.0, 6.0, 10.2, 18.7, 35.4, 53.1, 55.9),
    ),
    PublicRuns(
        name="CLIP B/32",
        model=lambda: (ModelConfig(name="ViT-B-32"), ShapeConfig(), LossConfig()),
        scores=(1.4, 3.2, 6.5, 11.2, 21.6, 40.4, 60.8, 65.3),
    ),
    PublicRuns(
        name="CLIP B/16 text-plus",  # the text tower and the embedding are those of L/14
        model=lambda: (ModelConfig(name="ViT-B-16"), ShapeConfig(text_width=768, embed=768), LossConfig()),
        scores=(1.8, 3.5, 8.6, 14.8, 26.2, 46.7, 66.8, 71.3),
    ),
    PublicRuns(
        name="SigLIP B/32",
        model=lambda: (ModelConfig(name="ViT-B-32"), ShapeConfig(), LossConfig(name="siglip")),
        scores=(1.3, 3.1, 6.2, 10.8, 20.6, 39.7),
    ),
)
# sections with which a run is no longer one of the study's
_OTHER = ("objectives", "distill", "lock", "lora", "small")


def public_runs(config: Config) -> PublicRuns | None:
    """Return the public runs of a recipe's model and loss; None if there are none, or the recipe differs."""
    if (config.optim.name, config.optim.schedule) != ("adamw", "cosine"):
        return None
    default = Config()
    if any(getattr(config, name) != getattr(default, name) for name in _OTHER):
        return None
    model = config.model, config.shape, config.loss
    return next((runs for runs in GRID if runs.model() == model), None)


def expected_score(config: Config) -> str:
    """Describe the score that public runs reached with the recipe's number of samples seen.

    Between two numbers of samples it is interpolated linearly in their logarithm. Nothing is extrapolated: the
    result is "" outside of the runs' range, and for other architectures, objectives and recipes.
    """
    runs, seen = public_runs(config), config.steps * config.batch_size
    if runs is None or not SAMPLES[0] <= seen <= SAMPLES[len(runs.scores) - 1]:
        return ""
    points = list(pairwise(zip(SAMPLES, runs.scores, strict=False)))
    (before, low), (after, high) = points[min(bisect_right(SAMPLES, seen), len(points)) - 1]
    score = low + (high - low) * math.log(seen / before) / math.log(after / before)
    between = f", interpolated between {_count(before)} and {_count(after)}" if seen not in SAMPLES else ""
    return (
        f"{score:.1f}% zero-shot top-1 on ImageNet: the best public runs of {runs.name} with {_count(seen)} "
        f"samples seen{between} ({_SOURCE}). It holds for DataComp-1.4B and tuned settings; other data give other "
        "scores"
    )


def _count(samples: float) -> str:
    return f"{samples / 1e9:.3g}B" if samples >= 1e9 else f"{samples / 1e6:.3g}M"
