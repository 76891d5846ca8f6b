"""Values with 95% intervals, and paired tests of two models.

A proportion has Wilson's interval. Any other metric is a ``Statistic``, a function of how often each item was
drawn: its value uses every item once, its interval is a seeded bootstrap (Efron 1979), and two models are compared
on the same draws.

Dimensions: N items, R resamples.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clipkit.inference import wilson_interval

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

# (R, N) how often each item was drawn → (R,); NaN where the metric is undefined
Statistic = Callable[[Ints], Floats]

_TAIL = 0.025  # on each side of a 95% interval
_RESAMPLES = 1000
_PAIRED_RESAMPLES = 10_000  # the smallest p-value of a paired bootstrap is 2 / 10,001
_FEWEST = 100
_DRAWN = 1 << 21  # draws held at a time: 16 MiB, plus a few arrays of that size
_MOST_DRAWN = 1 << 27  # draws in total: large datasets get fewer resamples, which then vary less


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A measured value, its 95% interval, and the number of items that it was measured on."""

    value: float
    low: float
    high: float
    n: int


def estimate_proportion(hits: int, n: int) -> Estimate:
    """Estimate ``hits / n`` with Wilson's interval; n ≥ 1."""
    low, high = wilson_interval(hits, n)
    return Estimate(value=hits / n, low=low, high=high, n=n)


