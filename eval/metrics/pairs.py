"""Metrics of retrieval (recall, mean and median rank), of choosing between captions, and of human judgments.

When choosing between captions, ties and NaN count as wrong.

Dimensions: Q queries, N images, K wrong captions, I items (pairs of images or cues), M candidates, G groups, R
judgments.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from clipkit.errors import ConfigError
from clipkit.inference import wilson_interval
from eval.metrics.graded import Judged
from eval.metrics.intervals import (
    Estimate,
    Floats,
    Ints,
    Statistic,
    bootstrap_interval,
    coin_probabilities,
    estimate_proportion,
    estimate_statistic,
    mean_statistic,
)

DIRECTIONS = ("image_to_text", "text_to_image")


def recall_at_k(
    ranks: Tensor, k: int, weight: Tensor | None = None, *, cluster: Tensor | None = None
) -> Estimate:
    """Compute R@k, the fraction of queries with a right candidate among the first k.

    One right candidate is enough (Karpathy and Fei-Fei 2015, arXiv 1412.2306, and all CLIP papers).
    CLIP_benchmark's ``image_retrieval_recall@k`` is text to image, and it orders ties arbitrarily; here wrong
    candidates come first, so a collapsed model finds nothing.

    Args:
        ranks: (Q,) int64 of ``match_ranks``, Q ≥ 1.
        k: at least 1.
        weight: (Q,) int64, the number of copies of each query; 1 by default.
        cluster: (Q,) int64, groups of dependent queries such as the captions of one image. The interval is then a
            bootstrap over clusters, because Wilson's assumes independence.
    """
    copies = torch.ones_like(ranks) if weight is None else weight
    hits = int(copies[ranks < k].sum())
    n = int(copies.sum())
    if cluster is None:
        return estimate_proportion(hits, n)
    _, index = np.unique(cluster.cpu().numpy(), return_inverse=True)
    each = copies.cpu().numpy()
    hits_of_cluster = np.bincount(index, each * (ranks < k).cpu().numpy())
    cells, counts = np.unique(
        np.stack([hits_of_cluster, np.bincount(index, each)]), axis=1, return_counts=True
    )
    if hits in (0, n):  # all resamples would be equal
        low, high = wilson_interval(hits * int(counts.sum()) / n, int(counts.sum()))
    else:
        low, high = bootstrap_interval(lambda drawn: drawn @ cells[0] / (drawn @ cells[1]), counts)
    return Estimate(value=hits / n, low=min(low, hits / n), high=max(high, hits / n), n=n)


def mean_rank(ranks: Tensor, weight: Tensor | None = None) -> Estimate:
    """Compute the mean rank, from 1, of the first right candidate ("MnR"), with a bootstrap interval.

    Args:
        ranks: (Q,) int64 of ``match_ranks``, from 0; Q ≥ 1.
        weight: (Q,) int64, the number of copies of each query; 1 by default.
    """
    distinct, counts = _count_ranks(ranks, weight)
    statistic = mean_statistic(distinct.astype(np.float64))
    value = float(statistic(counts[None])[0])
    low, high = bootstrap_interval(statistic, counts)
    return Estimate(value=value, low=min(low, value), high=max(high, value), n=int(counts.sum()))


def median_rank(ranks: Tensor, weight: Tensor | None = None) -> Estimate:
    """Compute the median rank, from 1, of the first right candidate ("MdR").

    The mean of the two middle ranks of an even number, as in NumPy; open_clip rounds down. The interval is the
    exact one between two order statistics; the whole range for fewer than 6 queries.

    Args:
        ranks: (Q,) int64 of ``match_ranks``, from 0; Q ≥ 1.
        weight: (Q,) int64, the number of copies of each query; 1 by default.
    """
    distinct, counts = _count_ranks(ranks, weight)
    n = int(counts.sum())
    cumulative = counts.cumsum()

    def order_statistic(i: int) -> float:
        return float(distinct[np.searchsorted(cumulative, i, side="right")])

    value = (order_statistic((n - 1) // 2) + order_statistic(n // 2)) / 2
    # the number of order statistics outside the interval at each end
    outside = int((coin_probabilities(n, n // 2).cumsum() <= 0.025).sum())
    low = order_statistic(outside)
    return Estimate(value=value, low=low, high=order_statistic(n - 1 - outside), n=n)


def _count_ranks(ranks: Tensor, weight: Tensor | None) -> tuple[Ints, Ints]:
    """Return the distinct ranks, sorted and from 1, and the number of queries of each."""
    distinct, index = np.unique(ranks.cpu().numpy() + 1, return_inverse=True)
    counts = np.bincount(index, None if weight is None else weight.cpu().numpy(), minlength=len(distinct))
    return distinct, counts.astype(np.int64)


def chance_of_recall(right: Tensor, candidates: int, k: int) -> Tensor:
    """Return the probability that k candidates drawn at random include a right one, (Q,) float64.

    Args:
        right: (Q,) int64, the number of right candidates of each query.
        k: at least 1.
    """
    missed = torch.ones(len(right), dtype=torch.float64)
    for drawn in range(min(k, candidates)):
        missed *= (candidates - drawn - right.double()).clamp(min=0) / (candidates - drawn)
    return 1 - missed


@dataclass(frozen=True, eq=False)
class Direction:
    """The results of Q queries in one direction.

    Attributes:
        ranks: (Q,) int64, the number of wrong candidates before the first right one.
        weight: (Q,) int64, the number of copies of each query.
        right: (Q,) int64, the number of right candidates.
        candidates: number of candidates.
        image: (Q,) int64, the image of each query, or its first one.
        judge: ranks all right candidates of each query, in which copies do not count.
        independent: whether no two queries are captions of one image.
    """

    ranks: Tensor
    weight: Tensor
    right: Tensor
    candidates: int
    image: Tensor
    judge: Callable[[], Judged]
    independent: bool = True

    @cached_property
    def judged(self) -> Judged:
        """The ranks of all right candidates."""
        return self.judge()

    def recall(self, k: int) -> Estimate:
        return recall_at_k(self.ranks, k, self.weight, cluster=None if self.independent else self.image)

    def chance(self, k: int) -> float:
        """Return R@k of candidates in random order."""
        each = chance_of_recall(self.right, self.candidates, k) * self.weight
        return float(each.sum() / self.weight.sum())


def mean_recall_items(image_to_text: Direction, text_to_image: Direction, ks: Sequence[int]) -> Tensor:
    """Return the part of each image in ``mean_recall_statistic``, (N, 3) float64.

    The columns are, as means over k: whether a caption of the image is among the first k; for how many of its
    captions it is among the first k; and the number of its captions.
    """
    columns = []
    for direction in (image_to_text, text_to_image):
        hits = torch.stack([direction.ranks < k for k in ks]).double().mean(dim=0) * direction.weight  # (Q,)
        zeros = torch.zeros(len(image_to_text.ranks), dtype=torch.float64)
        columns.append(zeros.index_add(0, direction.image, hits))
    columns.append(zeros.index_add(0, text_to_image.image, text_to_image.weight.double()))
    return torch.stack(columns, dim=1)


def mean_recall_statistic(items: Tensor) -> Statistic:
    """Return the mean of recalls in both directions as a statistic of the drawn images, with their captions.

    Args:
        items: (N, 3) of ``mean_recall_items``.
    """
    images, captions, counts = items.double().numpy().T

    def mean(drawn: Ints) -> Floats:
        total = drawn @ counts
        caption_recall = np.divide(drawn @ captions, total, out=np.full(len(drawn), np.nan), where=total > 0)
        result: Floats = (drawn @ images / drawn.sum(axis=1) + caption_recall) / 2
        return result

    return mean


@dataclass(frozen=True, kw_only=True)
class Winoground:
    """Winoground's three scores.

    Attributes:
        text: each image is more similar to its own caption; chance is 1/4.
        image: each caption is more similar to its own image; chance is 1/4.
        group: both; chance is 1/6.
    """

    text: Estimate
    image: Estimate
    group: Estimate


def score_winoground(similarity: Tensor) -> Winoground:
    """Compute text, image and group score (Thrush et al. 2022, arXiv 2204.03162).

    CLIP_benchmark's ``text_acc``, ``image_acc`` and ``acc``, which resolve ties by position.

    Args:
        similarity: (I, 2, 2) of image i with caption j of each pair, I ≥ 1; image i belongs to caption i.
    """
    own = similarity.diagonal(dim1=1, dim2=2)  # (I, 2)
    text = (own[:, 0] > similarity[:, 0, 1]) & (own[:, 1] > similarity[:, 1, 0])
    image = (own[:, 0] > similarity[:, 1, 0]) & (own[:, 1] > similarity[:, 0, 1])
    n = len(similarity)
    return Winoground(
        text=estimate_proportion(int(text.sum()), n),
        image=estimate_proportion(int(image.sum()), n),
        group=estimate_proportion(int((text & image).sum()), n),
    )


def pairwise_correct(right: Tensor, wrong: Tensor) -> Tensor:
    """Return whether the right caption is more similar to its image than every wrong one, (N,) bool.

    Its mean is the accuracy of SugarCrepe (Hsieh et al. 2023, arXiv 2306.14610) and ARO (Yuksekgonul et al. 2023,
    arXiv 2210.01936). Ties differ: CLIP_benchmark's ``text_acc`` and ARO's order sets give them to the right
    caption, ARO's relation and attribution to the wrong one, as here.

    Args:
        right: (N,) similarity of each image with its right caption.
        wrong: (N, K) with its wrong captions.
    """
    return (right[:, None] > wrong).all(dim=1)


def jaccard_index(similarity: Tensor, right: Tensor, case: Tensor) -> Floats:
    """Compute WinoGAViL's score of each cue (Bitton et al. 2022, arXiv 2207.12576), (I,) float64 in 0 … 1.

    The model picks as many candidates as are right, the most similar first; the score is the number of right picks
    divided by the number of candidates that are right or picked.

    Args:
        similarity: (M,) of each candidate with its cue.
        right: (M,) bool, whether it belongs to the cue; at least one of each cue does.
        case: (M,) int64, the cue of each candidate, in any order. The result is sorted by it.
    """
    belongs = right.bool().cpu().numpy()
    cue = case.cpu().numpy()
    score = similarity.double().cpu().numpy()
    score = np.where(np.isnan(score), np.where(belongs, -np.inf, np.inf), score)
    order = np.lexsort((belongs, -score, cue))  # by cue, similarity, and wrong before right
    belongs = belongs[order]
    _, starts, index = np.unique(cue[order], return_index=True, return_inverse=True)
    picks = np.bincount(index, belongs).astype(np.int64)
    assert picks.all(), "a cue without a right candidate"
    picked = np.arange(len(index)) - starts[index] < picks[index]
    hits = np.bincount(index, belongs & picked)
    result: Floats = hits / (2 * picks - hits)
    return result


@dataclass(frozen=True, kw_only=True, eq=False)
class Choices:
    """The results of choosing between captions; only the fields of the dataset's protocol are set.

    Attributes:
        chance: accuracy of random choices.
        correct: (N,) bool, whether the right caption was chosen.
        groups: (G,) float64, accuracy in each group of images (such as a relation).
        counted_groups: the part of ``groups`` that ARO's authors count.
        winoground: Winoground's scores.
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

    def select_cues(self, least: int, most: int) -> Tensor:
        """Return which cues have ``least`` to ``most`` candidates, (I,) bool."""
        return (self.sizes >= least) & (self.sizes <= most)


@dataclass(frozen=True, kw_only=True, eq=False)
class Judgments:
    """Human judgments of captions: (R,) float64 similarity and rating, and (R,) int64 image of each judgment."""

    similarity: Tensor
    rating: Tensor
    image: Tensor


def kendall_tau(judgments: Judgments, variant: Literal["b", "c"]) -> Estimate:
    """Compute the rank correlation of similarities and ratings, NaN if all of either are equal.

    The interval is a bootstrap over images, because the judgments of one image are dependent.
    """
    try:
        from scipy.stats import kendalltau
    except ModuleNotFoundError as error:
        raise ConfigError("the task judgments requires scipy: pip install -e '.[eval]'") from error
    similarity = judgments.similarity.numpy()
    rating = judgments.rating.numpy()
    _, image = np.unique(judgments.image.numpy(), return_inverse=True)

    def statistic(drawn: Ints) -> Floats:
        values = []
        for counts in drawn:
            rows = np.repeat(np.arange(len(image)), counts[image])
            values.append(kendalltau(similarity[rows], rating[rows], variant=variant).statistic)
        return np.array(values)

    images = int(image.max()) + 1
    return replace(estimate_statistic(statistic, images, cost=len(image)), n=len(image))
