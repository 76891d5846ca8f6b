"""The sigmoid loss of SigLIP over the global batch (Zhai et al. 2023, https://arxiv.org/abs/2303.15343).

Letters: B rows of this rank, N rows of all ranks, O embedding dimension, R rows of a tile, K identities of a pair.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from clipkit.loss_pairs import OwnPairs, Same, belonging
from clipkit.loss_tiles import FeatureGradients, GlobalBatch, at_least_float32, check_features, tiles

__all__ = ["siglip_loss"]

_CERTAIN = 1e30  # a logit that its sigmoid cannot tell from infinity: neither loss nor gradient


def siglip_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor,
    logit_bias: Tensor,
    *,
    identities: Tensor | None = None,
    same: Same = "positives",
) -> Tensor:
    """Every picture with every text is a question of its own: do they belong together?

    The sum over all texts of −log σ(z · (scale · cosine + bias)), z = 1 for a picture's own text and −1 for the
    others, is averaged over the N pictures of the global batch. Value and gradients hold on any number of ranks
    as those of ``clip_loss`` do. All ranks call it together.

    Args:
        image_features: (B, O) this rank's rows, unit norm. B may differ from rank to rank.
        text_features: (B, O) the matching rows.
        logit_scale: one number, exp(t); the paper begins with 10.
        logit_bias: one number; the paper begins with −10.
        identities: (B, K) int64, as for ``clip_loss``: which pairs show the same thing.
        same: z of those: "positives" 1, "ignored" none, they are left out.

    Returns:
        A float32 scalar (float64 for float64 features).

    Raises:
        ValueError: shapes or dtypes are not these.
    """
    check_features(image_features, text_features)
    with torch.autocast(image_features.device.type, enabled=False):
        images, texts = at_least_float32(image_features), at_least_float32(text_features)
        scale, bias = logit_scale.to(images.dtype), logit_bias.to(images.dtype)
        batch = GlobalBatch(images)
        pairs = belonging(batch, images, identities, same)
        loss: Tensor = _Sigmoid.apply(images, texts, scale, bias, batch, pairs)
        return loss


class _Sigmoid(torch.autograd.Function):
    """Rows are this rank's pictures, columns the texts of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        images: Tensor,
        texts: Tensor,
        scale: Tensor,
        bias: Tensor,
        batch: GlobalBatch,
        pairs: OwnPairs,
    ) -> Tensor:
        all_texts = batch.gather(texts)  # (N, O)
        of_rows = images.new_empty(len(images))
        for tile, logits in tiles(images * -scale, all_texts):
            signed = _signed(logits.sub_(bias), tile, pairs)
            of_rows[tile] = F.logsigmoid(signed).sum(1).neg_()
        ctx.save_for_backward(images, all_texts, scale, bias)
        ctx.batch, ctx.pairs = batch, pairs
        return batch.mean(of_rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        images, all_texts, scale, bias = ctx.saved_tensors
        found = FeatureGradients(ctx.batch, images, all_texts, scale, ctx.needs_input_grad[:3])
        of_bias = torch.zeros_like(bias)
        for tile, logits in tiles(images * -scale, all_texts):
            slopes = _signed(logits.sub_(bias), tile, ctx.pairs).neg_().sigmoid_()
            ctx.pairs.negate(slopes, tile)
            of_bias += slopes.sum()
            found.add(slopes, tile)
        factor = gradients[0] * ctx.batch.weight
        return *found.over_ranks(factor), of_bias * factor, None, None


def _signed(negative: Tensor, tile: slice, pairs: OwnPairs) -> Tensor:
    """z · logits of −logits, in place."""
    pairs.negate(negative, tile)
    pairs.leave_out(negative, tile, _CERTAIN)
    return negative
