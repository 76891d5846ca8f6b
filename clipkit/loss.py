"""The symmetric contrastive cross-entropy (Radford et al. 2021, figure 3) over the global batch.

Letters: B rows of this rank, N rows of all ranks, O embedding dimension.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from clipkit.distributed import all_gather_rows, mean_over_ranks, rank

__all__ = ["clip_loss"]


def clip_loss(image_features: Tensor, text_features: Tensor, logit_scale: Tensor) -> Tensor:
    """Symmetric cross-entropy of every picture against all texts and of every text against all pictures.

    The value is the loss of the global batch across the default process group, the same on all ranks. The
    gradient is such that the mean over ranks, which is what DistributedDataParallel takes, is the
    single-process gradient of the whole batch for every parameter, the temperature included.

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
        scale = logit_scale.to(images.dtype)
        all_images, all_texts = all_gather_rows(images), all_gather_rows(texts)  # (N, O)
        own = torch.arange(len(images), device=images.device) + rank() * len(
            images
        )  # (B,) columns of our pairs
        logits_per_image = scale * images @ all_texts.T  # (B, N)
        # in a world of one the other half is the transpose, at no second product
        alone = all_images is images
        logits_per_text = logits_per_image.T if alone else scale * texts @ all_images.T
        loss = (F.cross_entropy(logits_per_image, own) + F.cross_entropy(logits_per_text, own)) / 2
        return mean_over_ranks(loss)


def _at_least_float32(features: Tensor) -> Tensor:
    return features if features.dtype == torch.float64 else features.float()
