"""Tests of metrics of graded relevance against trec_eval and gdeval (both by ir_measures), and by hand."""

import math
import shutil
from collections.abc import Callable
from functools import partial
from itertools import permutations

import ir_measures
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from ir_measures import AP, ERR, RR, Measure, P, nDCG
from torch import Tensor

from eval.metrics import get_metric, graded, ranks
from eval.metrics.graded import (
    Judged,
    average_precision,
    expected_reciprocal_rank,
    judge_ranking,
    ndcg,
    precision,
    rank_biased_precision,
    reciprocal_rank,
)
from eval.metrics.intervals import Floats

SEEDS = st.integers(0, 2**32 - 1)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_BLOCK", 64)  # so that small inputs need several blocks


def some_relevance(seed: int, queries: int, candidates: int, ties: bool) -> tuple[Tensor, Tensor]:
    """Return (Q, M) similarities and grades 0 … 4, at least one above 0 in each row, and a 4 in the first."""
    generator = torch.Generator().manual_seed(seed)
    similarity = torch.randn(queries, candidates, generator=generator)
    if ties:
        similarity = similarity.round()
    grades = torch.randint(-3, 5, (queries, candidates), generator=generator).clamp(min=0)
    grades[:, 0] = torch.randint(1, 5, (queries,), generator=generator)
    grades[0, -1] = 4
    return similarity, grades


def judge(similarity: Tensor, grades: Tensor) -> Judged:
    """Judge candidates whose features are the unit vectors."""
    pairs = grades.nonzero()
    return judge_ranking(similarity, torch.eye(similarity.shape[1]), pairs, grades[tuple(pairs.T)])


def plain_grades(similarity: Tensor, grades: Tensor) -> list[list[int]]:
    """Return the grades of the candidates of each query in order: of equal similarities the lower one first."""
    rows = zip(similarity.tolist(), grades.tolist(), strict=True)
    return [[grade for _, grade in sorted(zip(row, own, strict=True), key=lambda pair: (-pair[0], pair[1]))]
            for row, own in rows]  # fmt: skip


@given(seed=SEEDS, queries=st.integers(1, 6), candidates=st.integers(1, 30), ties=st.booleans())
@settings(max_examples=60, deadline=None)
def test_values_of_queries_equal_trec_eval_and_gdeval(
    seed: int, queries: int, candidates: int, ties: bool
) -> None:
    similarity, grades = some_relevance(seed, queries, candidates, ties)
    judged = judge(similarity, grades)
    ordered = plain_grades(similarity, grades)
    qrels, run = [], []
    for query, row in enumerate(ordered):
        for rank, grade in enumerate(row):
            qrels.append(ir_measures.Qrel(str(query), f"d{rank}", grade))
            # without ties, whose order differs between tools
            run.append(ir_measures.ScoredDoc(str(query), f"d{rank}", float(-rank)))
    cases: dict[Measure, Callable[[Judged], Floats]] = {
        P @ 3: partial(precision, k=3),
        P @ 10: partial(precision, k=10),
        RR: partial(reciprocal_rank, k=1000),
        AP: partial(average_precision, k=1000),
        AP @ 5: partial(average_precision, k=5),
        nDCG: partial(ndcg, k=1000),
        nDCG @ 10: partial(ndcg, k=10),
        nDCG @ 2: partial(ndcg, k=2),
        ERR @ 20: partial(expected_reciprocal_rank, k=20),
        ERR @ 3: partial(expected_reciprocal_rank, k=3),
    }
    if shutil.which("perl") is None:  # which gdeval needs
        del cases[ERR @ 20], cases[ERR @ 3]
    for result in ir_measures.iter_calc(list(cases), qrels, run):
        value = cases[result.measure](judged)[int(result.query_id)]
        # gdeval prints five digits
        assert value == pytest.approx(result.value, abs=1e-5 if "ERR" in str(result.measure) else 1e-9)
    first = [next(i for i, grade in enumerate(row) if grade) for row in ordered]
    cut = [1 / (1 + i) if i < 2 else 0 for i in first]
    assert reciprocal_rank(judged, 2).tolist() == pytest.approx(cut)
    highest = grades.max()
    for p in (0.8, 0.5):
        plain = [(1 - p) * sum(float(g / highest) * p**i for i, g in enumerate(row)) for row in ordered]
        assert rank_biased_precision(judged, p).tolist() == pytest.approx(plain)