def draw_resamples(counts: Ints, *, cost: int = 1, most: int | None = None) -> Iterator[Ints]:
    """Draw as many items as there are, with replacement; the same arguments give the same draws.

    Args:
        counts: (N,) int64, the number of identical items of each kind.
        cost: how often each draw is processed, such as once per class.
        most: number of resamples, 1,000 by default; reduced, down to 100, for large datasets.

    Yields:
        (≤ R, N) int64, how often each kind was drawn, for a block of resamples.
    """
    most = most or _RESAMPLES
    kinds = len(counts)
    n = int(counts.sum())
    total = max(min(_FEWEST, most), min(most, _MOST_DRAWN // (kinds * cost)))
    rows = max(1, _DRAWN // kinds)
    random = np.random.Generator(np.random.Philox(0))
    distinct = n == kinds and bool((counts == 1).all())
    for start in range(0, total, rows):
        size = min(rows, total - start)
        if distinct:
            drawn = random.integers(kinds, size=(size, kinds)) + np.arange(size)[:, None] * kinds
            yield np.bincount(drawn.ravel(), minlength=size * kinds).reshape(size, kinds)
        else:
            yield random.multinomial(n, counts / n, size=size)


def evaluate_statistic(statistic: Statistic, n: int) -> float:
    """Evaluate a statistic on ``n`` items, each drawn once."""
    return float(statistic(np.ones((1, n), dtype=np.int64))[0])


def bootstrap_interval(statistic: Statistic, counts: Ints, *, cost: int = 1) -> tuple[float, float]:
    """Compute the 2.5% and 97.5% percentiles over the ``resamples`` for which the statistic is defined."""
    values = np.concatenate([statistic(drawn) for drawn in draw_resamples(counts, cost=cost)])
    values = values[~np.isnan(values)]
    if not len(values):
        return math.nan, math.nan
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def estimate_statistic(statistic: Statistic, n: int, *, trials: float = 0.0, cost: int = 1) -> Estimate:
    """Estimate a statistic of ``n`` ≥ 1 items with a bootstrap interval.

    Args:
        trials: for values in 0 … 1, the number of Bernoulli trials of about the same variance. Each end is then the
            wider of the bootstrap's and Wilson's, because the bootstrap of an all-correct model has no width.
    """
    value = evaluate_statistic(statistic, n)
    low, high = bootstrap_interval(statistic, np.ones(n, dtype=np.int64), cost=cost)
    if trials > 0:
        wilson = wilson_interval(min(max(value, 0.0), 1.0) * trials, trials)
        low = min(low, wilson[0])
        high = max(high, wilson[1])
    return Estimate(value=value, low=min(low, value), high=max(high, value), n=n)


def mean_statistic(values: Tensor | Floats) -> Statistic:
    """Return the mean of (N,) values as a statistic."""
    array = np.asarray(values, dtype=np.float64)

    def mean(drawn: Ints) -> Floats:
        result: Floats = drawn @ array / drawn.sum(axis=1)
        return result

    return mean


def estimate_mean(values: Tensor | Floats) -> Estimate:
    """Estimate the mean of (N,) values in 0 … 1, N ≥ 1: bootstrap, or Wilson's interval if all are equal."""
    array = np.asarray(values, dtype=np.float64)
    distinct, counts = np.unique(array, return_counts=True)
    mean = float(array.mean())
    n = len(array)
    if len(distinct) == 1:
        low, high = wilson_interval(mean * n, n)
    else:
        low, high = bootstrap_interval(mean_statistic(distinct), counts)
    return Estimate(value=mean, low=low, high=high, n=n)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The second model's metric minus the first's on the same ``n`` items: 95% interval and two-sided p-value.

    The interval of one of several ``tests`` is wider: with a probability of at least 95%, all of them contain their
    differences (Bonferroni), whichever is looked at. The p-value is of one test.
    """

    difference: float
    low: float
    high: float
    p: float
    n: int


def coin_probabilities(n: int, most: int) -> Floats:
    """Return the probabilities of 0 … ``most`` heads in ``n`` flips of a fair coin, (most + 1,)."""
    below = np.arange(most, dtype=np.float64)
    steps = np.log((n - below) / (below + 1))
    result: Floats = np.exp(np.concatenate([[0.0], steps.cumsum()]) - n * math.log(2))
    return result


def mcnemar(only_first: int, only_second: int) -> float:
    """Compute the exact two-sided p-value of McNemar's test (1947) from the items that one model has right."""
    n = only_first + only_second
    fewer = min(only_first, only_second)
    if 2 * fewer >= n:  # the two tails overlap
        return 1.0
    return min(1.0, 2 * float(coin_probabilities(n, fewer).sum()))


def compare_correct(first: Tensor, second: Tensor, *, tests: int = 1) -> Comparison:
    """Compare two accuracies (top-k, recall at k, pairwise …) on the same items by McNemar's exact test.

    The interval is Bonett and Price's (2012, "Adjusted Wald confidence interval for a difference of binomial
    proportions based on paired data"), which keeps its width when the models hardly differ.

    Args:
        first: (N,) bool, whether the first model has each item right; N ≥ 1.
        second: (N,) bool, likewise of the second model.
        tests: see ``Comparison``.
    """
    n = len(first)
    only_first = int((first & ~second).sum())
    only_second = int((second & ~first).sum())
    less = (only_first + 1) / (n + 2)
    more = (only_second + 1) / (n + 2)
    half = NormalDist().inv_cdf(1 - _TAIL / tests) * math.sqrt((less + more - (more - less) ** 2) / (n + 2))
    return Comparison(
        difference=(only_second - only_first) / n,
        low=max(-1.0, more - less - half),
        high=min(1.0, more - less + half),
        p=mcnemar(only_first, only_second),
        n=n,
    )


def compare_means(first: Tensor, second: Tensor, *, tests: int = 1) -> Comparison:
    """Compare the means of two models' (N,) values (Jaccard, rank …) by a paired bootstrap; N ≥ 1.

    If all items differ by the same amount, the bootstrap has no width. For values in 0 … 1, it is then that of
    two models that are right on the same items.
    """
    distinct, counts = np.unique((second.double() - first.double()).cpu().numpy(), return_counts=True)
    comparison = _compare(mean_statistic(distinct), counts, tests=tests)
    values = torch.stack([first, second])
    if len(distinct) > 1 or values.min() < 0 or values.max() > 1:
        return comparison
    right = torch.ones(len(first), dtype=torch.bool)
    accuracies = compare_correct(right, right, tests=tests)
    low = comparison.difference + accuracies.low
    high = comparison.difference + accuracies.high
    return replace(comparison, low=max(-1.0, low), high=min(1.0, high))


def compare_statistics(
    first: Statistic, second: Statistic, n: int, *, cost: int = 1, tests: int = 1
) -> Comparison:
    """Compare two models' statistics of the same n ≥ 1 items by a paired bootstrap (Efron and Tibshirani 1993).

    Args:
        cost: see ``draw_resamples``.
    """
    ones = np.ones(n, dtype=np.int64)
    return _compare(lambda drawn: second(drawn) - first(drawn), ones, cost=cost, tests=tests)


def _compare(difference: Statistic, counts: Ints, *, cost: int = 1, tests: int = 1) -> Comparison:
    value = float(difference(counts[None])[0])
    blocks = draw_resamples(counts, cost=cost, most=_PAIRED_RESAMPLES)
    drawn = np.concatenate([difference(block) for block in blocks])
    drawn = drawn[~np.isnan(drawn)]
    tail = _TAIL / tests
    low, high = np.percentile(drawn, [100 * tail, 100 * (1 - tail)])
    beside = min(int((drawn <= 0).sum()), int((drawn >= 0).sum()))
    return Comparison(
        difference=value,
        low=min(float(low), value),
        high=max(float(high), value),
        p=min(1.0, 2 * (beside + 1) / (len(drawn) + 1)),
        n=int(counts.sum()),
    )
