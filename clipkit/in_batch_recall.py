"""How often the nearest of the global batch is the right one, a figure to watch while training.

Letters: B rows of this rank, N rows of all ranks, O embedding dimension, R rows of a tile.
"""

import torch
from torch import Tensor

from clipkit.distributed import greatest_over_ranks, sum_over_ranks
from clipkit.loss_tiles import GlobalBatch, at_least_float32, check_features, tiles

__all__ = ["in_batch_recall"]

_ROUNDING = 8  # of the dtype's steps at 1: equal rows have products that differ by their place


@torch.no_grad()
def in_batch_recall(image_features: Tensor, text_features: Tensor) -> Tensor:
    """Which share of the batch's pictures have their own text as the nearest of all, and the same for texts.

    A tie (a lead below 8 steps of the dtype, 1e-6 in float32) counts as wrong, so that features that are all equal
    recall nothing. All ranks call it together. It costs one of the four products of ``clip_loss``.

    Args:
        image_features: (B, O) this rank's rows, unit norm. B may differ from rank to rank.
        text_features: (B, O) the matching rows.

    Returns:
        (2,) float32 (float64 for float64 features) in [0, 1], the same on all ranks: picture to text, text to
        picture. No gradient.

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