def test_values_computed_by_hand() -> None:
    """Grades 2, 0, 1 in this order; the largest grade is 2."""
    judged = judge(torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([[2, 0, 1]]))
    assert judged.rank.tolist() == [0, 2] and judged.grade.tolist() == [2, 1]
    assert precision(judged, 2) == 1 / 2
    assert reciprocal_rank(judged, 3) == 1
    assert average_precision(judged, 3) == (1 + 2 / 3) / 2
    assert average_precision(judged, 2) == 1 / 2
    assert ndcg(judged, 10) == (2 + 1 / 2) / (2 + 1 / math.log2(3))
    # stops at the first with 3/4; else at the third with 1/4
    assert expected_reciprocal_rank(judged, 10) == 3 / 4 + 1 / 4 * 1 / 4 / 3
    assert rank_biased_precision(judged, 0.8)[0] == pytest.approx(0.2 * (1 + 0.5 * 0.64))
    binary = judge(torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([[1, 0, 1]]))
    assert rank_biased_precision(binary, 0.8)[0] == pytest.approx(0.2 * 1.64)


def test_grades_of_hundreds_do_not_overflow() -> None:
    judged = judge(torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([[5000.0, 0, 4999]]))
    assert expected_reciprocal_rank(judged, 10) == 1
    assert judge(torch.tensor([[3.0, 2.0]]), torch.tensor([[0.25, 0.5]])).grade.tolist() == [0.25, 0.5]


@pytest.mark.parametrize("nan", [False, True])
def test_ties_and_nan_never_help(nan: bool) -> None:
    similarity = torch.zeros(1, 4)
    grades = torch.tensor([[2, 0, 1, 0]])
    judged = judge(similarity, grades)
    assert judged.rank.tolist() == [2, 3] and judged.grade.tolist() == [1, 2]
    if nan:
        similarity = torch.tensor([[1.0, 0.5, math.nan, math.nan]])
        judged = judge_ranking(torch.ones(1, 1), similarity.T, grades.nonzero(), torch.tensor([2.0, 1.0]))
        assert judged.rank.tolist() == [1, 3] and judged.grade.tolist() == [2, 1]


@pytest.mark.parametrize(
    "name", ["P@2", "MRR", "MRR@2", "MAP", "MAP@3", "nDCG@3", "nDCG", "ERR", "RBP", "RBP_0.5"]
)
def test_chance_is_the_mean_over_all_orders(name: str) -> None:
    grades = torch.tensor([2, 0, 1, 0, 1])
    metric = get_metric(f"text_to_image_{name}")
    assert metric is not None and metric.kind == "retrieval" and metric.highest == 1.0
    kind, _, k = name.partition("@")
    values: Callable[[Judged], Floats]
    if kind.startswith("RBP"):
        values = partial(rank_biased_precision, persistence=float(kind.partition("_")[2] or 0.8))
    else:
        values = partial(graded.GRADED[kind], k=int(k or 100))
    orders = torch.tensor(list(permutations(range(5)))).float()
    exact = values(judge(orders, grades.expand(len(orders), 5))).mean()
    drawn = values(judge(orders[:1], grades[None]).at_random)
    assert len(drawn) == 1000
    assert drawn.mean() == pytest.approx(exact, abs=4 * float(np.std(drawn)) / math.sqrt(1000))


def test_unknown_names_of_retrieval_metrics_are_none() -> None:
    for name in ("P", "R", "P@0", "nDCG@", "RBP_1", "RBP@5", "RBP_0", "NDCG@10"):
        assert get_metric(f"text_to_image_{name}") is None
