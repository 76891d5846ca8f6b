"""Retrieval from the ranks of ``match_ranks``: recall among the first k, mean and median rank, and chance.

Letters in shape comments: Q queries.
"""

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from eval.metrics.intervals import (
    Estimate,
    Floats,
    Ints,
    bootstrap_interval,
    mean_estimate,
    mean_statistic,
    proportion,
    wilson_interval,
)

__all__ = [
    "DIRECTIONS",
    "Choices",
    "Direction",
    "Directions",
    "Winoground",
    "chance_of_recall",
    "jaccard_index",
    "mean_jaccard",
    "mean_rank",
    "median_rank",
    "pairwise_accuracy",
    "pairwise_correct",
    "recall_at_k",
    "winoground",
]


def recall_at_k(
    ranks: Tensor, k: int, weight: Tensor | None = None, *, cluster: Tensor | None = None
) -> Estimate:
    """R@k: the fraction of queries with a right candidate among the first k.

    One right candidate is enough, however many there are (Karpathy and Fei-Fei 2015, arXiv 1412.2306, and all
    CLIP papers). CLIP_benchmark's ``image_retrieval_recall@k`` and ``text_retrieval_recall@k`` name what is
    found. There a tie is settled in whatever order ``topk`` gives; here a wrong candidate goes first, so that a
    collapsed model finds nothing.

    Args:
        ranks: (Q,) int64 of ``match_ranks``, Q ≥ 1.
        k: at least 1.
        weight: (Q,) int64, how often each query stands in the list; once if not given.
        cluster: (Q,) int64, which queries go together, as the captions of one image do: the interval is then of
            a bootstrap over clusters, not Wilson's, which takes queries as independent and is too narrow for them.
    """
    copies = torch.ones_like(ranks) if weight is None else weight
    hits, n = int(copies[ranks < k].sum()), int(copies.sum())
    if cluster is None:
        return proportion(hits, n)
    _, index = np.unique(cluster.cpu().numpy(), return_inverse=True)
    each = copies.cpu().numpy()
    found = np.bincount(index, each * (ranks < k).cpu().numpy())
    cells, counts = np.unique(np.stack([found, np.bincount(index, each)]), axis=1, return_counts=True)
    if hits in (0, n):  # resamples would all be the same
        low, high = wilson_interval(hits * int(counts.sum()) / n, int(counts.sum()))
    else:
        low, high = bootstrap_interval(lambda drawn: drawn @ cells[0] / (drawn @ cells[1]), counts)
    return Estimate(value=hits / n, low=min(low, hits / n), high=max(high, hits / n), n=n)


def mean_rank(ranks: Tensor, weight: Tensor | None = None) -> Estimate:
    """The mean place of the first right candidate, 1 for the best; "MnR" in video papers.

    Args:
        ranks: (Q,) int64 of ``match_ranks`` (which count from 0), Q ≥ 1.
        weight: (Q,) int64, how often each query stands in the list; once if not given.

    Returns:
        At least 1, with a bootstrap interval.
    """
    places, counts = _places(ranks, weight)
    value = float(mean_statistic(places.astype(np.float64))(counts[None])[0])
    low, high = bootstrap_interval(mean_statistic(places.astype(np.float64)), counts)
    return Estimate(value=value, low=min(low, value), high=max(high, value), n=int(counts.sum()))


