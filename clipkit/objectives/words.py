"""Predict the words of captions from images (Joulin et al. 2016, https://arxiv.org/abs/1511.02251).

This is the baseline of figure 2 in Radford et al. 2021. Letters: B rows of this rank, L tokens, V words, O
embedding dimension, R rows of a tile.
"""

import math

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from clipkit.config import Config, require
from clipkit.model.towers import at_least_float32, mask_words, select_distinct, widest_dtype
from clipkit.objectives.base import Objective, Outputs, Targets
from clipkit.objectives.tiles import GlobalBatch, mean_over_rows, tile_height


class Words(Objective):
    """Prediction of the words of captions. The texts (V, O) are all words of ``model.text=words``."""

    summary = "predicts the words of captions, with model.text=words (CLIP's bag-of-words baseline)"
    texts_are_classes = True
    tiled = True
    uses_same = False
    smooths = False
    has_divergence = False

    def loss(self, outputs: Outputs, targets: Targets) -> Tensor:
        """Compute the mean over all images and the distinct words of their captions of the softmax cross-entropy.

        ln V is the level of chance. Logits are computed again in the backward pass, one tile of rows at a time.
        """
        with torch.autocast(outputs.images.device.type, enabled=False):
            images, words = at_least_float32(outputs.images), at_least_float32(outputs.texts)
            scale = outputs.scale.to(images.dtype)
            height = tile_height(len(images), len(words))
            tiles = zip(images.split(height), _distinct_words(targets.tokens).split(height), strict=True)
            losses = []
            for rows, distinct in tiles:
                tile = (rows, words, scale, distinct)
                losses.append(checkpoint(_tile_losses, *tile, use_reentrant=False, preserve_rng_state=False))
            return mean_over_rows(torch.cat(losses), images)

    @torch.no_grad()
    def figures(self, images: Tensor, texts: Tensor, targets: Targets) -> dict[str, float]:
        """Return the metric ``word_acc1``: the fraction of images whose most probable word is in their caption."""
        images, words = at_least_float32(images), at_least_float32(texts)
        height = tile_height(len(images), len(words))
        best = torch.cat([(rows @ words.T).argmax(1) for rows in images.split(height)])  # (B,)
        right = (_distinct_words(targets.tokens) == best[:, None]).any(1)
        return {"word_acc1": GlobalBatch(images).fraction(right)}

    def chance(self, targets: Targets, text_rows: int) -> float:
        """Return ln V."""
        return math.log(text_rows)

    def floor(self, targets: Targets, text_rows: int) -> float:
        """Return the mean of ln n over captions of n distinct words."""
        counts = (_distinct_words(targets.tokens) >= 0).sum(1).clamp(min=1)
        entropies = counts.to(widest_dtype(counts.device)).log()
        return GlobalBatch(entropies).mean(entropies).item()

    def check(self, config: Config) -> None:
        super().check(config)
        require(config.model.over_words, "loss.name", config.loss.name, "requires model.text=words")


def _tile_losses(images: Tensor, words: Tensor, scale: Tensor, targets: Tensor) -> Tensor:
    """Return (R,) losses of images (R, O) with the words (R, L) of their captions, -1 for none."""
    logits = scale * images @ words.T  # (R, V)
    counted = targets >= 0
    target_logits = logits.gather(1, targets.clamp(min=0)).where(counted, 0).sum(1) / counted.sum(1)
    return logits.logsumexp(1) - target_logits


def _distinct_words(tokens: Tensor) -> Tensor:
    """Return (B, L) the words of each text, each once; -1 elsewhere."""
    return select_distinct(tokens, mask_words(tokens))
