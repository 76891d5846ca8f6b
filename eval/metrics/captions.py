"""Metrics of generated captions: CIDEr-D, BLEU-4, exact matches and perplexity.

For equal tokens, CIDEr-D and BLEU-4 equal COCO's evaluation code (pycocoevalcap). That code splits texts with
Stanford's PTBTokenizer, which needs Java; ``caption_tokens`` follows its main rules.

Dimensions: N images, R true captions of an image.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import chain
from operator import or_

import numpy as np
import regex

from eval.metrics.intervals import (
    Bools,
    Estimate,
    Floats,
    Ints,
    Statistic,
    estimate_mean,
    estimate_proportion,
    estimate_statistic,
)

_LETTER = r"[\p{L}\p{M}\p{N}_]"
_TOKEN = regex.compile(
    rf"{_LETTER}+?(?=n't(?!{_LETTER}))|n't(?!{_LETTER})|'(?:s|m|d|re|ve|ll)(?!{_LETTER})"  # contractions
    rf"|\p{{N}}+(?:[.,]\p{{N}}+)+|{_LETTER}+(?:-{_LETTER}+)*"  # numbers; words, also with hyphens
    r"|[^\s\p{P}]\p{M}*|[%&#*@/]"  # symbols
)
_LONGEST = 4  # n-grams
_HIGHEST = 10.0  # CIDEr-D
_SIGMA = 6.0  # of CIDEr-D's penalty for another length
# added to BLEU's numerators and denominators by pycocoevalcap
_TINY = 1e-15
_SMALL = 1e-9

Tokens = Sequence[str]


def caption_tokens(text: str) -> tuple[str, ...]:
    """Split a caption into lower-case tokens without punctuation.

    A token is a number such as 3.5, a word, also with hyphens, or a symbol. "don't" becomes "do" and "n't", "dog's"
    becomes "dog" and "'s". Other punctuation is left out, as in COCO's evaluation, which only keeps parentheses.
    """
    return tuple(_TOKEN.findall(text.lower().replace("’", "'")))


@dataclass(frozen=True, kw_only=True, eq=False)
class Descriptions:
    """Generated and true captions of N images as tokens, and the likelihood of the true ones.

    Attributes:
        generated: the generated caption of each image.
        captions: the true captions of each image, at least one.
        nll: (N,) float64, the sum of −log p of the tokens of an image's true captions.
        predicted: (N,) float64, the number of these tokens, with the end of each caption.
    """

    generated: Sequence[Tokens]
    captions: Sequence[Sequence[Tokens]]
    nll: Floats
    predicted: Floats

    @cached_property
    def bleu_counts(self) -> Floats:
        """(N, 10): see ``bleu_statistic``."""
        pairs = zip(self.generated, self.captions, strict=True)
        return np.array([_bleu_row(*pair) for pair in pairs], dtype=np.float64)

    @cached_property
    def cider(self) -> Floats:
        """(N,) CIDEr-D of each image."""
        return cider_d(self.generated, self.captions)

    @cached_property
    def exact(self) -> Bools:
        """(N,) whether the generated caption is one of the true ones."""
        pairs = zip(self.generated, self.captions, strict=True)
        return np.array([tuple(generated) in set(map(tuple, captions)) for generated, captions in pairs])

    @property
    def perplexity_counts(self) -> Floats:
        """(N, 2): see ``perplexity_statistic``."""
        return np.stack([self.nll, self.predicted], axis=1)

    @cached_property
    def chance(self) -> "Descriptions":
        """For each image a caption drawn from all captions of the dataset."""
        pool = list(chain.from_iterable(self.captions))
        drawn = np.random.Generator(np.random.Philox(0)).integers(len(pool), size=len(self.captions))
        return replace(self, generated=[pool[i] for i in drawn])

    @property
    def exact_chance(self) -> float:
        """The probability that a caption drawn from all captions of the dataset is one of the image's own."""
        copies = Counter(map(tuple, chain.from_iterable(self.captions)))
        hits = 0
        for captions in self.captions:
            hits += sum(copies[caption] for caption in set(map(tuple, captions)))
        return hits / (copies.total() * len(self.captions))


def _ngrams(tokens: Tokens) -> Iterator[tuple[str, ...]]:
    for n in range(1, _LONGEST + 1):
        for start in range(len(tokens) - n + 1):
            yield tuple(tokens[start : start + n])


def _bleu_row(generated: Tokens, captions: Sequence[Tokens]) -> list[int]:
    length = len(generated)
    closest = min(map(len, captions), key=lambda other: (abs(other - length), other))
    # the most of each n-gram in one caption
    most = reduce(or_, (Counter(_ngrams(caption)) for caption in captions))
    matches = [0] * _LONGEST
    for ngram, count in Counter(_ngrams(generated)).items():
        matches[len(ngram) - 1] += min(count, most[ngram])
    return [length, closest, *(max(0, length - n) for n in range(_LONGEST)), *matches]


