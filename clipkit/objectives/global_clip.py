"""CLIP's loss over all training samples, from small batches, by running estimates (SogCLR, FastCLIP).

The softmax of a batch compares a pair only with those of its batch. Here the sum over the texts of the batch only
updates an estimate of the mean over all texts, which is kept for each image, and likewise for each text (SogCLR,
Yuan et al. 2022, https://arxiv.org/abs/2202.12387; FastCLIP, Wei et al. 2024, https://arxiv.org/abs/2407.01445). So
the gradient of a pair that its batch makes easy does not vanish.

Letters: B rows of this rank, N rows of all ranks, O embedding dimension, R rows of a tile, M pairs that the loss
compares, S training samples.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from clipkit.cli import setting
from clipkit.config import Config, above, require
from clipkit.distributed import gather_row_counts, gather_rows
from clipkit.model.towers import at_least_float32
from clipkit.objectives.base import Objective, Outputs, Targets
from clipkit.objectives.tiles import (
    ColumnSums,
    FeatureGradients,
    GlobalBatch,
    check_features,
    compute_tiles,
    row_sums,
    sum_softmaxes,
)

_NONE = -1e30  # a logit without influence on softmax
_LINEAR = 40.0  # above which log(1 + exp(x)) equals x, also in float64
_DECAY = 0.5  # fraction of a run in which γ falls
_ESTIMATES = "global_clip.estimates"  # (S, 2) float32 of images and texts; -inf: not seen yet


class GlobalLoss(NamedTuple):
    """A loss, and the new estimates (N, 2) of the images and texts of all ranks."""

    loss: Tensor
    estimates: Tensor


def global_clip_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor,
    estimates: Tensor,
    *,
    gamma: float,
    pairs: int,
    all_texts: Tensor | None = None,
    precision: str = "float32",
) -> GlobalLoss:
    """Estimate CLIP's loss of a batch of M pairs from one of N.

    For an image i with similarities s to texts, g is the mean over the other texts j of the batch of exp(scale *
    (s_ij - s_ii)), and u ← (1 - γ) u + γ g the estimate of that mean over all other texts; a pair that is seen for
    the first time has u = g. The loss is the mean over images and texts of ln(1 + (M - 1) u). In its gradient, u is
    replaced by g where it is differentiated: the derivative of an image's loss is (M - 1) g' / (1 + (M - 1) u).
    With γ = 1 and M = N, loss and gradient are those of ``clip_loss``.

    The estimates are ln u, since u may be too large for float32. Value and gradients on several ranks are as for
    ``clip_loss``. All ranks call it together.

    Args:
        image_features: (B, O) this rank's rows, unit norm. B may differ from rank to rank.
        text_features: (B, O) the matching rows.
        logit_scale: scalar, exp(t).
        estimates: (N, 2) former estimates of the images and texts of all ranks; -inf for a new one.
        gamma: γ, above 0 and at most 1.
        pairs: M, at least 2.
        all_texts: as for ``clip_loss``.
        precision: as for ``clip_loss``.
    """
    check_features(image_features, text_features)
    with torch.autocast(image_features.device.type, enabled=False):
        images, texts = at_least_float32(image_features), at_least_float32(text_features)
        batch = GlobalBatch(images, precision=precision)
        all_texts = batch.gather(texts) if all_texts is None else all_texts
        scale = logit_scale.to(images.dtype)
        former = estimates.to(images.dtype).T
        loss, new = _Estimated.apply(images, all_texts, scale, batch, former, gamma, math.log(pairs - 1))
        return GlobalLoss(loss, new.T)


class _Estimated(torch.autograd.Function):
    """Rows are this rank's images, columns the texts of all ranks. Sums by row and by column are (2, N)."""

    @staticmethod
    def forward(
        ctx: Any,
        images: Tensor,
        all_texts: Tensor,
        scale: Tensor,
        batch: GlobalBatch,
        former: Tensor,
        gamma: float,
        log_others: float,
    ) -> tuple[Tensor, Tensor]:
        by_row = images.new_empty(2, len(images))
        pair_logits = images.new_empty(len(images))
        columns = ColumnSums(len(all_texts), images)
        for tile, logits in compute_tiles(images, all_texts, scale, batch.precision):
            diagonal = logits.diagonal(batch.local_rows.start + tile.start)
            pair_logits[tile] = diagonal
            diagonal.fill_(_NONE)
            by_row[:, tile] = row_sums(logits)
            columns.add(logits)
        greatest, totals = columns.combine_ranks()[0]  # (N,) each
        local = torch.stack([pair_logits, by_row[0] + by_row[1].log()], dim=1)
        all_pair_logits, all_rows = gather_rows(local, gather_row_counts(len(local))).T
        log_count = math.log(batch.size - 1)
        log_means = torch.stack([all_rows, greatest + totals.log()]) - all_pair_logits - log_count  # (2, N)
        former = torch.where(former.isneginf(), log_means, former)
        level = torch.maximum(former, log_means)
        mixed = torch.lerp((former - level).exp(), (log_means - level).exp(), gamma)
        new = level + mixed.log()
        losses = F.softplus(log_others + new, threshold=_LINEAR)  # ln(1 + (M - 1) u)
        # the slope of a logit is its exponential divided by a denominator, whose logarithm is stored
        levels = all_pair_logits + log_count - log_others + losses
        slopes = -(log_others + log_means - losses).exp().sum(0)  # (N,) by the logits of pairs
        ctx.save_for_backward(images, all_texts, scale, levels, slopes)
        ctx.batch = batch
        ctx.mark_non_differentiable(new)
        return losses.mean(), new

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        images, all_texts, scale, levels, pair_slopes = ctx.saved_tensors
        batch = ctx.batch
        by_row, by_column = torch.stack([levels, torch.ones_like(levels)], dim=1)  # (2, N) each
        by_row = by_row[:, batch.local_rows]
        pair_slopes = pair_slopes[batch.local_rows]
        feature_gradients = FeatureGradients(batch, images, all_texts, scale, ctx.needs_input_grad[:3])
        for tile, logits in compute_tiles(images, all_texts, scale, batch.precision):
            slopes = sum_softmaxes(logits, by_row[:, tile], by_column)  # (R, N)
            slopes.diagonal(batch.local_rows.start + tile.start).copy_(pair_slopes[tile])
            feature_gradients.add(slopes, tile)
        return *feature_gradients.finish(gradients[0] * batch.weight / 2), None, None, None, None


