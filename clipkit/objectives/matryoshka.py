"""Train prefixes of the embedding to be embeddings of their own (Matryoshka; Kusupati et al. 2022,
https://arxiv.org/abs/2205.13147).

Letters: B rows of this rank, C rows of texts or classes, O embedding dimension.
"""

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor

__all__ = ["with_prefixes"]


def with_prefixes(
    loss: Callable[..., Tensor], dims: Sequence[int], weights: Sequence[float] = ()
) -> Callable[..., Tensor]:
    """Return the weighted mean of ``loss`` over prefixes of the features and the whole features.

    Args:
        loss: a function of image features (B, O), text features (C, O) and scalars.
        dims: sizes of the prefixes, which are normalized again; temperature and bias are shared.
        weights: weight of each prefix and of the whole; empty for equal weights.
    """
    weights = weights or [1.0] * (len(dims) + 1)

    def mean(images: Tensor, texts: Tensor, *scalars: Tensor) -> Tensor:
        total = weights[-1] * loss(images, texts, *scalars)
        for size, weight in zip(dims, weights, strict=False):
            prefixes = (F.normalize(features[:, :size], dim=-1) for features in (images, texts))
            total = total + weight * loss(*prefixes, *scalars)
        return total / sum(weights)

    return mean
