"""The sigmoid loss of SigLIP over the global batch (Zhai et al. 2023, https://arxiv.org/abs/2303.15343).

Letters: B rows of this rank, N rows of all ranks, O embedding dimension, R rows of a tile, K identities of a pair.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from clipkit.model.towers import at_least_float32
from clipkit.objectives.base import Objective, Outputs, Targets
from clipkit.objectives.tiles import (
    FeatureGradients,
    GlobalBatch,
    PairWeights,
    PositivePairs,
    check_features,
    compute_tiles,
    count_alike,
    gather_weights,
    positive_pairs,
    split_negatives,
)

_NONE = -1e30  # a logit with sigmoid 0: neither loss nor gradient
_LINEAR = 40.0  # above which log(1 + exp(x)) equals x, also in float64


def siglip_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor,
    logit_bias: Tensor,
    *,
    identities: Tensor | None = None,
    same: str = "positives",
    negatives: tuple[Tensor, Tensor] | None = None,
    all_texts: Tensor | None = None,
    weights: Tensor | None = None,
    precision: str = "float32",
) -> Tensor:
    """Treat each image–text pair as an independent binary classification: do they belong together?

    The sum over all texts of −log σ(z · (scale · cosine + bias)), with z = 1 for an image's own text and −1 for the
    others, is averaged over the N images of the global batch. Value and gradients on several ranks are as for
    ``clip_loss``. All ranks call it together.

    With ``weights`` w the loss is Σ w_i (a_i + b_i) / 2 Σ w_i over the pairs i, where a_i is the sum over all
    texts for image i and b_i the sum over all images for text i: image i with text j has the mean weight of both
    pairs.

    Args:
        image_features: (B, O) this rank's rows, unit norm. B may differ from rank to rank.
        text_features: (B, O) the matching rows.
        logit_scale: scalar, exp(t); initially 10 in the paper.
        logit_bias: scalar; initially −10 in the paper.
        identities: (B, K) int64, as for ``clip_loss``: which pairs show the same thing.
        same: z of those: "positives" 1, "negatives" −1; "ignored": they are left out.
        negatives: as for ``clip_loss``: one more text of its image, with z = −1.
        all_texts: as for ``clip_loss``.
        weights: as for ``clip_loss``.
        precision: as for ``clip_loss``.

    Returns:
        A float32 scalar (float64 for float64 features).

    Raises:
        ValueError: shapes or dtypes are wrong, or ``same`` is unknown.
    """
    check_features(image_features, text_features)
    with torch.autocast(image_features.device.type, enabled=False):
        images, texts = at_least_float32(image_features), at_least_float32(text_features)
        scale, bias = logit_scale.to(images.dtype), logit_bias.to(images.dtype)
        batch = GlobalBatch(images, precision=precision)
        pairs = positive_pairs(batch, images, identities, same)
        all_texts = batch.gather(texts) if all_texts is None else all_texts
        differentiated = torch.is_grad_enabled()
        pair_weights = PairWeights.gather(batch, weights, images)
        loss: Tensor = _Sigmoid.apply(
            images, all_texts, scale, bias, batch, pairs, pair_weights, differentiated
        )
        if negatives is not None:
            wrong, has_negative = negatives
            logits = scale * (images * at_least_float32(wrong)).sum(1) + bias
            row_losses = F.softplus(logits, threshold=_LINEAR) * has_negative  # (B,)
            if pair_weights is not None:
                row_losses = row_losses * pair_weights.rows
            here = row_losses.sum() * batch.weight  # has the gradient, which ranks average
            loss = loss + batch.mean(row_losses.detach()) + (here - here.detach())
        return loss


class _Sigmoid(torch.autograd.Function):
    """Rows are this rank's images, columns the texts of all ranks.

    A logit's derivative depends on no other logit, so gradients are computed together with the value: three
    products of N × N × O, and nothing is computed again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        images: Tensor,
        all_texts: Tensor,
        scale: Tensor,
        bias: Tensor,
        batch: GlobalBatch,
        pairs: PositivePairs,
        weights: PairWeights | None,
        differentiated: bool,
    ) -> Tensor:
        row_losses = images.new_empty(len(images))
        grad_bias = torch.zeros_like(bias)
        feature_gradients = FeatureGradients(batch, images, all_texts, scale, ctx.needs_input_grad[:3])
        for tile, logits in compute_tiles(images, all_texts, scale, batch.precision):
            wrong = logits.add_(bias)  # (R, N) −z · logits
            pairs.negate_positives_(wrong, tile)
            pairs.fill_ignored(wrong, tile, _NONE)
            losses = F.softplus(wrong, threshold=_LINEAR)
            factors = None if weights is None else weights.mean(tile)  # (R, N)
            row_losses[tile] = (losses if factors is None else losses.mul_(factors)).sum(1)
            if differentiated:
                slopes = wrong.sigmoid_() if factors is None else wrong.sigmoid_().mul_(factors)
                pairs.negate_positives_(slopes, tile)
                grad_bias += slopes.sum()
                feature_gradients.add(slopes, tile)
        if differentiated:
            ctx.save_for_backward(*feature_gradients.finish(batch.weight), grad_bias.mul_(batch.weight))
        return batch.mean(row_losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        grad_inputs = [None if grad is None else grad * gradients[0] for grad in ctx.saved_tensors]
        return *grad_inputs, None, None, None, None


class SigLip(Objective):
    """SigLIP's objective, see ``siglip_loss``."""

    summary = "an independent binary classification of each image–text pair, with a bias"
    initial_scale = 10.0
    initial_bias = -10.0
    max_scale = math.inf
    tiled = True
    gathers_captions = True
    smooths = False
    more_texts = True
    weighs_pairs = True
    note = "the sigmoid loss starts near 10, above the level of chance, as its bias starts at -10"

    def loss(self, outputs: Outputs, targets: Targets) -> Tensor:
        images, texts, scale, bias = outputs
        assert bias is not None
        texts, negatives = split_negatives(texts, targets.negatives)
        return siglip_loss(
            images,
            texts,
            scale,
            bias,
            identities=targets.identities,
            same=targets.same,
            negatives=negatives,
            all_texts=targets.all_texts,
            weights=targets.weights,
            precision=targets.precision,
        )

    def chance(self, targets: Targets, text_rows: int) -> float:
        """Return M / N times the entropy of p, the fraction of positives among the M classifications of N images.

        A bias of logit(p) reaches it. The bias starts at −10, so the loss starts above this level.
        """
        alike, compared = count_alike(targets.identities, targets.same)
        if targets.same == "ignored":
            alike = torch.ones_like(alike)
        if targets.weights is not None:
            weights = gather_weights(targets.weights, compared)
            alike, compared = alike * weights, compared * weights
        positives, classified = alike.sum().item(), compared.sum().item()
        if not classified:  # all weights are 0
            return 0.0
        p = positives / classified
        return classified / len(alike) * sum(-q * math.log(q) for q in (p, 1 - p) if q > 0)
