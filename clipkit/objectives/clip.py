"""The contrastive loss over the global batch, and the fraction of pairs that are nearest to each other.

``clip_loss`` is the symmetric cross-entropy of Radford et al. 2021 (figure 3), also with several positives. How it
is computed in little memory on any number of ranks is told in clipkit/objectives/tiles.py.

Letters: B rows of this rank, N rows of all ranks, O embedding dimension, R rows of a tile, K identities of a pair.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from clipkit.distributed import greatest_over_ranks, sum_over_ranks
from clipkit.objectives import Targets
from clipkit.objectives.tiles import (
    ColumnSums,
    FeatureGradients,
    GlobalBatch,
    OwnPairs,
    Same,
    at_least_float32,
    belonging,
    check_features,
    counts_alike,
    row_sums,
    softmaxes,
    tiles,
)

__all__ = ["clip_chance", "clip_loss", "clip_objective", "in_batch_recall", "recall_figures"]


# --------------------------------------------------------------------------------------------------------------
# How often the nearest of the global batch is the right one, a figure to watch while training.
#
# Letters: B rows of this rank, N rows of all ranks, O embedding dimension, R rows of a tile.

_ROUNDING = 8  # of the dtype's steps at 1: equal rows have products that differ by their place


@torch.no_grad()
def in_batch_recall(image_features: Tensor, text_features: Tensor) -> Tensor:
    """Return the fraction of images whose own text is the nearest of the global batch, and the same for texts.

    A tie (a lead below 8 steps of the dtype, 1e-6 in float32) counts as wrong, so that features that are all equal
    recall nothing. All ranks call it together. It costs one of the four products of ``clip_loss``.

    Args:
        image_features: (B, O) this rank's rows, unit norm. B may differ from rank to rank.
        text_features: (B, O) the matching rows.

    Returns:
        (2,) float32 (float64 for float64 features) in [0, 1], the same on all ranks: image to text, text to
        image. No gradient.

    Raises:
        ValueError: the features are not two matrices of one shape.
    """
    check_features(image_features, text_features)
    with torch.autocast(image_features.device.type, enabled=False):
        images, texts = at_least_float32(image_features), at_least_float32(text_features)
        batch = GlobalBatch(images)
        own, of_rows = images.new_empty(2, len(images))
        of_columns = images.new_full((batch.size,), -torch.inf)  # the greatest of the others
        for tile, cosines in tiles(images, batch.gather(texts), images.new_ones(())):
            diagonal = cosines.diagonal(batch.own.start + tile.start)
            own[tile] = diagonal
            diagonal.fill_(-torch.inf)
            of_rows[tile] = cosines.amax(1)
            of_columns = torch.maximum(of_columns, cosines.amax(0))
        others = torch.stack([of_rows, greatest_over_ranks(of_columns)[batch.own]])  # (2, B)
        right = own - others > _ROUNDING * torch.finfo(own.dtype).eps
        return sum_over_ranks(right.sum(1).to(own.dtype)) / batch.size


# --------------------------------------------------------------------------------------------------------------

_NONE = -1e30  # a logit with no part in softmax; finite, so that a tile may have no other in a column


def clip_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor,
    logit_bias: Tensor | None = None,
    *,
    identities: Tensor | None = None,
    same: Same = "positives",
) -> Tensor:
    """Symmetric cross-entropy of every image against all texts and of every text against all images.

    The value is the loss of the global batch across the default process group, the same on all ranks. The
    gradient is such that the mean over ranks, which is what DistributedDataParallel takes, is the
    single-process gradient of the whole batch for every parameter, the temperature included. It can be
    differentiated once. All ranks call it together.

    Two pairs of the batch that show the same thing are negatives of each other, unless ``identities`` tells. With
    ``same="positives"`` the target of an image is then uniform over all texts that are the same, and so for
    texts (UniCL, Yang et al. 2022, https://arxiv.org/abs/2204.03610); with ``same="ignored"`` the own text
    remains the only target and the others that are the same are left out of the softmax.

    Args:
        image_features: (B, O) this rank's rows, unit norm. B may differ from rank to rank.
        text_features: (B, O) the matching rows.
        logit_scale: one number, exp(t).
        logit_bias: is not looked at: softmax does not see a number that is added to all logits. So what a model
            with SigLIP's bias returns can be given as it is.
        identities: (B, K) int64, such as the numbers of the image and of the caption. Two pairs that agree in
            at least one of the K show the same thing. Given on all ranks or on none.
        same: "positives" or "ignored".

    Returns:
        A float32 scalar (float64 for float64 features); ln N is the level of chance without identities.

    Raises:
        ValueError: shapes or dtypes are not these.
    """
    check_features(image_features, text_features)
    with torch.autocast(image_features.device.type, enabled=False):
        images, texts = at_least_float32(image_features), at_least_float32(text_features)
        batch = GlobalBatch(images)
        pairs = belonging(batch, images, identities, same)
        loss: Tensor = _Contrastive.apply(images, texts, logit_scale.to(images.dtype), batch, pairs)
        return loss


class _Contrastive(torch.autograd.Function):
    """Rows are this rank's images, columns the texts of all ranks."""

    @staticmethod
    def forward(
        ctx: Any, images: Tensor, texts: Tensor, scale: Tensor, batch: GlobalBatch, pairs: OwnPairs
    ) -> Tensor:
        all_texts = batch.gather(texts)  # (N, O)
        by_row = images.new_empty(2, len(images))
        columns = ColumnSums(len(all_texts), images)
        for tile, logits in tiles(images, all_texts, scale):
            pairs.see(logits, tile)
            pairs.leave_out(logits, tile, _NONE)
            by_row[:, tile] = row_sums(logits)
            columns.add(logits)
        by_column, _ = columns.over_ranks()  # (2, N)
        ctx.save_for_backward(images, all_texts, scale, by_row, by_column)
        ctx.batch, ctx.pairs = batch, pairs
        of_texts = by_column[:, batch.own]  # (2, B)
        above = by_row[0] + of_texts[0] - pairs.mean_targets()
        return batch.mean(above + (by_row[1] * of_texts[1]).log()) / 2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        images, all_texts, scale, by_row, by_column = ctx.saved_tensors
        found = FeatureGradients(ctx.batch, images, all_texts, scale, ctx.needs_input_grad)
        for tile, logits in tiles(images, all_texts, scale):
            ctx.pairs.leave_out(logits, tile, _NONE)
            slopes = softmaxes(logits, by_row[:, tile], by_column)  # (R, N)
            ctx.pairs.subtract_targets(slopes, tile)
            found.add(slopes, tile)
        return *found.over_ranks(gradients[0] * ctx.batch.weight / 2), None, None


# The entry of ``clipkit.objectives.OBJECTIVES``.


def clip_objective(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor,
    logit_bias: Tensor | None = None,
    *,
    targets: Targets,
) -> Tensor:
    """Return ``clip_loss`` with identities as the setting ``loss.same`` says."""
    if targets.same == "negatives":
        return clip_loss(image_features, text_features, logit_scale)
    same: Same = "positives" if targets.same == "positives" else "ignored"
    return clip_loss(image_features, text_features, logit_scale, identities=targets.identities, same=same)


def clip_chance(targets: Targets, text_rows: int) -> float:
    """Return the mean of ln m over the pairs, each compared with m texts; m is N unless ``same`` is "ignored"."""
    _, left = counts_alike(targets.identities, targets.same)
    return left.log().mean().item()


def recall_figures(image_features: Tensor, text_features: Tensor, targets: Targets) -> dict[str, float]:
    """Return the metrics ``image_to_text_R@1`` and ``text_to_image_R@1`` of a batch."""
    to_text, to_image = in_batch_recall(image_features, text_features).tolist()
    return {"image_to_text_R@1": to_text, "text_to_image_R@1": to_image}
