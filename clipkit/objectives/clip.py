"""CLIP's contrastive loss over the global batch (Radford et al. 2021, figure 3).

clipkit/objectives/tiles.py describes how it is computed in little memory on any number of ranks.

Letters: B rows of this rank, N rows of all ranks, O embedding dimension, R rows of a tile, K identities of a pair.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from clipkit.distributed import sum_over_ranks
from clipkit.model.towers import at_least_float32
from clipkit.objectives.base import Objective, Outputs, Targets
from clipkit.objectives.tiles import (
    ColumnSums,
    FeatureGradients,
    GlobalBatch,
    PairWeights,
    PositivePairs,
    check_features,
    compute_tiles,
    count_alike,
    gather_weights,
    positive_pairs,
    row_sums,
    split_negatives,
    sum_softmaxes,
    target_entropy,
)

_NONE = -1e30  # a logit without influence on softmax; finite, since a column of a tile may have no other


def clip_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor,
    logit_bias: Tensor | None = None,
    *,
    identities: Tensor | None = None,
    same: str = "positives",
    smoothing: float = 0.0,
    negatives: tuple[Tensor, Tensor] | None = None,
    all_texts: Tensor | None = None,
    weights: Tensor | None = None,
    precision: str = "float32",
) -> Tensor:
    """Compute the symmetric cross-entropy of every image over all texts and of every text over all images.

    The value is the loss of the global batch across the default process group, the same on all ranks. The mean over
    ranks of the gradients, which DistributedDataParallel takes, is the single-process gradient of the whole batch
    for every parameter, including the temperature. It can be differentiated once. All ranks call it together.

    ``same`` decides about two pairs of the batch that show the same thing. With "positives" the target of an image
    is uniform over all texts that are the same, and likewise for texts (UniCL, Yang et al. 2022,
    https://arxiv.org/abs/2204.03610). With "ignored" the own text is the only target, and the others that are the
    same are left out of the softmax. With "negatives", or without ``identities``, they are negatives.

    With ``weights`` w the loss is Σ w_i (a_i + b_i) / 2 Σ w_i over the pairs i of the global batch, where a_i is
    the cross-entropy of image i over all texts and b_i that of text i over all images (Generalized Contrastive
    Learning, Zhu et al. 2024, https://arxiv.org/abs/2404.08535). A pair of weight 0 is still a negative of others.

    Args:
        image_features: (B, O) this rank's rows, unit norm. B may differ from rank to rank.
        text_features: (B, O) the matching rows.
        logit_scale: scalar, exp(t).
        logit_bias: ignored, since a value added to all logits does not change softmax; for models with SigLIP's
            bias.
        identities: (B, K) int64, such as numbers of the image and of the caption. Two pairs that agree in at least
            one of the K show the same thing. Given on all ranks or on none.
        same: "positives", "ignored" or "negatives".
        smoothing: probability, at least 0 and below 1, that a target spreads evenly over the whole batch (label
            smoothing; Szegedy et al. 2016, https://arxiv.org/abs/1512.00567); 0 with "ignored".
        negatives: (B, O) features of a wrong caption of each image, and (B,) bool whether the image has one; such a
            text is one more in the softmax of its image (NegCLIP; Yuksekgonul et al. 2023,
            https://arxiv.org/abs/2210.01936). Given on all ranks or on none.
        all_texts: (N, O) float32 text features of all ranks, if they are gathered already; they get the gradient.
        weights: (B,) of the pairs, at least 0 and finite; None: all equal. The loss is 0 if all are 0.
        precision: of products on NVIDIA GPUs: "float32", or "tf32" with an error of about 2⁻¹² of each factor.

    Returns:
        A float32 scalar (float64 for float64 features); ln N is the level of chance without identities.

    Raises:
        ValueError: shapes or dtypes are wrong, ``same`` is unknown, or ``smoothing`` is out of range.
    """
    check_features(image_features, text_features)
    if not 0 <= smoothing < 1 or (smoothing and identities is not None and same == "ignored"):
        raise ValueError(
            f"smoothing must be at least 0 and below 1, and 0 with same='ignored', not {smoothing}"
        )
    with torch.autocast(image_features.device.type, enabled=False):
        images, texts = at_least_float32(image_features), at_least_float32(text_features)
        batch = GlobalBatch(images, precision=precision)
        pairs = positive_pairs(batch, images, identities, same)
        wrong, has_negative = (
            (None, None) if negatives is None else (at_least_float32(negatives[0]), negatives[1])
        )
        all_texts = batch.gather(texts) if all_texts is None else all_texts
        scale = logit_scale.to(images.dtype)
        pair_weights = PairWeights.gather(batch, weights, images)
        loss: Tensor = _Contrastive.apply(
            images, all_texts, scale, wrong, has_negative, batch, pairs, smoothing, pair_weights
        )
        return loss


class _Contrastive(torch.autograd.Function):
    """Rows are this rank's images, columns the texts of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        images: Tensor,
        all_texts: Tensor,
        scale: Tensor,
        wrong: Tensor | None,
        has_negative: Tensor | None,
        batch: GlobalBatch,
        pairs: PositivePairs,
        smoothing: float,
        weights: PairWeights | None,
    ) -> Tensor:
        by_row = images.new_empty(2, len(images))
        columns = ColumnSums(len(all_texts), images)
        for tile, logits in compute_tiles(images, all_texts, scale, batch.precision):
            pairs.record_logits(logits, tile)
            pairs.fill_ignored(logits, tile, _NONE)
            by_row[:, tile] = row_sums(logits)
            columns.add(logits)
        by_column, _ = columns.combine_ranks()  # (2, N)
        logits_wrong = None
        if wrong is not None and has_negative is not None:
            logits_wrong = (scale * (images * wrong).sum(1)).masked_fill(~has_negative, _NONE)
            greatest = torch.maximum(by_row[0], logits_wrong)
            by_row[1].mul_((by_row[0] - greatest).exp()).add_((logits_wrong - greatest).exp())
            by_row[0] = greatest
        ctx.batch, ctx.pairs, ctx.smoothing, ctx.weights = batch, pairs, smoothing, weights
        text_sums = by_column[:, batch.local_rows]  # (2, B)
        targets = pairs.mean_targets()
        if smoothing:
            mean_image = sum_over_ranks(images.sum(0)) / batch.size
            # mean logits of row and column
            uniform = scale * (images @ all_texts.mean(0) + all_texts[batch.local_rows] @ mean_image)
            targets = torch.lerp(targets, uniform, smoothing)
        above = by_row[0] + text_sums[0] - targets
        losses = above + (by_row[1] * text_sums[1]).log()  # (B,)
        if weights is not None:
            losses.mul_(weights.rows)
            # softmax divides by these sums, so it is multiplied by the weights
            by_row[1].div_(weights.rows)
            by_column[1].div_(weights.columns)
        ctx.save_for_backward(images, all_texts, scale, by_row, by_column, wrong, logits_wrong)
        return batch.mean(losses) / 2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        images, all_texts, scale, by_row, by_column, wrong, logits_wrong = ctx.saved_tensors
        feature_gradients = FeatureGradients(ctx.batch, images, all_texts, scale, ctx.needs_input_grad[:3])
        rest = 1 - ctx.smoothing  # weight of the targets that are not spread
        for tile, logits in compute_tiles(images, all_texts, scale, ctx.batch.precision):
            ctx.pairs.fill_ignored(logits, tile, _NONE)
            slopes = sum_softmaxes(logits, by_row[:, tile], by_column)  # (R, N)
            if ctx.smoothing:
                spread = 2 * ctx.smoothing / ctx.batch.size
                slopes.sub_(spread if ctx.weights is None else spread * ctx.weights.mean(tile)).div_(rest)
            ctx.pairs.subtract_targets(slopes, tile, ctx.weights)
            feature_gradients.add(slopes, tile)
        factor = gradients[0] * ctx.batch.weight * rest / 2
        grad_images, grad_texts, grad_scale = feature_gradients.finish(factor)
        grad_wrong = None
        if wrong is not None:
            factor = gradients[0] * ctx.batch.weight / 2
            slopes = (logits_wrong - by_row[0]).exp() / by_row[1] * factor  # (B,)
            grad_scale = grad_scale + (slopes[:, None] * images * wrong).sum()
            slopes = (slopes * scale)[:, None]
            grad_wrong = slopes * images
            grad_images = None if grad_images is None else grad_images + slopes * wrong
        return grad_images, grad_texts, grad_scale, grad_wrong, None, None, None, None, None


class Clip(Objective):
    """CLIP's objective, see ``clip_loss``."""

    summary = "softmax over all pairs of the batch"
    tiled = True
    gathers_captions = True
    more_texts = True
    weighs_pairs = True

    def loss(self, outputs: Outputs, targets: Targets) -> Tensor:
        texts, negatives = split_negatives(outputs.texts, targets.negatives)
        return clip_loss(
            outputs.images,
            texts,
            outputs.scale,
            identities=targets.identities,
            same=targets.same,
            smoothing=targets.smoothing,
            negatives=negatives,
            all_texts=targets.all_texts,
            weights=targets.weights,
            precision=targets.precision,
        )

    def chance(self, targets: Targets, text_rows: int) -> float:
        """Return the mean of ln m over the pairs, each compared with m texts.

        m is N unless ``same`` is "ignored".
        """
        _, compared = count_alike(targets.identities, targets.same)
        return _mean_over_pairs(compared.log(), targets)

    def floor(self, targets: Targets, text_rows: int) -> float:
        """Return the mean entropy of the targets: without smoothing, of ln m for m pairs that are the same.

        It is the greatest lower bound of the loss, unless ``smoothing`` is combined with pairs A, B, C of which
        only A and B, and B and C are the same; then the bound is higher.
        """
        if targets.same == "ignored":
            return 0.0
        alike, compared = count_alike(targets.identities, targets.same)
        return _mean_over_pairs(target_entropy(alike, compared, targets.smoothing), targets)


def _mean_over_pairs(values: Tensor, targets: Targets) -> float:
    if targets.weights is not None:
        values = values * gather_weights(targets.weights, values)
    return values.mean().item()
