"""The zero-shot score on ImageNet that public runs of a recipe's model reached, at their end and on the way.

``expected_score`` reads a grid of complete runs, each with a learning rate schedule of its length. The functions
after it read learning curves, the scores of runs in the course of their training.
"""

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path

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
_OTHER = ("objectives", "distill", "select", "lock", "lora", "small")


def public_runs(config: Config) -> PublicRuns | None:
    """Return the public runs of a recipe's model and loss; None if there are none, or the recipe differs."""
    if not _trains_plain_model(config):
        return None
    model = config.model, config.shape, config.loss
    return next((runs for runs in GRID if runs.model() == model), None)


def _trains_plain_model(config: Config) -> bool:
    if (config.optim.name, config.optim.schedule) != ("adamw", "cosine"):
        return False
    default = Config()
    if (config.optim.image_lr_scale, config.optim.text_lr_scale, config.pixels.channels) != (1, 1, 3):
        return False
    return all(getattr(config, name) == getattr(default, name) for name in _OTHER)


def expected_score(config: Config) -> str:
    """Describe the score that public runs reached with the recipe's number of samples seen.

    Between two numbers of samples it is interpolated linearly in their logarithm. Nothing is extrapolated: the
    result is "" outside of the runs' range, and for other architectures, objectives and recipes.
    """
    runs, seen = public_runs(config), config.steps * config.batch_size
    if runs is None or not SAMPLES[0] <= seen <= SAMPLES[len(runs.scores) - 1]:
        return ""
    score, before, after = _interpolate_score(SAMPLES, runs.scores, seen)
    between = ""
    if seen not in SAMPLES:
        between = f", interpolated between {format_samples(before)} and {format_samples(after)}"
    return (
        f"{score:.1f}% zero-shot top-1 on ImageNet: the best public runs of {runs.name} with "
        f"{format_samples(seen)} samples seen{between} ({_SOURCE}). It holds for DataComp-1.4B and tuned settings; "
        "other data give other scores"
    )


def _interpolate_score(
    samples: Sequence[float], scores: Sequence[float], seen: float
) -> tuple[float, float, float]:
    """Interpolate linearly in log samples; also returns the two numbers of samples around ``seen``."""
    points = list(pairwise(zip(samples, scores, strict=False)))
    (before, low), (after, high) = points[min(bisect_right(samples, seen), len(points)) - 1]
    score = low + (high - low) * math.log(seen / before) / math.log(after / before)
    return score, before, after


CURVES = "LAION-AI/scaling-laws-openclip"  # source of the learning curves


@dataclass(frozen=True, kw_only=True)
class PublicCurve:
    """The learning curve of a public run with CLIP's softmax loss, AdamW and a cosine schedule.

    Attributes:
        architecture: open_clip's name.
        dataset: its name.
        speed: images per second and A100.
        mfu: fraction of the A100's 312 TFLOP/s that this is, by clipkit's count of FLOPs.
        samples: numbers of samples seen, ascending.
        scores: zero-shot top-1 accuracy on ImageNet in percent for each of them.
    """

    architecture: str
    dataset: str
    batch_size: int
    speed: float
    mfu: float
    samples: Sequence[int]
    scores: Sequence[float]

    @property
    def name(self) -> str:
        return f"{self.dataset}, {format_samples(self.samples[-1])} samples, batch size {self.batch_size:,}"

    def interpolate_score(self, seen: float) -> float:
        """Return the score after ``seen`` samples: outside of the curve, that of the nearest end."""
        seen = min(max(seen, self.samples[0]), self.samples[-1])
        return _interpolate_score(self.samples, self.scores, seen)[0]

    def measure_distance(self, batch_size: int, seen: float) -> tuple[bool, bool, float]:
        """Return a sort key of the difference to a run: first whether the curve has a score at ``seen`` samples,
        then whether the batch size is the same, then the ratios of the batch sizes and of all samples.
        """
        has_score = self.samples[0] / _SAME <= seen <= self.samples[-1] * _SAME
        ratios = (batch_size / self.batch_size, seen / self.samples[-1])
        octaves = sum(abs(math.log2(ratio)) for ratio in ratios)
        return not has_score, batch_size != self.batch_size, octaves


_SAME = 1.05  # numbers of samples with a lower ratio count as equal: published ones are rounded


@cache
def _read_curves() -> tuple[PublicCurve, ...]:
    # written by bench/import_curves.py
    text = Path(__file__).with_name("public_curves.json").read_text(encoding="utf-8")
    return tuple(PublicCurve(**run) for run in json.loads(text)["runs"])


def find_curves(config: Config) -> list[PublicCurve]:
    """Return the learning curves of public runs of a recipe's architecture, that of the nearest run first.

    There are none for a model that is not a plain CLIP trained from scratch.
    """
    name = config.model.name.removeprefix("open_clip:")
    is_plain = _trains_plain_model(config) and replace(config.model, name=ModelConfig().name) == ModelConfig()
    if not is_plain or (config.shape, config.loss) != (ShapeConfig(), LossConfig()):
        return []
    seen = config.steps * config.batch_size
    curves = [curve for curve in _read_curves() if curve.architecture == name]
    return sorted(curves, key=lambda curve: curve.measure_distance(config.batch_size, seen))


def describe_nearest_curve(config: Config) -> str:
    """Describe what the nearest public run had reached at the recipe's number of samples seen, and its speed.

    The result is "" without a curve, see ``find_curves``.
    """
    curves = find_curves(config)
    if not curves:
        return ""
    curve, seen = curves[0], config.steps * config.batch_size
    first, last = curve.samples[0], curve.samples[-1]
    score = f"{curve.interpolate_score(seen):.1f}% zero-shot top-1 on ImageNet"
    if seen * _SAME < first:
        text = f"{score} at its first evaluation, after {format_samples(first)} samples seen"
    elif seen * _SAME < last:
        text = (
            f"{score} after {format_samples(seen)} samples seen, and {curve.scores[-1]:.1f}% at its end. Its "
            "learning rate had not fallen to 0 then: a run that ends there reaches another score"
        )
    else:
        end = f"{curve.scores[-1]:.1f}% zero-shot top-1 on ImageNet"
        text = f"{end} at its end, after {format_samples(last)} samples seen"
    fastest = max(curves, key=lambda curve: curve.speed)
    speed = f"{curve.speed:,.0f} images/s per A100 (MFU {curve.mfu:.0%})"
    if fastest.speed > curve.speed:
        speed += f", the fastest run of {curve.architecture} at {fastest.speed:,.0f} ({fastest.mfu:.0%})"
    run = f"{curve.architecture} ({curve.name}; {CURVES})"
    return f"the nearest public run of {run} had {text}. It trained at {speed}"


def format_samples(samples: float) -> str:
    """Format a number of samples in millions or billions."""
    return f"{samples / 1e9:.3g}B" if samples >= 1e9 else f"{samples / 1e6:.3g}M"