def median_rank(ranks: Tensor, weight: Tensor | None = None) -> Estimate:
    """The median place of the first right candidate, 1 for the best; "MdR" or "Med r" in papers.

    Between the two middle ones of an even number it is their mean, as in NumPy. (open_clip rounds it down.)

    Args:
        ranks: (Q,) int64 of ``match_ranks`` (which count from 0), Q ≥ 1.
        weight: (Q,) int64, how often each query stands in the list; once if not given.

    Returns:
        At least 1, with the exact interval between two places of the sorted list (by the binomial distribution;
        the whole list where it has fewer than 6 queries).
    """
    places, counts = _places(ranks, weight)
    n, upto = int(counts.sum()), counts.cumsum()

    def at(place: int) -> float:  # the place-th of the sorted list, from 0
        return float(places[np.searchsorted(upto, place, side="right")])

    value = (at((n - 1) // 2) + at(n // 2)) / 2
    outside = _binomial_tail(n)
    return Estimate(value=value, low=at(outside), high=at(n - 1 - outside), n=n)


def _places(ranks: Tensor, weight: Tensor | None) -> tuple[Ints, Ints]:
    """The places that there are, sorted and counted from 1, and how many queries have each."""
    places, index = np.unique(ranks.cpu().numpy() + 1, return_inverse=True)
    counts = np.bincount(index, None if weight is None else weight.cpu().numpy(), minlength=len(places))
    return places, counts.astype(np.int64)


def _binomial_tail(n: int) -> int:
    """How many of n can be left off each end of a sorted list, so that its median is outside in under 5%."""
    below = np.arange(n // 2 + 1, dtype=np.float64)
    steps = np.log((n - below[:-1]) / (below[:-1] + 1))
    log_chance = np.concatenate([[0.0], steps.cumsum()]) - n * math.log(
        2
    )  # of exactly so many, of n fair coins
    tail = np.exp(log_chance).cumsum()
    return int((tail <= 0.025).sum())


def chance_of_recall(right: Tensor, candidates: int, k: int) -> Tensor:
    """The probability that a random order of the candidates has a right one among its first k.

    Args:
        right: (Q,) int64, how many of the candidates are right for each query.
        candidates: how many there are.
        k: at least 1.

    Returns:
        (Q,) float64.
    """
    missed = torch.ones(len(right), dtype=torch.float64)
    for drawn in range(min(k, candidates)):
        missed *= (candidates - drawn - right.double()).clamp(min=0) / (candidates - drawn)
    return 1 - missed


# --------------------------------------------------------------------------------------------------------------
# Compositional understanding: captions that differ in the order of their words, and associations of images.
#
# A tie is counted as wrong everywhere: a model that cannot tell two captions apart has not understood one of
# them. So is a similarity that is not a number.
#
# Letters in shape comments: N cases, K wrong captions of a case, M candidates of all cases together.


@dataclass(frozen=True, kw_only=True)
class Winoground:
    """The three scores of Winoground; chance is 1/4, 1/4 and 1/6.

    Attributes:
        text: for both images, the own caption is the more similar one.
        image: for both captions, the own image is the more similar one.
        group: both.
    """

    text: Estimate
    image: Estimate
    group: Estimate


def winoground(similarity: Tensor) -> Winoground:
    """Text, image and group score (Thrush et al. 2022, arXiv 2204.03162).

    CLIP_benchmark's ``text_acc``, ``image_acc`` and ``acc`` are these but for ties: its ``argmax`` gives them to
    whatever stands first.

    Args:
        similarity: (N, 2, 2), of image i with caption j of each case; image i belongs to caption i. N ≥ 1.
    """
    own = similarity.diagonal(dim1=1, dim2=2)  # (N, 2)
    text = (own[:, 0] > similarity[:, 0, 1]) & (own[:, 1] > similarity[:, 1, 0])
    image = (own[:, 0] > similarity[:, 1, 0]) & (own[:, 1] > similarity[:, 0, 1])
    n = len(similarity)
    return Winoground(
        text=proportion(int(text.sum()), n),
        image=proportion(int(image.sum()), n),
        group=proportion(int((text & image).sum()), n),
    )


def pairwise_correct(right: Tensor, wrong: Tensor) -> Tensor:
    """Whether the right caption is more similar to its image than every wrong one.

    Args:
        right: (N,) similarity of the right caption.
        wrong: (N,) or (N, K) similarities of the wrong ones.

    Returns:
        (N,) bool.
    """
    wrong = wrong if wrong.ndim == 2 else wrong[:, None]
    return (right[:, None] > wrong).all(dim=1)


def pairwise_accuracy(right: Tensor, wrong: Tensor) -> Estimate:
    """The accuracy of SugarCrepe and ARO; chance is 1 in K + 1.

    SugarCrepe (Hsieh et al. 2023, arXiv 2306.14610) has one wrong caption and takes "more similar" strictly, as
    here. CLIP_benchmark's ``text_acc`` for it gives ties to the caption that stands first, the right one; its
    ``image_acc`` is of one image against itself and always 1. ARO (Yuksekgonul et al. 2023, arXiv 2210.01936) has
    one wrong caption (relation, attribution) or four (order): its own code gives ties to the wrong caption in the
    first two and to the right one in the order sets, where a short caption may come out of the shuffling unchanged.

    Args:
        right: (N,) similarity of the right caption, N ≥ 1.
        wrong: (N,) or (N, K) similarities of the wrong ones.
    """
    return proportion(int(pairwise_correct(right, wrong).sum()), len(right))


def jaccard_index(similarity: Tensor, right: Tensor, case: Tensor) -> Floats:
    """WinoGAViL's score of each case: how far the images picked for a cue are those that belong to it.

    The model picks as many candidates as are right, the most similar first, and gets the number of those picked
    that are right over the number of those that are either (Bitton et al. 2022, arXiv 2207.12576). DataComp's
    ``jaccard_score_5`` … ``_12`` are the means of cases with so many candidates.

    Args:
        similarity: (M,) of each candidate with the cue of its case.
        right: (M,) bool, whether it belongs to the cue; at least one of each case does.
        case: (M,) int64, the case of each candidate, in any order.

    Returns:
        (N,) float64 in 0 … 1, in the order of the cases' numbers.
    """
    belongs, number = right.bool().cpu().numpy(), case.cpu().numpy()
    score = similarity.double().cpu().numpy()
    score = np.where(np.isnan(score), np.where(belongs, -np.inf, np.inf), score)
    order = np.lexsort(
        (belongs, -score, number)
    )  # by case, the most similar first, wrong ones first among equals
    belongs = belongs[order]
    _, starts, index = np.unique(number[order], return_index=True, return_inverse=True)
    picks = np.bincount(index, belongs).astype(np.int64)
    assert picks.all(), "a case without a right candidate"
    picked = np.arange(len(index)) - starts[index] < picks[index]
    found = np.bincount(index, belongs & picked)
    result: Floats = found / (2 * picks - found)
    return result


def mean_jaccard(similarity: Tensor, right: Tensor, case: Tensor) -> Estimate:
    """The mean of ``jaccard_index`` over cases; ``avg_jaccard_score`` in DataComp, there with ties in any order."""
    return mean_estimate(torch.from_numpy(jaccard_index(similarity, right, case)))


# --------------------------------------------------------------------------------------------------------------
# What the metrics of the retrieval and compositional tasks are computed from.

DIRECTIONS = ("image_to_text", "text_to_image")


@dataclass(frozen=True, eq=False)
class Direction:
    """The results of Q queries.

    Attributes:
        ranks: (Q,) int64, the number of wrong candidates before the first right one.
        weight: (Q,) int64, how often each query counts.
        right: (Q,) int64, how many candidates are right.
        candidates: how many there are.
        cluster: (Q,) int64, queries of one cluster (captions of one image) are not independent; None if all are.
    """

    ranks: Tensor
    weight: Tensor
    right: Tensor
    candidates: int
    cluster: Tensor | None = None

    def recall(self, k: int) -> Estimate:
        """R@k."""
        return recall_at_k(self.ranks, k, self.weight, cluster=self.cluster)

    def chance(self, k: int) -> float:
        """R@k of candidates in random order."""
        each = chance_of_recall(self.right, self.candidates, k) * self.weight
        return float(each.sum() / self.weight.sum())


@dataclass(frozen=True, eq=False)
class Directions:
    """The results of retrieval in both directions."""

    image_to_text: Direction
    text_to_image: Direction

    def way(self, direction: str) -> Direction:
        """One of ``DIRECTIONS``."""
        return self.image_to_text if direction == "image_to_text" else self.text_to_image


@dataclass(frozen=True, kw_only=True, eq=False)
class Choices:
    """The results of choosing between captions; only the fields of the dataset's protocol are given.

    Attributes:
        chance: the fraction of right random choices.
        correct: (N,) bool, whether the right caption was chosen.
        groups: (G,) float64, the fraction of right choices in each group of images (such as a relation).
        counted_groups: those of the groups that ARO's authors count.
        winoground: the three scores of Winoground.
        jaccard: (I,) float64, WinoGAViL's index of each cue.
        jaccard_of_chance: (I,) float64, its mean over random choices.
        sizes: (I,) int64, the number of candidates of each cue.
    """

    chance: float | None = None
    correct: Tensor | None = None
    groups: Tensor | None = None
    counted_groups: Tensor | None = None
    winoground: Winoground | None = None
    jaccard: Tensor = field(default_factory=lambda: torch.empty(0))
    jaccard_of_chance: Tensor = field(default_factory=lambda: torch.empty(0))
    sizes: Tensor = field(default_factory=lambda: torch.empty(0))

    def cues_of(self, least: int, most: int) -> Tensor:
        """(I,) bool, the cues with this many candidates."""
        return (self.sizes >= least) & (self.sizes <= most)
