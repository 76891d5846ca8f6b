"""Whether one model is better than another beyond chance: paired tests on the same items.

Letters in shape comments: N items, R resamples.
"""

import math
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from eval.metrics.intervals import Floats, Ints, Statistic, mean_statistic, resamples

__all__ = ["Comparison", "compare_correct", "compare_means", "compare_statistics", "mcnemar"]

_RESAMPLES = 10_000  # the least p-value that a bootstrap can tell is 2 in one more


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The second model's metric minus the first's, on the same items.

    Attributes:
        difference: above 0 where the second is the greater.
        low: lower end of its 95% interval.
        high: upper end.
        p: how likely a difference at least as far from 0 is by chance alone, two-sided.
        n: items.
    """

    difference: float
    low: float
    high: float
    p: float
    n: int


def mcnemar(only_first: int, only_second: int) -> float:
    """The exact two-sided p-value of McNemar's test (1947): a fair coin for each item that one model has right.

    Args:
        only_first: items that only the first model has right.
        only_second: items that only the second model has right.
    """
    n, fewer = only_first + only_second, min(only_first, only_second)
    if 2 * fewer >= n:  # halves: both tails together are everything
        return 1.0
    below = np.arange(fewer, dtype=np.float64)
    steps = np.log((n - below) / (below + 1))
    log_chance = np.concatenate([[0.0], steps.cumsum()]) - n * math.log(2)  # of 0 … fewer heads
    return min(1.0, 2 * float(np.exp(log_chance).sum()))


def compare_correct(first: Tensor, second: Tensor) -> Comparison:
    """The difference of two accuracies (top-k, recall at k, pairwise …) on the same items, by McNemar's exact test.

    The interval is Bonett and Price's (2012, "Adjusted Wald confidence interval for a difference of binomial
    proportions based on paired data"), which keeps its width where the models hardly differ.

    Args:
        first: (N,) bool, what the first model has right, N ≥ 1.
        second: (N,) bool, what the second has right.
    """
    n = len(first)
    only_first, only_second = int((first & ~second).sum()), int((second & ~first).sum())
    less, more = (only_first + 1) / (n + 2), (only_second + 1) / (n + 2)
    half = 1.959963984540054 * math.sqrt((less + more - (more - less) ** 2) / (n + 2))
    return Comparison(
        difference=(only_second - only_first) / n,
        low=max(-1.0, more - less - half),
        high=min(1.0, more - less + half),
        p=mcnemar(only_first, only_second),
        n=n,
    )


def compare_means(first: Tensor, second: Tensor) -> Comparison:
    """The difference of two means of a value that every item has (Jaccard, rank …), by a paired bootstrap.

    Args:
        first: (N,) the first model's, N ≥ 1.
        second: (N,) the second model's.
    """
    some, counts = np.unique((second.double() - first.double()).cpu().numpy(), return_counts=True)
    return _compare(mean_statistic(some), counts, cost=1)


def compare_statistics(first: Statistic, second: Statistic, n: int, *, cost: int = 1) -> Comparison:
    """The difference of any ``Statistic`` (mean per class, mAP, ROC AUC, F1), by a paired bootstrap.

    Both models are measured on the same draws, so what makes an item hard for both is no difference. (Efron and
    Tibshirani 1993; for p, twice the smaller share of draws on either side of 0.)

    Args:
        first: of the first model, over the n items.
        second: of the second model, over the same items in the same order.
        n: items, at least 1.
        cost: see ``resamples``.
    """

    def difference(drawn: Ints) -> Floats:
        return second(drawn) - first(drawn)

    return _compare(difference, np.ones(n, dtype=np.int64), cost=cost)


def _compare(difference: Statistic, counts: Ints, *, cost: int) -> Comparison:
    value = float(difference(counts[None])[0])
    blocks = resamples(counts, cost=cost, number=_RESAMPLES)
    drawn = np.concatenate([difference(block) for block in blocks])
    drawn = drawn[~np.isnan(drawn)]
    low, high = np.percentile(drawn, [2.5, 97.5])
    beside = min(int((drawn <= 0).sum()), int((drawn >= 0).sum()))
    return Comparison(
        difference=value,
        low=min(float(low), value),
        high=max(float(high), value),
        p=min(1.0, 2 * (beside + 1) / (len(drawn) + 1)),
        n=int(counts.sum()),
    )