def bleu_statistic(counts: Floats) -> Statistic:
    """Return BLEU-4 of a corpus (Papineni et al. 2002, https://aclanthology.org/P02-1040) as a statistic.

    Args:
        counts: (N, 10): the length of the generated caption, that of the true one with the closest length (the
            shorter of two), and for n-grams of 1 to 4 tokens how many there are, then how many match.
    """

    def statistic(drawn: Ints) -> Floats:
        total = drawn @ counts  # (R, 10)
        precision = (total[:, 6:] + _TINY) / (total[:, 2:6] + _SMALL)
        ratio = (total[:, 0] + _TINY) / (total[:, 1] + _SMALL)
        value: Floats = np.exp(np.log(precision).mean(axis=1) + np.minimum(0, 1 - 1 / ratio))
        return value

    return statistic


def cider_d(generated: Sequence[Tokens], captions: Sequence[Sequence[Tokens]]) -> Floats:
    """Compute CIDEr-D (Vedantam et al. 2015, https://arxiv.org/abs/1411.5726) of each image, (N,) from 0 to 10.

    Document frequencies are those of the true captions, so the values depend on the whole dataset, and those of a
    single image are 0. As in pycocoevalcap, the penalty compares numbers of bigrams.
    """
    documents: Counter[tuple[str, ...]] = Counter()
    for image_captions in captions:
        documents.update({ngram for caption in image_captions for ngram in _ngrams(caption)})
    images = math.log(len(captions))

    def weigh_ngrams(tokens: Tokens) -> tuple[dict[tuple[str, ...], float], list[float]]:
        """Return the weight of each n-gram, and the norm of the weights for each n."""
        weights = {}
        squares = [0.0] * _LONGEST
        for ngram, count in Counter(_ngrams(tokens)).items():
            weight = count * (images - math.log(max(1, documents[ngram])))
            weights[ngram] = weight
            squares[len(ngram) - 1] += weight**2
        return weights, list(map(math.sqrt, squares))

    values = []
    for description, image_captions in zip(generated, captions, strict=True):
        weights, norms = weigh_ngrams(description)
        total = 0.0
        for caption in image_captions:
            caption_weights, caption_norms = weigh_ngrams(caption)
            cosines = [0.0] * _LONGEST
            for ngram, weight in weights.items():
                other = caption_weights.get(ngram, 0.0)
                cosines[len(ngram) - 1] += min(weight, other) * other
            for n, (first, second) in enumerate(zip(norms, caption_norms, strict=True)):
                if first and second:
                    cosines[n] /= first * second
            apart = max(0, len(description) - 1) - max(0, len(caption) - 1)
            total += math.fsum(cosines) * math.exp(-(apart**2) / (2 * _SIGMA**2))
        values.append(_HIGHEST * total / (_LONGEST * len(image_captions)))
    return np.array(values)


def perplexity_statistic(counts: Floats) -> Statistic:
    """Return the perplexity of true captions, exp of the mean −log p of a token, as a statistic of the images.

    Args:
        counts: (N, 2), see ``Descriptions.nll`` and ``predicted``.
    """

    def statistic(drawn: Ints) -> Floats:
        total = drawn @ counts  # (R, 2)
        value: Floats = np.exp(total[:, 0] / total[:, 1])
        return value

    return statistic


def bleu_4(descriptions: Descriptions) -> Estimate:
    """Compute BLEU-4 of the corpus with a bootstrap interval over images."""
    return estimate_statistic(bleu_statistic(descriptions.bleu_counts), len(descriptions.captions))


def mean_cider_d(descriptions: Descriptions) -> Estimate:
    """Compute the mean CIDEr-D; its bootstrap interval takes the document frequencies as given."""
    tenth = estimate_mean(descriptions.cider / _HIGHEST)
    return Estimate(
        value=_HIGHEST * tenth.value, low=_HIGHEST * tenth.low, high=_HIGHEST * tenth.high, n=tenth.n
    )


def exact_match(descriptions: Descriptions) -> Estimate:
    """Compute the fraction of images whose caption is one of the true ones, compared by their tokens."""
    return estimate_proportion(int(descriptions.exact.sum()), len(descriptions.captions))


def perplexity(descriptions: Descriptions) -> Estimate:
    """Compute the perplexity of the true captions with a bootstrap interval over images."""
    statistic = perplexity_statistic(descriptions.perplexity_counts)
    return estimate_statistic(statistic, len(descriptions.captions))
