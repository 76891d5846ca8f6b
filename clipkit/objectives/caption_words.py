"""The term that classifies images by the words of their captions (SuperCLIP, https://arxiv.org/abs/2512.14480).

Letters: B rows of this rank, L tokens, V tokens of the vocabulary, W words that are predicted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clipkit.cli import setting
from clipkit.config import ModelConfig, at_least
from clipkit.distributed import sum_over_ranks
from clipkit.errors import ConfigError
from clipkit.model.architectures import Architecture
from clipkit.model.clip import CLIP
from clipkit.model.towers import widest_dtype
from clipkit.objectives.base import Term, TermBatch, after_setting, weight_setting

# (V + 1,) int64: how many captions so far had each token, and how many captions there were
_FREQUENCIES = "words.frequencies"
# (V,) int64: the number of each token among the predicted words, in the order of occurrence; -1: not predicted
_NUMBERS = "words.numbers"


@dataclass(frozen=True, kw_only=True)
class CaptionWords(Term):
    """Predict the words of captions from images, in addition to ``loss.name`` (SuperCLIP).

    A linear layer over the vocabulary classifies the feature of an image; rare words count more. The term is the
    mean over images of the cross-entropy. See clipkit/objectives/caption_words.py.
    """

    section = "words."
    stream = 5
    reads_features = True
    reads_words = True
    reads_images = False
    trains_image_tower = True

    weight: float = weight_setting("0: none; SuperCLIP: 1")
    vocabulary: int = setting(
        0,
        "Number of different words that are predicted, those that occur first in the training; 0: as many as the "
        "vocabulary has tokens. For small models and few different words, a step takes less time with 2048.",
        at_least(0),
        needs="weight",
    )
    after: int = after_setting()

    def heads(self, shape: Architecture, model: ModelConfig) -> dict[str, Any]:
        vocabulary = shape.text.vocab_size
        if not vocabulary or shape.text.over_classes:
            raise ConfigError(
                f"words.weight = {self.weight} requires a text tower with a vocabulary, not that of {model.label}"
            )
        return {"words": min(self.vocabulary or vocabulary, vocabulary)}

    def create_state(self, shape: Architecture) -> dict[str, Tensor]:
        vocabulary = shape.text.vocab_size
        return {
            _FREQUENCIES: torch.zeros(vocabulary + 1, dtype=torch.int64),
            _NUMBERS: torch.full((vocabulary,), -1),
        }

    def inputs(self, draw: TermBatch) -> tuple[dict[str, Any], int]:
        """Return the arguments of ``CaptionWordHead.sum_losses`` and the number of images.

        The probability of a word is proportional to ln((N + 1) / (1 + n)), its inverse frequency in the N captions
        so far, of which n have it, those of this step included. So SuperCLIP's code computes it; the paper's
        ln(N / (1 + n)) would be negative for a word of all captions. A caption without words counts as 0.
        """
        words = draw.batch.words
        assert words is not None and draw.shape.words is not None
        tensors = draw.state.tensors
        vocabulary = len(tensors[_NUMBERS])
        counts = torch.zeros_like(tensors[_FREQUENCIES])
        counts.index_add_(0, words.where(words >= 0, vocabulary).flatten(), torch.ones_like(words).flatten())
        counts[vocabulary] = len(words)
        counts = sum_over_ranks(counts)
        frequencies = tensors[_FREQUENCIES] + counts
        draw.state.propose(_FREQUENCIES, frequencies)

        # the tokens that occur for the first time get the next numbers, as long as there are any
        numbers = tensors[_NUMBERS]
        is_new = (counts[:vocabulary] > 0) & (numbers < 0)
        numbers = torch.where(is_new, (numbers >= 0).sum() + is_new.cumsum(0) - 1, numbers)
        numbers = numbers.where(numbers < draw.shape.words, -1)
        draw.state.propose(_NUMBERS, numbers)

        logarithms = (frequencies + 1).to(widest_dtype(words.device)).log()
        rarity = logarithms[vocabulary] - logarithms[:vocabulary]
        targets = numbers[words.clamp(min=0)].where(words >= 0, -1)  # (B, L)
        weights = rarity[words.clamp(min=0)].where(targets >= 0, 0.0)
        weights /= weights.sum(dim=1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
        return {"words": targets.clamp(min=0), "weights": weights}, len(words)

    def total(self, model: CLIP, images: Tensor, tokens: Sequence[Tensor], **inputs: Any) -> Tensor:
        assert model.words_head is not None
        return model.words_head.sum_losses(**inputs)
