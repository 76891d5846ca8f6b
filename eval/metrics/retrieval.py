"""Retrieval from the ranks of ``match_ranks``: recall among the first k, mean and median rank, and chance.

Letters in shape comments: Q queries.
"""

import math

import numpy as np
import torch
from torch import Tensor

from eval.metrics.intervals import (
    Estimate,
    Ints,
    bootstrap_interval,
    mean_statistic,
    proportion,
    wilson_interval,
)

__all__ = ["chance_of_recall", "mean_rank", "median_rank", "recall_at_k"]


def recall_at_k(
    ranks: Tensor, k: int, weight: Tensor | None = None, *, cluster: Tensor | None = None
) -> Estimate:
    """R@k: the share of queries with a right candidate among the first k.

    One right candidate is enough, however many there are (Karpathy and Fei-Fei 2015, arXiv 1412.2306, and all
    CLIP papers). CLIP_benchmark's ``image_retrieval_recall@k`` and ``text_retrieval_recall@k`` name what is
    found. There a tie is settled in whatever order ``topk`` gives; here a wrong candidate goes first, so that a
    collapsed model finds nothing.

    Args:
        ranks: (Q,) int64 of ``match_ranks``, Q ≥ 1.
        k: at least 1.
        weight: (Q,) int64, how often each query stands in the list; once if not given.
        cluster: (Q,) int64, which queries go together, as the captions of one picture do: the interval is then of
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
