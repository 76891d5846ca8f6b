"""The symmetric contrastive cross-entropy (Radford et al. 2021, figure 3) over the global batch.

Of the N × N logits only some rows exist at a time: what softmax needs is summed up by row and by column while tiles
of rows come and go, and the backward pass computes each tile again (as FlashAttention does, Dao et al. 2022; for
this loss Cheng et al. 2024, https://arxiv.org/abs/2410.17243). So memory grows with N, not with its square.

Letters: B rows of this rank, N rows of all ranks, O embedding dimension, R rows of a tile.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from clipkit.distributed import (
    gather_rows,
    greatest_over_ranks,
    rank,
    scatter_sums_of_rows,
    sum_over_ranks,
    world_size,
)

__all__ = ["clip_loss"]

_TILE = 1 << 22  # logits that exist at a time


def clip_loss(image_features: Tensor, text_features: Tensor, logit_scale: Tensor) -> Tensor:
    """Symmetric cross-entropy of every picture against all texts and of every text against all pictures.

    The value is the loss of the global batch across the default process group, the same on all ranks. The
    gradient is such that the mean over ranks, which is what DistributedDataParallel takes, is the
    single-process gradient of the whole batch for every parameter, the temperature included. It can be
    differentiated once.

    Args:
        image_features: (B, O) this rank's rows, unit norm. B is the same on all ranks.
        text_features: (B, O) the matching rows.
        logit_scale: the scalar exp(t).

    Returns:
        A float32 scalar (float64 for float64 features); ln N is the level of chance.
    """
    if image_features.shape != text_features.shape or image_features.ndim != 2:
        raise ValueError(
            f"features must be two matrices of one shape, not {tuple(image_features.shape)} and "
            f"{tuple(text_features.shape)}"
        )
    with torch.autocast(image_features.device.type, enabled=False):
        images, texts = _at_least_float32(image_features), _at_least_float32(text_features)
        loss: Tensor = _Contrastive.apply(images, texts, logit_scale.to(images.dtype))
        return loss


class _Contrastive(torch.autograd.Function):
    """Rows are this rank's pictures, columns the texts of all ranks."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, texts: Tensor, scale: Tensor) -> Tensor:
        all_texts = gather_rows(texts)  # (N, O)
        by_row = images.new_empty(len(images))  # logarithms of sums of exponentials
        greatest = images.new_full((len(all_texts),), -torch.inf)
        totals = torch.zeros_like(greatest)  # of each column, over exp(greatest)
        for tile, cosines in _tiles(images, all_texts):
            logits = cosines.mul_(scale)  # (R, N)
            by_row[tile] = logits.logsumexp(1)
            before, greatest = greatest, torch.maximum(greatest, logits.amax(0))
            totals.mul_((before - greatest).exp_()).add_(logits.sub_(greatest).exp_().sum(0))
        overall = greatest_over_ranks(greatest)
        by_column = overall + sum_over_ranks(totals * (greatest - overall).exp_()).log_()  # (N,)
        ctx.save_for_backward(images, all_texts, scale, by_row, by_column)
        first = rank() * len(images)
        of_pairs = scale * (images * texts).sum(1)  # (B,)
        own = (by_row + by_column[first : first + len(images)]) / 2 - of_pairs
        return sum_over_ranks(own.mean()) / world_size()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        images, all_texts, scale, by_row, by_column = ctx.saved_tensors
        first = rank() * len(images)
        of_images, of_texts = torch.empty_like(images), torch.zeros_like(all_texts)
        of_scale = torch.zeros_like(scale)
        share = gradients[0] / (
            2 * len(images)
        )  # DistributedDataParallel divides by the number of ranks, too
        for tile, cosines in _tiles(images, all_texts):
            logits = cosines * scale
            slope = (logits - by_row[tile, None]).exp_()  # (R, N) softmax over texts,
            slope += logits.sub_(by_column).exp_()  # and over pictures
            slope.diagonal(first + tile.start).sub_(2)
            slope *= share
            of_scale += torch.dot(slope.view(-1), cosines.view(-1))
            slope *= scale
            torch.mm(slope, all_texts, out=of_images[tile])
            of_texts.addmm_(slope.T, images[tile])
        return of_images, scatter_sums_of_rows(of_texts), of_scale


def _tiles(images: Tensor, texts: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Slices of the rows and their products with all columns, (R, N), in memory that the next one takes over."""
    height = max(1, _TILE // max(1, len(texts)))
    memory = images.new_empty(min(height, len(images)), len(texts))
    for start in range(0, len(images), height):
        tile = slice(start, min(start + height, len(images)))
        yield tile, torch.mm(images[tile], texts.T, out=memory[: tile.stop - start])


def _at_least_float32(features: Tensor) -> Tensor:
    return features if features.dtype == torch.float64 else features.float()
