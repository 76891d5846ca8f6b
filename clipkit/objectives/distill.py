"""Distillation within the global batch: the student learns the distribution of a teacher's similarities.

Letters: B rows of this rank, N rows of all ranks, O embedding dimension, P that of the teacher, R rows of a tile.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from clipkit.model.towers import at_least_float32
from clipkit.objectives.tiles import (
    ColumnSums,
    FeatureGradients,
    GlobalBatch,
    check_features,
    compute_tiles,
    row_sums,
    sum_softmaxes,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Teaching:
    """A teacher's features of one batch, in its own embedding dimension."""

    # (B, P)
    images: Tensor
    # (B, P) of the same pairs, or (C, P) of all classes
    texts: Tensor
    # exp(t)
    scale: Tensor
    # (B, 1 + K, D) of the images, see ``CLIP.image_tokens``
    tokens: Tensor | None = None


def distillation_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor,
    teacher_image_features: Tensor,
    teacher_text_features: Tensor,
    teacher_logit_scale: Tensor,
) -> Tensor:
    """Compute the Kullback–Leibler divergence from the teacher's softmax over the batch to the student's.

    The mean of two terms: over the N images, of their distributions over all texts, and over the N texts, of theirs
    over all images (MobileCLIP, Vasu et al. 2024, https://arxiv.org/abs/2311.17049). Value and gradients on several
    ranks are as for ``clip_loss``; the teacher gets no gradient. All ranks call it together.

    Args:
        image_features: (B, O) this rank's rows, unit norm. B may differ from rank to rank.
        text_features: (B, O) the matching rows.
        logit_scale: scalar, exp(t).
        teacher_image_features: (B, P) the teacher's features of the same images, unit norm.
        teacher_text_features: (B, P) of the same texts.
        teacher_logit_scale: scalar.

    Returns:
        A float32 scalar (float64 for float64 features of the student); 0 if both agree.

    Raises:
        ValueError: shapes are wrong.
    """
    check_features(image_features, text_features)
    check_features(teacher_image_features, teacher_text_features)
    if len(image_features) != len(teacher_image_features):
        raise ValueError(
            f"the teacher must have the student's {len(image_features)} rows, not {len(teacher_image_features)}"
        )
    with torch.autocast(image_features.device.type, enabled=False):
        images, texts = at_least_float32(image_features), at_least_float32(text_features)
        like = images.detach()
        teacher = (teacher_image_features, teacher_text_features, teacher_logit_scale)
        converted = [tensor.detach().to(like) for tensor in teacher]
        scale = logit_scale.to(images.dtype)
        batch = GlobalBatch(images)
        loss: Tensor = _Divergence.apply(images, batch.gather(texts), scale, *converted, batch)
        return loss


class _Divergence(torch.autograd.Function):
    """Rows are this rank's images, columns the texts of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        images: Tensor,
        all_texts: Tensor,
        scale: Tensor,
        teacher_images: Tensor,
        teacher_texts: Tensor,
        teacher_scale: Tensor,
        batch: GlobalBatch,
    ) -> Tensor:
        all_teacher_texts = batch.gather(teacher_texts)  # (N, P)
        by_row, teacher_by_row = images.new_empty(2, 2, len(images))
        row_means = images.new_empty(len(images))  # mean difference of the teacher's logits, by its softmax
        columns, teacher_columns = ColumnSums(batch.size, images), ColumnSums(batch.size, images, means=1)
        for (tile, logits), (_, teacher_logits) in zip(
            compute_tiles(images, all_texts, scale),
            compute_tiles(teacher_images, all_teacher_texts, teacher_scale),
            strict=True,
        ):
            by_row[:, tile], teacher_by_row[:, tile] = row_sums(logits), row_sums(teacher_logits)
            higher = teacher_logits - logits  # (R, N)
            columns.add(logits)
            weights = torch.sub(teacher_logits, teacher_by_row[0, tile, None], out=logits).exp_()
            row_means[tile] = weights.mul_(higher).sum(1) / teacher_by_row[1, tile]
            teacher_columns.add(teacher_logits, higher)
        by_column, _ = columns.combine_ranks()  # (2, N)
        teacher_by_column, (column_means,) = teacher_columns.combine_ranks()
        student = (images, all_texts, scale, by_row, by_column)
        teacher = (teacher_images, all_teacher_texts, teacher_scale, teacher_by_row, teacher_by_column)
        ctx.save_for_backward(*student, *teacher)
        ctx.batch = batch
        by_images = row_means + _logarithm(by_row) - _logarithm(teacher_by_row)
        by_texts = column_means + _logarithm(by_column) - _logarithm(teacher_by_column)
        return batch.mean(by_images + by_texts[batch.local_rows]) / 2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        student, teacher = ctx.saved_tensors[:5], ctx.saved_tensors[5:]
        images, all_texts, scale, by_row, by_column = student
        teacher_images, all_teacher_texts, teacher_scale, teacher_by_row, teacher_by_column = teacher
        feature_gradients = FeatureGradients(ctx.batch, images, all_texts, scale, ctx.needs_input_grad[:3])
        for (tile, logits), (_, teacher_logits) in zip(
            compute_tiles(images, all_texts, scale),
            compute_tiles(teacher_images, all_teacher_texts, teacher_scale),
            strict=True,
        ):
            slopes = sum_softmaxes(logits, by_row[:, tile], by_column)  # (R, N)
            slopes -= sum_softmaxes(teacher_logits, teacher_by_row[:, tile], teacher_by_column)
            feature_gradients.add(slopes, tile)
        return *feature_gradients.finish(gradients[0] * ctx.batch.weight / 2), None, None, None, None


def _logarithm(sums: Tensor) -> Tensor:
    return sums[0] + sums[1].log()
