"""Predict the words of captions from images (Joulin et al. 2016, https://arxiv.org/abs/1511.02251).

This is the baseline of figure 2 in Radford et al. 2021. Letters: B rows of this rank, L tokens, V words, O
embedding dimension, R rows of a tile.
"""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from clipkit.distributed import sum_over_ranks
from clipkit.model.towers import at_least_float32, words_of
from clipkit.objectives import Targets
from clipkit.objectives.tiles import GlobalBatch, tile_height

__all__ = ["word_figures", "word_floor", "word_loss", "word_objective"]


def word_loss(
    image_features: Tensor,
    word_features: Tensor,
    logit_scale: Tensor,
    logit_bias: Tensor | None = None,
    *,
    tokens: Tensor,
) -> Tensor:
    """Compute the mean over all images and the distinct words of their captions of the softmax cross-entropy.

    Value and gradients on several ranks are as for ``clip_loss``. All ranks call it together. Logits are computed
    again in the backward pass, one tile of rows at a time.

    Args:
        image_features: (B, O) this rank's rows, unit norm. B may differ from rank to rank.
        word_features: (V, O) unit norm, the same on all ranks.
        logit_scale: scalar, exp(t).
        logit_bias: ignored, since it does not change softmax.
        tokens: (B, L) int64 captions, see ``BagOfWordsTower``.

    Returns:
        A float32 scalar (float64 for float64 features); ln V is the level of chance.
    """
    with torch.autocast(image_features.device.type, enabled=False):
        images, words = at_least_float32(image_features), at_least_float32(word_features)
        batch = GlobalBatch(images)
        targets = _distinct_words(tokens)

        def losses(images: Tensor, words: Tensor, scale: Tensor, targets: Tensor) -> Tensor:
            logits = scale * images @ words.T  # (R, V)
            counted = targets >= 0
            own = logits.gather(1, targets.clamp(min=0)).where(counted, 0).sum(1) / counted.sum(1)
            return logits.logsumexp(1) - own

        scale = logit_scale.to(images.dtype)
        height = tile_height(len(images), len(words))
        each = torch.cat(
            [
                checkpoint(losses, own, words, scale, wanted, use_reentrant=False, preserve_rng_state=False)
                for own, wanted in zip(images.split(height), targets.split(height), strict=True)
            ]
        )
        own = each.sum() * batch.weight  # the mean over ranks is the loss, and likewise for gradients
        return own + (batch.mean(each.detach()) - own.detach())


def _distinct_words(tokens: Tensor) -> Tensor:
    """Return (B, L) the words of each text, each once; -1 elsewhere."""
    ordered = tokens.masked_fill(~words_of(tokens), -1).sort(dim=1).values
    again = ordered[:, 1:] == ordered[:, :-1]
    ordered[:, 1:].masked_fill_(again, -1)
    return ordered


def word_objective(
    image_features: Tensor,
    word_features: Tensor,
    logit_scale: Tensor,
    logit_bias: Tensor | None = None,
    *,
    targets: Targets,
) -> Tensor:
    """Return ``word_loss`` of a batch."""
    return word_loss(image_features, word_features, logit_scale, tokens=targets.tokens)


def word_floor(targets: Targets, text_rows: int) -> float:
    """Return the mean of ln n over captions of n distinct words."""
    entropies = (_distinct_words(targets.tokens) >= 0).sum(1).clamp(min=1).double().log()
    total, count = sum_over_ranks(torch.stack([entropies.sum(), torch.ones_like(entropies).sum()])).tolist()
    return float(total / count)


@torch.no_grad()
def word_figures(image_features: Tensor, word_features: Tensor, targets: Targets) -> dict[str, float]:
    """Return the metric ``word_acc1``: the fraction of images whose most probable word is in their caption."""
    images, words = at_least_float32(image_features), at_least_float32(word_features)
    height = tile_height(len(images), len(words))
    best = torch.cat([(own @ words.T).argmax(1) for own in images.split(height)])  # (B,)
    right = (_distinct_words(targets.tokens) == best[:, None]).any(1)
    correct, count = sum_over_ranks(torch.stack([right.sum(), torch.ones_like(right).sum()])).tolist()
    return {"word_acc1": correct / count}
