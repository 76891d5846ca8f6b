"""A metric's value with its 95% interval: Wilson's for a proportion, else a seeded bootstrap.

A metric that is no proportion is written as a ``Statistic``: a function of how often each item was drawn. Its
value is that of every item drawn once, its interval comes from items drawn with replacement (Efron 1979), and two
models are compared by giving both the same draws (see compare.py).

Letters in shape comments: N items, R resamples.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
from torch import Tensor

__all__ = [
    "Comparison",
    "Estimate",
    "Statistic",
    "bootstrap_interval",
    "compare_correct",
    "compare_means",
    "compare_statistics",
    "estimate",
    "mcnemar",
    "mean_estimate",
    "mean_statistic",
    "proportion",
    "resamples",
    "statistic_value",
    "wilson_interval",
]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

Statistic = Callable[
    [Ints], Floats
]  # (R, N), how often each item was drawn → (R,); NaN where it is not defined

_Z95 = NormalDist().inv_cdf(0.975)
_RESAMPLES = 1000
_FEWEST = 100
_DRAWN = 1 << 21  # draws held at a time: 16 MiB, and a few arrays of that size beside it
_MOST_DRAWN = 1 << 27  # in all: a large set gets fewer resamples, each of which then varies less


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A measured value and how sure it is.

    Attributes:
        value: of the metric.
        low: lower end of its 95% interval.
        high: upper end.
        n: of how many items it is.
    """

    value: float
    low: float
    high: float
    n: int


def wilson_interval(hits: float, n: float, *, miss: float = 0.05) -> tuple[float, float]:
    """Wilson's interval of a proportion (Wilson 1927), ``hits`` of ``n`` > 0 trials, whole numbers or not.

    Args:
        hits: 0 … n.
        n: trials.
        miss: how often it may miss the truth, half of that at each end; 0.05 for a 95% interval.
    """
    z = _Z95 if miss == 0.05 else NormalDist().inv_cdf(1 - miss / 2)
    share, z2 = hits / n, z**2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = z * math.sqrt(max(0.0, share * (1 - share)) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    # at 0 and n the formula gives 0 and 1 but for rounding
    return (0.0 if hits == 0 else centre - half), (1.0 if hits == n else centre + half)


def proportion(hits: int, n: int) -> Estimate:
    """``hits`` of ``n`` ≥ 1 as a share, with Wilson's interval."""
    low, high = wilson_interval(hits, n)
    return Estimate(value=hits / n, low=low, high=high, n=n)


def resamples(counts: Ints, *, cost: int = 1, number: int | None = None) -> Iterator[Ints]:
    """Draw as many items as there are, with replacement, again and again; seeded: the same call, the same draws.

    Args:
        counts: (N,) int64, how many items are alike at each place; ones where each is one of its own.
        cost: how many times the draws will be worked through, as for a mean over so many classes.
        number: of resamples, 1,000 if not given; fewer, at least 100, where all would take too long.

    Yields:
        (≤ R, N) int64, how often each place was drawn, a block of resamples at a time.
    """
    places, n = len(counts), int(counts.sum())
    number = number or _RESAMPLES
    number = max(min(_FEWEST, number), min(number, _MOST_DRAWN // (places * cost)))
    rows = max(1, _DRAWN // places)
    random = np.random.Generator(np.random.Philox(0))
    each_one = n == places and bool((counts == 1).all())
    for start in range(0, number, rows):
        size = min(rows, number - start)
        if each_one:
            drawn = random.integers(places, size=(size, places)) + np.arange(size)[:, None] * places
            yield np.bincount(drawn.ravel(), minlength=size * places).reshape(size, places)
        else:
            yield random.multinomial(n, counts / n, size=size)


def statistic_value(statistic: Statistic, n: int) -> float:
    """A statistic of ``n`` items, each drawn once."""
    return float(statistic(np.ones((1, n), dtype=np.int64))[0])


def bootstrap_interval(statistic: Statistic, counts: Ints, *, cost: int = 1) -> tuple[float, float]:
    """The 2.5% and 97.5% points of a statistic over ``resamples``; those where it is not defined do not count."""
    values = np.concatenate([statistic(drawn) for drawn in resamples(counts, cost=cost)])
    values = values[~np.isnan(values)]
    if not len(values):
        return math.nan, math.nan
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def estimate(statistic: Statistic, n: int, *, counting: float = 0.0, cost: int = 1) -> Estimate:
    """A statistic's value over ``n`` ≥ 1 items, with the interval of their bootstrap.

    Args:
        statistic: of how often each item was drawn.
        n: items.
        counting: for a value in 0 … 1, the number of trials that it is about as sure as. The interval is then at
            each end the wider of the bootstrap's and Wilson's, since the bootstrap of a model that is always right
            (or nearly) has no width.
        cost: see ``resamples``.
    """
    each = np.ones(n, dtype=np.int64)
    value = float(statistic(each[None])[0])
    low, high = bootstrap_interval(statistic, each, cost=cost)
    if counting > 0:
        wilson = wilson_interval(min(max(value, 0.0), 1.0) * counting, counting)
        low, high = min(low, wilson[0]), max(high, wilson[1])
    return Estimate(value=value, low=min(low, value), high=max(high, value), n=n)


def mean_statistic(values: Tensor | Floats) -> Statistic:
    """The mean of a value that every item has, (N,)."""
    own = np.asarray(values, dtype=np.float64)

    def mean(drawn: Ints) -> Floats:
        result: Floats = drawn @ own / drawn.sum(axis=1)
        return result

    return mean


def mean_estimate(values: Tensor | Floats) -> Estimate:
    """The mean of (N,) values in 0 … 1, N ≥ 1, with a bootstrap interval; Wilson's where they are all the same."""
    own = np.asarray(values, dtype=np.float64)
    some, counts = np.unique(
        own, return_counts=True
    )  # drawing items is drawing from the values that there are
    mean, n = float(own.mean()), len(own)
    if len(some) == 1:
        low, high = wilson_interval(mean * n, n)
    else:
        low, high = bootstrap_interval(mean_statistic(some), counts)
    return Estimate(value=mean, low=low, high=high, n=n)


# --------------------------------------------------------------------------------------------------------------
# Whether one model is better than another beyond chance: paired tests on the same items.
#
# Letters in shape comments: N items, R resamples.

_PAIRED_RESAMPLES = 10_000  # the least p-value that a bootstrap can tell is 2 in one more


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
    blocks = resamples(counts, cost=cost, number=_PAIRED_RESAMPLES)
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