@dataclass(frozen=True, kw_only=True)
class GlobalClip(Objective):
    """CLIP's loss over all training samples, for small batches (SogCLR, FastCLIP); see ``global_clip_loss``."""

    section = "global_clip."
    summary = "softmax over all training samples, estimated from batches (SogCLR, FastCLIP)"
    tiled = True
    gathers_captions = True
    uses_same = False
    smooths = False
    sample_bytes = 8

    gamma: float = setting(
        0.2,
        "Weight of a batch in the running estimate of each image and text, to which it falls from 1 by a cosine in "
        "the first half of the run (FastCLIP); 1: no memory.",
        above(0, at_most=1),
    )

    def create_state(self, samples: int) -> dict[str, Tensor]:
        return {_ESTIMATES: torch.full((samples, 2), -math.inf)}

    def loss(self, outputs: Outputs, targets: Targets) -> Tensor:
        assert targets.state is not None and targets.numbers is not None
        stored = targets.state.tensors[_ESTIMATES]
        numbers = gather_rows(targets.numbers, gather_row_counts(len(targets.numbers)))  # (N,)
        loss, estimates = global_clip_loss(
            outputs.images,
            outputs.texts,
            outputs.scale,
            stored[numbers],
            gamma=self.weight_at(targets.progress),
            pairs=len(stored),
            all_texts=targets.all_texts,
            precision=targets.precision,
        )
        # of a sample that is drawn several times, the last estimate is kept
        order = numbers.argsort(stable=True)
        last = torch.searchsorted(numbers[order], numbers, right=True) - 1
        targets.state.propose(_ESTIMATES, estimates[order[last]], numbers)
        return loss

    def weight_at(self, progress: float) -> float:
        """Return γ after a fraction of the run."""
        falling = max(0.0, 1 - progress / _DECAY)
        return self.gamma + (1 - self.gamma) * (1 - math.cos(math.pi * falling)) / 2

    def chance(self, targets: Targets, text_rows: int) -> float:
        """Return ln M."""
        assert targets.state is not None
        return math.log(len(targets.state.tensors[_ESTIMATES]))

    def check(self, config: Config) -> None:
        super().check(config)
        alone = f"cannot be combined with loss.name={config.loss.name}"
        require(not config.loss.dims, "loss.dims", config.loss.dims, alone)
