"""Metrics of retrieval when a query has several relevant candidates, perhaps of different grades.

Each is a function of ``Judged`` that returns a value in 0 … 1 of each query: precision, reciprocal rank, average
precision, nDCG, expected reciprocal rank (ERR) and rank-biased precision (RBP). A candidate is relevant if its
grade is above 0; candidates without a grade have grade 0. Of equal similarities the lower grade comes first, and a
NaN similarity never helps.

Dimensions: Q queries, M candidates, P pairs of a query and a relevant candidate.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from torch import Tensor

from eval.metrics.intervals import Bools, Floats, Ints
from eval.metrics.ranks import count_ahead

_RANDOM_PAIRS = 1 << 16
_MOST_RANDOM = 1000  # random rankings of each query


@dataclass(frozen=True, kw_only=True, eq=False)
class Judged:
    """The relevant candidates of all queries, sorted by query and rank.

    Attributes:
        queries: Q.
        candidates: M.
        query: (P,) int64 in 0 … Q-1; each occurs.
        rank: (P,) int64 in 0 … M-1, the number of candidates before this one.
        grade: (P,) float64, above 0.
    """

    queries: int
    candidates: int
    query: Ints
    rank: Ints
    grade: Floats

    @cached_property
    def position(self) -> Ints:
        """(P,) int64 from 0, the index of each pair among those of its query."""
        starts = np.searchsorted(self.query, np.arange(self.queries))
        return np.arange(len(self.query)) - starts[self.query]

    def sum(self, values: Floats | Bools) -> Floats:
        """Return the sum of (P,) values over the pairs of each query, (Q,) float64."""
        sums: Floats = np.bincount(self.query, values, minlength=self.queries).astype(np.float64)
        return sums

    @cached_property
    def at_random(self) -> "Judged":
        """Candidates in random order, from a fixed seed: R rankings of all queries, one after another."""
        generator = np.random.Generator(np.random.Philox(0))
        rankings = max(1, min(_MOST_RANDOM, _RANDOM_PAIRS // len(self.query)))
        counts = np.tile(np.bincount(self.query), rankings)
        ranks = [generator.choice(self.candidates, count, replace=False) for count in counts]
        copies = np.repeat(np.arange(rankings), len(self.query)) * self.queries
        shuffled = replace(
            self,
            queries=rankings * self.queries,
            query=np.tile(self.query, rankings) + copies,
            rank=np.concatenate(ranks),
            grade=np.tile(self.grade, rankings),
        )
        order = np.lexsort((shuffled.rank, shuffled.query))
        return replace(shuffled, rank=shuffled.rank[order], grade=shuffled.grade[order])


def judge_ranking(queries: Tensor, candidates: Tensor, pairs: Tensor, grades: Tensor) -> Judged:
    """Rank the candidates of each query by similarity.

    Args:
        queries: (Q, D).
        candidates: (M, D).
        pairs: (P, 2) int64 of (query, relevant candidate), unique, sorted by query, at least one for every query.
        grades: (P,) above 0.
    """
    ahead = count_ahead(queries, candidates, pairs).numpy()
    query = pairs[:, 0].numpy()
    grade = grades.double().numpy()
    order = np.lexsort((grade, ahead, query))
    # pairs of equal similarity have all of them ahead, and take the last of these ranks
    key = np.stack([query, ahead])[:, order]
    starts = np.flatnonzero(np.r_[True, (key[:, 1:] != key[:, :-1]).any(axis=0)])
    sizes = np.diff(np.r_[starts, len(order)])
    rank = ahead[order] - np.repeat(starts + sizes, sizes) + np.arange(len(order))
    return Judged(
        queries=len(queries), candidates=len(candidates), query=query[order], rank=rank, grade=grade[order]
    )


def precision(judged: Judged, k: int) -> Floats:
    """Return the fraction of the first k candidates that is relevant."""
    return judged.sum(judged.rank < k) / k


def reciprocal_rank(judged: Judged, k: int) -> Floats:
    """Return 1 / (rank of the first relevant candidate, from 1), or 0 if it is not among the first k."""
    return judged.sum((judged.position == 0) * (judged.rank < k) / (judged.rank + 1))


def average_precision(judged: Judged, k: int) -> Floats:
    """Return the mean over all relevant candidates of the precision at each, 0 for those beyond the first k."""
    precisions = (judged.position + 1) / (judged.rank + 1)
    return judged.sum((judged.rank < k) * precisions) / judged.sum(judged.grade > 0)


def ndcg(judged: Judged, k: int) -> Floats:
    """Return the sum of grade / log2(1 + rank from 1) over the first k, divided by that of the best ranking.

    (Järvelin and Kekäläinen 2002; the gain is the grade itself, as in trec_eval.)
    """
    best = judged.grade[np.lexsort((-judged.grade, judged.query))]
    ideal = judged.sum((judged.position < k) * best / np.log2(judged.position + 2))
    return judged.sum((judged.rank < k) * judged.grade / np.log2(judged.rank + 2)) / ideal


def expected_reciprocal_rank(judged: Judged, k: int) -> Floats:
    """Return the mean of 1 / (rank from 1) at which a user is satisfied and stops, 0 beyond the first k.

    (Chapelle et al. 2009.) A candidate satisfies with probability (2^grade - 1) / 2^(highest grade of all).
    """
    highest = judged.grade.max()
    satisfies = 2 ** (judged.grade - highest) - 2**-highest
    reads_on = np.ones(judged.queries)
    value = np.zeros(judged.queries)
    order = np.argsort(judged.position, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(judged.position[order])) + 1):
        query = judged.query[rows]
        value[query] += reads_on[query] * satisfies[rows] * (judged.rank[rows] < k) / (judged.rank[rows] + 1)
        reads_on[query] *= 1 - satisfies[rows]
    return value


def rank_biased_precision(judged: Judged, persistence: float) -> Floats:
    """Return (1 - p) times the sum of p^(rank from 0) × grade / (highest grade of all).

    (Moffat and Zobel 2008.) p is the probability that a user looks at the next candidate.
    """
    gain = judged.grade / judged.grade.max()
    return (1 - persistence) * judged.sum(gain * persistence**judged.rank)


# by name; the number of candidates that are looked at may follow, as in "nDCG@10"
GRADED: Mapping[str, Callable[..., Floats]] = {
    "P": precision,
    "MRR": reciprocal_rank,
    "MAP": average_precision,
    "nDCG": ndcg,
    "ERR": expected_reciprocal_rank,
}
